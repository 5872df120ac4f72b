"""mpi4py's collectives, reductions and operators, on device arrays.

The collectives of mpi4py, as calls of a communicator on device arrays.

Each function has the arguments of mpi4py's method, and returns the job that executes
the call, or None if its arrays are on the host. ``mpi/jobs.py`` makes the blocking, the
nonblocking and the persistent method from it.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from numba_symm import dtypes
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.invocation import are_apart, check_writable
from numba_symm.gpu import arrays, streams
from numba_symm.mpi import buffers
from numba_symm.mpi.buffers import BYTE, Items, in_place, message, on_device
from numba_symm.mpi.datatypes import naturals
from numba_symm.mpi.errors import refusal, unsupported
from numba_symm.mpi.jobs import Build, Job
from numba_symm.mpi.posts import Post


class Ranks(Protocol):
    """What a collective needs of ``numba_symm.mpi.Comm``."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def communicator(self) -> Communicator:
        """The communicator, made by all ranks together when first needed."""

    @property
    def post(self) -> Post:
        """The messages of this rank."""


def of_arrays(build: Callable[..., Job]) -> Callable[..., Job | None]:
    """Return what makes no job if the first two arguments are on the host."""

    def built(comm: Ranks, sendbuf: Any, recvbuf: Any, *rest: Any) -> Job | None:
        there = on_device(sendbuf, recvbuf)
        return build(comm, sendbuf, recvbuf, *rest) if there else None

    return built


def rooted(own: int) -> Callable[[Callable[..., Job]], Callable[..., Job | None]]:
    """Return what does so for a call with a root, the last argument.

    Args:
        own: the argument that is an array on all ranks; the other is one at the root.
    """

    def of(build: Callable[..., Job]) -> Callable[..., Job | None]:
        def built(comm: Ranks, *args: Any) -> Job | None:
            root = args[-1]
            check_root(comm, root, build.__name__.capitalize(), args[own])
            there = on_device(*args[:2]) if comm.rank == root else on_device(args[own])
            return build(comm, *args) if there else None

        return built

    return of


def barrier(comm: Ranks) -> Job:
    """Wait for all ranks, and for the earlier work of their streams."""
    job = Job(comm.communicator, "Barrier")
    job.call(comm.communicator.barrier)
    return job


def bcast(comm: Ranks, buf: Any, root: int = 0) -> Job | None:
    """Send ``root``'s items to all ranks."""
    if not on_device(buf):
        return None
    check_root(comm, root, "Bcast")
    found = message(buf)
    job = Job(comm.communicator, "Bcast", found.array)
    x = job.read(found) if comm.rank == root else job.write(found)
    job.call(comm.communicator.broadcast, x, root=root)
    return job


@rooted(0)
def gather(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job:
    """Gather every rank's items on ``root``."""
    into = message(recvbuf, comm.size) if comm.rank == root else None
    job, x, out = _gathered(comm, "Gather", sendbuf, into, root)
    job.call(comm.communicator.gather, x, root=root, out=out)
    return job


def _gathered(
    comm: Ranks, what: str, sendbuf: Any, into: Items | None, root: int
) -> tuple[Job, Any, Any]:
    """Return the job, this rank's input and the output of a gather on ``root``."""
    if into is None:
        return sent(comm, what, message(sendbuf))
    job = Job(comm.communicator, what, into.array)
    whole = into._replace(number=into.number * comm.size)
    if in_place(sendbuf):
        out, count = job.update(whole), into.size  # this rank's items are there
        return job, job.flat(out, None, comm.rank * count, count), out
    out = job.write(whole)
    return job, job.read(message(sendbuf)), out


def sent(comm: Ranks, what: str, found: Items) -> tuple[Job, Any, None]:
    """Return the job and the input of a rank that has no output."""
    job = Job(comm.communicator, what, found.array)
    return job, job.read(found), None


@rooted(0)
def gatherv(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job:
    """Gather every rank's items, of any number, on ``root``."""
    if comm.rank != root:
        job, x, _ = sent(comm, "Gatherv", message(sendbuf))
        job.call(comm.communicator.gather_v, job.flat(x, BYTE), root=root)
        return job
    given = comm, "Gatherv", sendbuf, recvbuf, root, comm.communicator.gather_v
    return _gathered_parts(*given, root=root)


def _gathered_parts(
    comm: Ranks,
    what: str,
    sendbuf: Any,
    recvbuf: Any,
    rank: int,
    method: Any,
    **options: int,
) -> Job:
    """Return the job of a rank whose output has the items of all ranks.

    The items of ``rank``, this one, may be there before.
    """
    parts = buffers.vector(recvbuf, comm.size).parts
    job = Job(comm.communicator, what, parts[0].array)
    packed, counts = _room(job, parts), _counts(parts)
    own = parts[rank]
    if not in_place(sendbuf):
        own = _as_many(message(sendbuf), own, rank, what)
    x = job.flat(job.read(own), BYTE)
    job.call(method, x, counts=counts, out=packed, **options)
    _spread(job, parts, packed)
    return job


@rooted(1)
def scatter(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job:
    """Give each rank its items of ``root``'s array."""
    method = comm.communicator.scatter
    if comm.rank != root:
        into = message(recvbuf)
        job = Job(comm.communicator, "Scatter", into.array)
        job.call(method, None, root=root, out=job.write(into))
        return job
    of = message(sendbuf, comm.size)
    job = Job(comm.communicator, "Scatter", of.array)
    x = job.flat(job.read(of._replace(number=of.number * comm.size)))
    if in_place(recvbuf):
        out = job.flat(x, None, root * of.size, of.size)
    else:
        out = job.write(message(recvbuf))
        out = job.flat(out, arrays.view(x, job.what).dtype)
    job.call(method, x, root=root, out=out)
    return job


@rooted(1)
def scatterv(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job:
    """Give each rank its items, of any number, of ``root``'s array."""
    method = comm.communicator.scatter_v
    if comm.rank != root:
        into = message(recvbuf)
        job = Job(comm.communicator, "Scatterv", into.array)
        job.call(method, None, root=root, out=job.flat(job.write(into), BYTE))
        return job
    parts = buffers.vector(sendbuf, comm.size).parts
    job = Job(comm.communicator, "Scatterv", parts[0].array)
    packed, counts = _room(job, parts), _counts(parts)
    _moved(job, parts, packed, out=False)
    if in_place(recvbuf):
        out = job.temporary(counts[root], BYTE)
    else:
        into = _as_many(message(recvbuf), parts[root], root, "Scatterv")
        out = job.flat(job.write(into), BYTE)
    job.call(method, packed, counts=counts, root=root, out=out)
    return job


@of_arrays
def allgather(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job:
    """Give every rank the items of all ranks."""
    into = message(recvbuf, comm.size)
    job, x, out = _gathered(comm, "Allgather", sendbuf, into, comm.rank)
    x = job.flat(x, arrays.view(out, job.what).dtype)
    job.call(comm.communicator.all_gather, x, out=job.flat(out))
    return job


@of_arrays
def allgatherv(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job:
    """Give every rank the items of all ranks, of any numbers."""
    method = comm.communicator.all_gather_v
    return _gathered_parts(comm, "Allgatherv", sendbuf, recvbuf, comm.rank, method)


@of_arrays
def alltoall(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job:
    """Send each rank its items, and receive items from every rank."""
    into = message(recvbuf, comm.size)
    job = Job(comm.communicator, "Alltoall", into.array)
    whole = into._replace(number=into.number * comm.size)
    if in_place(sendbuf):
        x = job.flat(job.update(whole))
        job.call(comm.communicator.all_to_all, x, out=x)
        return job
    of = message(sendbuf, comm.size)
    x = job.flat(job.read(of._replace(number=of.number * comm.size)))
    out = job.flat(job.write(whole), arrays.view(x, job.what).dtype)
    job.call(comm.communicator.all_to_all, x, out=out)
    return job


@of_arrays
def alltoallv(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job:
    """Send each rank items, of any number, and receive items from every rank."""
    given = comm, "Alltoallv", sendbuf, recvbuf
    return _exchanged(*given, lambda *spec: buffers.vector(*spec).parts)


@of_arrays
def alltoallw(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job:
    """Send each rank items of any type and number, and receive such."""
    return _exchanged(comm, "Alltoallw", sendbuf, recvbuf, buffers.typed)


def _exchanged(
    comm: Ranks,
    what: str,
    sendbuf: Any,
    recvbuf: Any,
    items: Callable[[Any, int], list[Items]],
) -> Job:
    outgoing = incoming = items(recvbuf, comm.size)
    if not in_place(sendbuf):
        outgoing = items(sendbuf, comm.size)
    there, here = outgoing[comm.rank].nbytes, incoming[comm.rank].nbytes
    if there != here:
        raise refusal(
            MPI.ERR_COUNT,
            f"{what}: rank {comm.rank} sends itself {there} bytes, but receives {here} "
            "of itself; pass equal counts",
        )
    sends, receives = [[each] for each in outgoing], [[each] for each in incoming]
    return exchanged(comm, what, sends, receives)


def exchanged(
    comm: Ranks,
    what: str,
    outgoing: list[list[Items]],
    incoming: list[list[Items]],
) -> Job:
    """Return the job that sends messages to and receives some from every rank.

    Args:
        comm: the communicator.
        what: the call.
        outgoing: for each rank the messages to it.
        incoming: for each rank the messages from it, in the order in which it sends.
    """
    sends, receives = (list(itertools.chain(*each)) for each in (outgoing, incoming))
    every = sends + receives
    job = Job(comm.communicator, what, every[0].array if every else None)
    packed, received = _room(job, sends), _room(job, receives)
    there, here = (arrays.view(each, what) for each in (packed, received))
    if (there.address, there.nbytes) == (here.address, here.nbytes):
        packed = received  # for the communicator, equal arrays mean a call in place
    _moved(job, sends, packed, out=False)
    counts = [
        [sum(part.nbytes for part in parts) for parts in each]
        for each in (outgoing, incoming)
    ]
    options = {"send_counts": counts[0], "recv_counts": counts[1], "out": received}
    job.call(comm.communicator.all_to_all_v, packed, **options)
    _spread(job, receives, received)
    return job


def _as_many(found: Items, part: Items, rank: int, what: str) -> Items:
    """Return this rank's items, or refuse them if they are not those of its count."""
    if found.nbytes != part.nbytes:
        raise refusal(
            MPI.ERR_COUNT,
            f"{what}: expected {part.nbytes} bytes, which are counts[{rank}] items, "
            f"got {found.nbytes}; pass as many",
        )
    return found


def _counts(parts: list[Items]) -> list[int]:
    return [part.nbytes for part in parts]


def _room(job: Job, parts: list[Items]) -> Any:
    """Return room for the bytes of all parts.

    If the parts lie one after another, it is their own memory.
    """
    counts = _counts(parts)
    starts = list(
        itertools.accumulate(counts, initial=parts[0].address if parts else 0)
    )
    ordered = all(
        part.layout.runs is None and (part.address == start or not part.nbytes)
        for part, start in zip(parts, starts[:-1], strict=True)
    )
    if parts and ordered:
        job.keep(parts[0].array)
        return buffers.at(parts[0].address, sum(counts), BYTE, parts[0].array)
    return job.temporary(sum(counts), BYTE)


def _spread(job: Job, parts: list[Items], packed: Any) -> None:
    """Add the copies of one array to all parts."""
    for part in parts:
        check_writable(part.view, job.what)
    _moved(job, parts, packed, out=True)


def _moved(job: Job, parts: list[Items], packed: Any, out: bool) -> None:
    address, first = arrays.view(packed, job.what).address, 0
    for part in parts:
        if part.nbytes and part.layout.runs is not None:
            place = buffers.at(address + first, part.nbytes, BYTE, packed)
            job.then_move(buffers.unpack if out else buffers.pack, part, place)
        elif part.nbytes and part.address != address + first:
            places = part.address, address + first
            target, source = places if out else places[::-1]
            job.then(partial(streams.copy, target, source, part.nbytes))
        first += part.nbytes
    job.keep(*(part.array for part in parts))


def check_root(comm: Ranks, root: Any, what: str, own: Any = None) -> None:
    """Refuse a root that is not a rank, and MPI.IN_PLACE as ``own`` of other ranks."""
    if not 0 <= root < comm.size:
        raise refusal(
            MPI.ERR_ROOT,
            f"{what}: expected a root from 0 to {comm.size - 1}, got {root}; pass one "
            "of these",
        )
    if comm.rank != root and buffers.is_constant(own, MPI.IN_PLACE):
        raise refusal(
            MPI.ERR_BUFFER,
            f"{what}: MPI.IN_PLACE is for the root, rank {root}; pass an array here",
        )


_NAMES = {
    getattr(MPI, name.upper()).handle: name
    for name in (*dtypes.REDUCTIONS, *dtypes.LOCATED)
    if hasattr(MPI, name.upper())  # MPI has no AVG
}


def operator(op: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Return what the communicator's methods take as ``op``, for items of a dtype.

    Names, such as ``"avg"``, and functions of two scalars are the library's own.
    """
    if not isinstance(op, MPI.Op):
        dtypes.reduction(op, what)  # refuses it, also for a later start
        return op
    name = _NAMES.get(op.handle)
    if name in dtypes.LOCATED and dtype.names is None:
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.MINLOC and MPI.MAXLOC need pairs, such as of MPI.FLOAT_INT; "
            "pass [x, MPI.FLOAT_INT]",
        )
    if name is not None:
        return name
    if op == MPI.OP_NULL:
        raise refusal(
            MPI.ERR_OP, f"{what}: expected an operator, got MPI.OP_NULL; pass MPI.SUM"
        )
    if op in (MPI.REPLACE, MPI.NO_OP):
        raise refusal(
            MPI.ERR_OP,
            f"{what}: MPI.REPLACE and MPI.NO_OP are operators of one-sided calls only;"
            " pass another one",
        )
    raise unsupported(
        f"{what}: an operator of MPI.Op.Create works on host buffers; pass its "
        "function of two scalars as op, which is compiled for the GPU"
    )


@rooted(0)
def reduce(
    comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0
) -> Job:
    """Reduce all ranks' items, element by element, on ``root``."""
    if comm.rank == root:
        job, x, out = _reduced(comm, "Reduce", sendbuf, recvbuf)
    else:
        found = _elements(message(sendbuf), "Reduce")
        job, x, out = sent(comm, "Reduce", found)
    _call(job, comm.communicator.reduce, x, op, root=root, out=out)
    return job


def _reduction(what: str, method: str) -> Build:
    """Return what makes the job of a reduction that all ranks get."""

    @of_arrays
    def build(comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any) -> Job:
        job, x, out = _reduced(comm, what, sendbuf, recvbuf)
        _call(job, getattr(comm.communicator, method), x, op, out=out)
        return job

    return build


allreduce, scan = _reduction("Allreduce", "all_reduce"), _reduction("Scan", "scan")


@of_arrays
def exscan(comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Job:
    """Reduce the items of ranks 0 to r - 1, on each rank r but 0."""
    if comm.rank == 0 and in_place(sendbuf):  # MPI does not change the array there
        found = _elements(message(recvbuf), "Exscan")
        job, x, _ = sent(comm, "Exscan", found)
        out = job.temporary(found.size, found.layout.base)
    else:
        job, x, out = _reduced(comm, "Exscan", sendbuf, recvbuf)
    _call(job, comm.communicator.exscan, x, op, out=out)
    return job


@of_arrays
def reduce_scatter_block(
    comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM
) -> Job:
    """Reduce all ranks' items, and give each rank as many of the result."""
    what = "Reduce_scatter_block"
    if in_place(sendbuf):
        into = _elements(message(recvbuf, comm.size), what)
        of = into._replace(number=into.number * comm.size)
    else:
        into = _elements(message(recvbuf), what)
        of = message(sendbuf, comm.size)
        _check_equal(of, into, what)
        of = of._replace(number=of.number * comm.size)
    counts = [into.number] * comm.size
    return _reduced_shards(comm, what, of, into, counts, op)


@of_arrays
def reduce_scatter(
    comm: Ranks,
    sendbuf: Any,
    recvbuf: Any,
    recvcounts: Sequence[int] | None = None,
    op: Any = MPI.SUM,
) -> Job:
    """Reduce all ranks' items, and give each rank a number of the result."""
    what = "Reduce_scatter"
    into = _elements(message(recvbuf), what)
    if recvcounts is not None:
        counts = [*naturals(recvcounts, comm.size, "counts", MPI.ERR_COUNT)]
    elif in_place(sendbuf):
        raise refusal(
            MPI.ERR_COUNT, f"{what}: pass recvcounts in a call with MPI.IN_PLACE"
        )
    else:
        with comm.post.set_up(what) as exchange:
            counts = exchange.all_gather(into.number, "counts")
    of = into if in_place(sendbuf) else message(sendbuf)
    if len(counts) != comm.size or of.number != sum(counts):
        raise refusal(
            MPI.ERR_COUNT,
            f"{what}: expected {comm.size} counts whose sum is the {of.number} items "
            f"sent, got {counts}; pass such counts",
        )
    if not in_place(sendbuf) and into.number != counts[comm.rank]:
        raise refusal(
            MPI.ERR_COUNT,
            f"{what}: mismatch in receive count {into.number} and counts[{comm.rank}] "
            f"{counts[comm.rank]}; pass equal ones",
        )
    into = into._replace(number=counts[comm.rank])
    return _reduced_shards(comm, what, of, into, counts, op)


def _reduced_shards(
    comm: Ranks, what: str, of: Items, into: Items, counts: list[int], op: Any
) -> Job:
    """Return the job that reduces ``of`` and gives each rank a shard of the result."""
    of = _elements(of, what)
    job = Job(comm.communicator, what, of.array)
    x, out = job.flat(job.read(of)), job.flat(job.write(into))
    # In place, the result is at the array's beginning, which other shards occupy.
    apart = are_apart(arrays.view(x, what), arrays.view(out, what))
    target = out if apart else job.temporary(into.size, into.layout.base)
    elements = into.layout.elements
    numbers = [count * elements for count in counts]
    if len(set(numbers)) == 1:
        _call(job, comm.communicator.reduce_scatter, x, op, out=target)
    else:
        method = comm.communicator.reduce_scatter_v
        _call(job, method, x, op, counts=numbers, out=target)
    if target is not out and into.nbytes:
        to, shard = (arrays.view(each, what).address for each in (out, target))
        job.then(partial(streams.copy, to, shard, into.nbytes))
    return job


def _reduced(
    comm: Ranks, what: str, sendbuf: Any, recvbuf: Any
) -> tuple[Job, Any, Any]:
    """Return the job, the input and the output of a reduction of whole arrays."""
    into = _elements(message(recvbuf), what)
    job = Job(comm.communicator, what, into.array)
    if in_place(sendbuf):
        out = job.update(into)
        return job, out, out
    of = message(sendbuf)
    _check_equal(of, into, what)
    return job, job.read(of), job.write(into)


def _call(job: Job, method: Callable[..., Any], x: Any, op: Any, **given: Any) -> None:
    """Add a reduction to the job."""
    dtype = arrays.view(x, job.what).dtype
    found = operator(op, dtype, job.what)
    alone = job.communicator.size == 1 or method.__name__ in ("scan", "exscan")
    logical = isinstance(found, str) and found in dtypes.LOGICAL and dtype.kind != "b"
    if alone and logical:
        # MPI's result of one rank's items is these items. The name would make them 0 or
        # 1, and its function is called only with items of two ranks.
        found = dtypes.REDUCTIONS[found]
    job.call(method, x, op=found, **given)


def _elements(found: Items, what: str) -> Items:
    """Return a message whose elements can be reduced, or refuse it."""
    if not found.layout.uniform:
        raise refusal(
            MPI.ERR_TYPE,
            f"{what}: expected a datatype of elements of one type, got several; reduce "
            "each of them separately",
        )
    return found


def _check_equal(of: Items, into: Items, what: str) -> None:
    if of.layout.base != into.layout.base:
        raise refusal(
            MPI.ERR_TYPE,
            f"{what}: mismatch in send and receive MPI datatypes: "
            f"{of.layout.base} and {into.layout.base}; pass arrays of one type",
        )
    if of.number != into.number:
        raise refusal(
            MPI.ERR_COUNT,
            f"{what}: mismatch in send count {of.number} and receive count "
            f"{into.number}; pass equal ones",
        )
