"""Communicators of mpi4py whose calls are counted, to see whether any blocks."""

from collections import Counter

from mpi4py import MPI

LOCAL = {"Get_rank", "Get_size", "Get_attr", "Set_attr", "test", "Test"}
"""Calls that MPI answers from this process only, although no I begins their names."""

called = Counter()


class Watched:
    """Counts the calls of an object of MPI's, and of what they return, by name."""

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*given, **options):
            called[name] += 1
            return watched(found(*given, **options))

        return call


class WatchedComm(Watched, MPI.Intracomm):
    pass


class WatchedMessage(Watched, MPI.Message):
    pass


class WatchedRequest(Watched, MPI.Request):
    pass


def watched(result):
    if isinstance(result, tuple):
        return tuple(map(watched, result))
    for kind in (WatchedComm, WatchedMessage, WatchedRequest):
        if isinstance(result, kind.__bases__[1]) and not isinstance(result, Watched):
            return kind(result)
    return result


def blocking():
    """Return the names of the calls that may wait for another rank.

    In MPI, the names of calls that return immediately begin with an I.
    """
    return {name for name in called if name[0] not in "iI"} - LOCAL
