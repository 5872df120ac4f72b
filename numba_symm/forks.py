"""Forked children: the objects that they inherit still belong to their parent."""

import os
import weakref
from typing import Protocol

ADVICE = "start processes with spawn, and construct what they need there"


class Inherited(Protocol):
    """An object that a forked child must neither use nor release."""

    def disown(self) -> None:
        """Give it up, in a child. Nothing of the parent may change."""


_watched: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def watch(thing: Inherited) -> None:
    """Have ``thing.disown()`` run in every child that this process forks."""
    _watched.add(thing)


def _disown() -> None:
    for thing in list(_watched):
        thing.disown()


os.register_at_fork(after_in_child=_disown)
