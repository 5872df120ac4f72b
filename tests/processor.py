"""Processor time of process trees, from /proc: what other programs do not change."""

import os
from pathlib import Path
from typing import NamedTuple

TICK = 1 / os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A line of /proc/PID/stat; ``seconds`` includes the children it has waited for."""

    parent: int
    session: int
    running: bool
    seconds: float


def processes():
    """Return all processes of this machine that can be read, by their id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        state, *fields = text.rpartition(")")[2].split()
        ticks = sum(map(int, fields[10:14]))
        found[int(folder.name)] = Process(
            int(fields[0]), int(fields[2]), state in "RD", ticks * TICK
        )
    return found


def tree(root):
    """Return the processes that ``root`` has started, directly or not, and itself.

    Also those whose parent has ended, if ``root`` began their session.
    """
    every = processes()
    members, more = set(), {root}
    more |= {pid for pid, each in every.items() if each.session == root}
    while more:
        members |= more
        more = {pid for pid, each in every.items() if each.parent in more} - members
    return {pid: every[pid] for pid in members if pid in every}


def seconds(root):
    """Return the processor time of a tree: of its processes, and of those that ended.

    A process counts that has ended if its parent, which waits for it, is in the tree.
    """
    return sum(each.seconds for each in tree(root).values())
