"""Forked children: what they inherit still belongs to their parent."""

import os
import weakref
from typing import Protocol

ADVICE = "start processes by spawn, and make what they need there"


class Inherited(Protocol):
    """What a forked child must not use, nor give back."""

    def disown(self) -> None:
        """Let go of it, in a child: nothing that the parent has may change."""


_watched: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def watch(thing: Inherited) -> None:
    """Have ``thing.disown()`` run in every child that this process forks."""
    _watched.add(thing)


def _disown() -> None:
    for thing in list(_watched):
        thing.disown()


os.register_at_fork(after_in_child=_disown)
