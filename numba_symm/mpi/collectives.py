"""The collectives of mpi4py, as calls of a communicator on device arrays.

Each function has the arguments of mpi4py's method, and returns the job that executes
the call, or None if its arrays are on the host. ``forms.py`` makes the blocking, the
nonblocking and the persistent method from it.
"""

import itertools
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from numba_symm import arrays, streams
from numba_symm.collectives.checks import check_writable
from numba_symm.collectives.communicator import Communicator
from numba_symm.mpi import buffers, packing
from numba_symm.mpi.buffers import Items, in_place, message, on_device
from numba_symm.mpi.errors import refusal
from numba_symm.mpi.jobs import Job
from numba_symm.mpi.messages import Post
from numba_symm.own_arrays import Memory


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


def gather(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job | None:
    """Gather every rank's items on ``root``."""
    check_root(comm, root, "Gather", sendbuf)
    if not on_device(sendbuf, *at_root(comm, root, recvbuf)):
        return None
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
        out = job.read(whole)  # this rank's items are there
        if whole.layout.runs is not None:
            job.then_unpack(whole, out)
        count = into.size
        return job, job.part(out, comm.rank * count, count), out
    out = job.write(whole)
    return job, job.read(message(sendbuf)), out


def sent(comm: Ranks, what: str, found: Items) -> tuple[Job, Any, None]:
    """Return the job and the input of a rank that has no output."""
    job = Job(comm.communicator, what, found.array)
    return job, job.read(found), None


def gatherv(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job | None:
    """Gather every rank's items, of any number, on ``root``."""
    check_root(comm, root, "Gatherv", sendbuf)
    if not on_device(sendbuf, *at_root(comm, root, recvbuf)):
        return None
    if comm.rank != root:
        job, x, _ = sent(comm, "Gatherv", message(sendbuf))
        job.call(comm.communicator.gather_v, _as_bytes(job, x), root=root)
        return job
    parts = buffers.vector(recvbuf, comm.size).parts
    job = Job(comm.communicator, "Gatherv", parts[0].array)
    packed, counts = _room(job, parts), _counts(parts)
    own = parts[root]
    if not in_place(sendbuf):
        own = _as_many(message(sendbuf), own, root, "Gatherv")
    x = _as_bytes(job, job.read(own))
    options = {"counts": counts, "root": root, "out": packed}
    job.call(comm.communicator.gather_v, x, **options)
    _spread(job, parts, packed)
    return job


def scatter(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job | None:
    """Give each rank its items of ``root``'s array."""
    check_root(comm, root, "Scatter", recvbuf)
    if not on_device(*at_root(comm, root, sendbuf), recvbuf):
        return None
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
        out = job.part(x, root * of.size, of.size)
    else:
        out = job.write(message(recvbuf))
        out = job.like(out, x)
    job.call(method, x, root=root, out=out)
    return job


def scatterv(comm: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> Job | None:
    """Give each rank its items, of any number, of ``root``'s array."""
    check_root(comm, root, "Scatterv", recvbuf)
    if not on_device(*at_root(comm, root, sendbuf), recvbuf):
        return None
    method = comm.communicator.scatter_v
    if comm.rank != root:
        into = message(recvbuf)
        job = Job(comm.communicator, "Scatterv", into.array)
        job.call(method, None, root=root, out=_as_bytes(job, job.write(into)))
        return job
    parts = buffers.vector(sendbuf, comm.size).parts
    job = Job(comm.communicator, "Scatterv", parts[0].array)
    packed, counts = _room(job, parts), _counts(parts)
    _collect(job, parts, packed)
    if in_place(recvbuf):
        out = job.temporary(counts[root], np.dtype(np.uint8))
    else:
        into = _as_many(message(recvbuf), parts[root], root, "Scatterv")
        out = _as_bytes(job, job.write(into))
    job.call(method, packed, counts=counts, root=root, out=out)
    return job


def allgather(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Give every rank the items of all ranks."""
    if not on_device(sendbuf, recvbuf):
        return None
    into = message(recvbuf, comm.size)
    job, x, out = _gathered(comm, "Allgather", sendbuf, into, comm.rank)
    job.call(comm.communicator.all_gather, job.like(x, out), out=job.flat(out))
    return job


def allgatherv(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Give every rank the items of all ranks, of any numbers."""
    if not on_device(sendbuf, recvbuf):
        return None
    parts = buffers.vector(recvbuf, comm.size).parts
    job = Job(comm.communicator, "Allgatherv", parts[0].array)
    packed, counts = _room(job, parts), _counts(parts)
    own = parts[comm.rank]
    if not in_place(sendbuf):
        own = _as_many(message(sendbuf), own, comm.rank, "Allgatherv")
    x = _as_bytes(job, job.read(own))
    job.call(comm.communicator.all_gather_v, x, counts=counts, out=packed)
    _spread(job, parts, packed)
    return job


def alltoall(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send each rank its items, and receive items from every rank."""
    if not on_device(sendbuf, recvbuf):
        return None
    into = message(recvbuf, comm.size)
    job = Job(comm.communicator, "Alltoall", into.array)
    whole = into._replace(number=into.number * comm.size)
    if in_place(sendbuf):
        x = job.flat(job.read(whole))
        if whole.layout.runs is not None:
            job.then_unpack(whole, x)
        job.call(comm.communicator.all_to_all, x, out=x)
        return job
    of = message(sendbuf, comm.size)
    x = job.flat(job.read(of._replace(number=of.number * comm.size)))
    out = job.like(job.write(whole), x)
    job.call(comm.communicator.all_to_all, x, out=out)
    return job


def alltoallv(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send each rank items, of any number, and receive items from every rank."""
    if not on_device(sendbuf, recvbuf):
        return None
    incoming = buffers.vector(recvbuf, comm.size).parts
    outgoing = incoming
    if not in_place(sendbuf):
        outgoing = buffers.vector(sendbuf, comm.size).parts
    return _exchanged(comm, "Alltoallv", outgoing, incoming)


def alltoallw(comm: Ranks, sendbuf: Any, recvbuf: Any) -> Job | None:
    """Send each rank items of any type and number, and receive such."""
    if not on_device(sendbuf, recvbuf):
        return None
    incoming = buffers.typed(recvbuf, comm.size)
    outgoing = incoming
    if not in_place(sendbuf):
        outgoing = buffers.typed(sendbuf, comm.size)
    return _exchanged(comm, "Alltoallw", outgoing, incoming)


def _exchanged(
    comm: Ranks, what: str, outgoing: list[Items], incoming: list[Items]
) -> Job:
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
    _collect(job, sends, packed)
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
        memory = Memory(parts[0].address, sum(counts), parts[0].array)
        job.keep(parts[0].array)
        return memory.array(sum(counts), np.dtype(np.uint8))
    return job.temporary(sum(counts), np.dtype(np.uint8))


def _collect(job: Job, parts: list[Items], packed: Any) -> None:
    """Add the copies of all parts to one array."""
    _moved(job, parts, packed, out=False)


def _spread(job: Job, parts: list[Items], packed: Any) -> None:
    """Add the copies of one array to all parts."""
    for part in parts:
        check_writable(part.view, job.what)
    _moved(job, parts, packed, out=True)


def _moved(job: Job, parts: list[Items], packed: Any, out: bool) -> None:
    address, first = arrays.view(packed, job.what).address, 0
    for part in parts:
        if part.nbytes and part.layout.runs is not None:
            memory = Memory(address + first, part.nbytes, packed)
            place = memory.array(part.nbytes, np.dtype(np.uint8))
            job.then_move(packing.unpack if out else packing.pack, part, place)
        elif part.nbytes and part.address != address + first:
            places = part.address, address + first
            target, source = places if out else places[::-1]
            job.then(partial(streams.copy, target, source, part.nbytes))
        first += part.nbytes
    job.keep(*(part.array for part in parts))


def _as_bytes(job: Job, array: Any) -> Any:
    view = arrays.view(array, job.what)
    job.keep(array)
    memory = Memory(view.address, view.nbytes, array)
    return memory.array(view.nbytes, np.dtype(np.uint8))


def at_root(comm: Ranks, root: int, spec: Any) -> tuple[Any, ...]:
    """Return an argument that only the root's call reads."""
    return (spec,) if comm.rank == root else ()


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
