"""The ranks: the communicator that the caller passed, and their names in texts."""

import operator
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Protocol, cast

from numba_symm import forks
from numba_symm.arguments import shown
from numba_symm.environment import warn_once
from numba_symm.errors import ArgumentError, CollectiveError, RankLeft


class Comm(Protocol):
    """The members that a communicator needs; mpi4py's have them."""

    @property
    def rank(self) -> int:
        """This process' number, from 0."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Return every rank's picklable object, in rank order."""

    def barrier(self) -> None:
        """Return once every rank has called it."""


def checked(comm: object) -> Comm:
    """Return ``comm``. Raise :class:`ArgumentError` if it is not a communicator."""
    if comm is None or (is_mpi(comm) and not comm):  # MPI.COMM_NULL
        raise ArgumentError(
            f"expected a communicator, got {shown(comm)}; pass one that this process "
            "belongs to, such as MPI.COMM_WORLD"
        )
    refuse_unusable(comm)
    members = ("rank", "size", "allgather", "barrier")
    lacking = [name for name in members if not hasattr(comm, name)]
    if lacking:
        raise ArgumentError(
            f"expected a communicator, got {shown(comm)}, which has no "
            f"{', '.join(lacking)}; pass an mpi4py communicator or any object with "
            "rank, size, allgather and barrier"
        )
    found = cast(Any, comm)
    rank, size = found.rank, found.size
    if not (are_integers(rank, size) and 0 <= rank < size):
        raise ArgumentError(
            f"expected a communicator whose rank is an integer from 0 to size - 1, got "
            f"{shown(comm)} with rank {rank!r} of size {size!r}"
        )
    if getattr(comm, "is_inter", False):
        raise ArgumentError(
            "expected an intracommunicator, got an intercommunicator; pass comm.Merge()"
        )
    return cast(Comm, found)


def refuse_unusable(comm: object) -> None:
    """Raise :class:`ArgumentError` if MPI permits no call of its communicators."""
    if not is_mpi(comm):
        return
    mpi = sys.modules["mpi4py.MPI"]
    if _mpi_is_the_parents:
        raise ArgumentError(
            f"{shown(comm)} cannot be used, because this process was forked from one "
            f"that uses MPI; {forks.ADVICE}"
        )
    if mpi.Is_finalized():
        raise ArgumentError(
            "MPI has been finalized, so no communicator can be made; make and split "
            "them before MPI.Finalize()"
        )
    if not mpi.Is_initialized():
        raise ArgumentError(
            f"expected MPI to be initialized, got {shown(comm)} before MPI.Init(); "
            "call MPI.Init() first, or leave mpi4py.rc.initialize True"
        )


def are_integers(*numbers: Any) -> bool:
    """Return whether all are integers, of any type."""
    return all(isinstance(number, Integral) for number in numbers)


_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""The variables in which launchers pass the number of ranks, the innermost one first.

Slurm's is that of a step, because programs outside of a step have SLURM_NTASKS, too.
"""


def warn_if_alone(comm: object) -> None:
    """Warn, once in a process, if a launcher has started more ranks than MPI has.

    ``comm`` may be anything; only mpi4py's communicators are checked.
    """
    if not is_mpi(comm):
        return
    mpi = sys.modules["mpi4py.MPI"]
    set_by_launcher = _set_by_launcher()
    usable = mpi.Is_initialized() and not mpi.Is_finalized()
    if not usable or mpi.COMM_WORLD.size > 1 or set_by_launcher is None:
        return
    variable, size = set_by_launcher
    if size > 1:
        warn_once(
            f"MPI.COMM_WORLD has 1 rank, but the launcher set {variable}: the launcher "
            "and mpi4py use different MPI libraries; start the program with the "
            "launcher of the one that `numba-symm info` names"
        )


def _set_by_launcher() -> tuple[str, int] | None:
    """Return a launcher's variable, and the least number of ranks that it implies."""
    for name in _SIZES:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return f"{name}={value}", int(value)
    rank = os.environ.get("PMIX_RANK", "")  # PMIx has no variable for the size
    return (f"PMIX_RANK={rank}", int(rank) + 1) if rank.isdecimal() else None


def launched_size() -> int:
    """Return the least number of ranks that a launcher has started; 1 without one."""
    return (_set_by_launcher() or ("", 1))[1]


def launched_rank() -> int:
    """Return this process' number among them; 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def refuse_undivided(comm: object) -> None:
    """Raise :class:`ArgumentError` if an object of the user's has no method split."""
    if not hasattr(comm, "split"):
        raise ArgumentError(
            f"split: {comm!r} has no method split; give it split(color, key), "
            "collective, which returns an object of its kind between the ranks of "
            "equal color, ordered by key and then rank, and None where color is None"
        )


def color_and_key(color: Any, key: Any) -> tuple[int | None, int]:
    """Return a split's color, None for no group, and its key. Not collective.

    Raises:
        ArgumentError: MPI would not accept them.
    """
    number = _checked_int(key, -_MPI_INTS, "key", "an int of 32 bits")
    undefined = getattr(sys.modules.get("mpi4py.MPI"), "UNDEFINED", None)
    if color is None or (isinstance(color, int) and color == undefined):
        return None, number
    what = "an int of 0 to 2**31 - 1, or None for no group"
    return _checked_int(color, 0, "color", what), number


_MPI_INTS = 1 << 31  # MPI's are C's


def _checked_int(value: Any, least: int, name: str, what: str) -> int:
    try:
        number = operator.index(value)
    except Exception:  # whatever an object's own method raises
        number = _MPI_INTS
    if not least <= number < _MPI_INTS:
        raise ArgumentError(f"split: {name}={shown(value)}: expected {what}")
    return number


def split(comm: Any, color: int | None, key: int) -> Comm | None:
    """Return a communicator of the ranks that pass this color, None for color None.

    Collective, by the method ``split`` of an object of the user's. The ranks are
    ordered by ``key``, then by their rank in ``comm``.
    """
    made = comm.split(color, key)
    return None if color is None else checked(made)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 0, 1, 3"."""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"


def grouped(texts: dict[int, str]) -> dict[str, list[int]]:
    """Return the ranks that share each text, in order of their lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return groups


def sentence(texts: dict[int, str], one: str, many: str) -> str:
    """Return "rank 0 <one> a, ranks 1, 2 <many> b", grouped by equal texts."""
    return ", ".join(
        f"{name_ranks(ranks)} {one if len(ranks) == 1 else many} {text}"
        for text, ranks in grouped(texts).items()
    )


_mpi_is_the_parents = False  # true in a child forked from a process of MPI


def _leave_mpi_to_the_parent() -> None:
    global _mpi_is_the_parents
    mpi = sys.modules.get("mpi4py.MPI")
    _mpi_is_the_parents = mpi is not None and mpi.Is_initialized()


os.register_at_fork(after_in_child=_leave_mpi_to_the_parent)


def is_mpi(comm: object) -> bool:
    """Return whether ``comm`` is a communicator of mpi4py's."""
    # Do not import mpi4py.MPI, because that calls MPI_Init. Whoever has one of its
    # communicators has imported it.
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(comm, mpi.Comm)


def mpi() -> Any:
    """Return mpi4py's module, for a communicator that is mpi4py's."""
    return sys.modules["mpi4py.MPI"]


def progress() -> None:
    """Let MPI make progress, which it does only within its calls.

    A peer may arrive only after this process has received the peer's message.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main():
        mpi.COMM_SELF.Iprobe()


@contextmanager
def living(rank: int) -> Iterator[None]:
    """Name ``rank`` if MPI raises in the block, which has messages with that rank.

    Raises:
        RankLeft: the rank has ended, as MPI reports.
        CollectiveError: MPI reports another error.
    """
    try:
        yield
    except mpi().Exception as error:
        if is_of_ended_process(error):
            text = f"rank {rank} has ended, as MPI reports ({error})"
            raise RankLeft(text, ranks=(rank,)) from error
        text = f"MPI has failed in a message with rank {rank} ({error})"
        raise CollectiveError(text, ranks=(rank,)) from error


def is_of_ended_process(error: Any) -> bool:
    """Return whether an exception of MPI's states that a process has ended."""
    # mpi4py gives a class that the MPI library does not have the number of another one.
    names = "ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING"
    classes = {getattr(mpi(), name, None) for name in names} - {mpi().ERR_UNKNOWN}
    return error.Get_error_class() in classes
