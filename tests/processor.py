"""Processor time of process trees, from /proc: what other programs do not change."""

import os
from pathlib import Path
from typing import NamedTuple

TICK = 1 / os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A line of /proc/PID/stat; ``seconds`` includes the children it has waited for."""

    state: str
    parent: int
    session: int
    seconds: float


def process(pid, folder="/proc"):
    """Return a process, or None if there is none."""
    try:
        text = Path(folder, str(pid), "stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    ticks = sum(map(int, fields[10:14]))
    return Process(state, int(fields[0]), int(fields[2]), ticks * TICK)


def runs(pid):
    """Return whether a thread of a process runs, wants to run or waits for a disk."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        found = [process(task.name, tasks) for task in tasks.iterdir()]
    except OSError:
        return False
    return any(each and each.state in "RD" for each in found)


def processes():
    """Return all processes of this machine that can be read, by their id."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return {pid: found for pid in pids if (found := process(pid))}


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
