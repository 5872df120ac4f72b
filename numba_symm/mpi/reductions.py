"""The reductions of mpi4py, as calls of a communicator; see ``collectives.py``."""

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from numba_symm import arrays, dtypes
from numba_symm.mpi import operators
from numba_symm.mpi.buffers import Items, in_place, message, on_device
from numba_symm.mpi.collectives import Ranks, at_root, check_root, sent
from numba_symm.mpi.errors import refusal
from numba_symm.mpi.jobs import Job
from numba_symm.mpi.reading import naturals


def reduce(
    comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0
) -> Job | None:
    """Reduce all ranks' items, element by element, on ``root``."""
    check_root(comm, root, "Reduce", sendbuf)
    if not on_device(sendbuf, *at_root(comm, root, recvbuf)):
        return None
    if comm.rank == root:
        job, x, out = _reduced(comm, "Reduce", sendbuf, recvbuf)
    else:
        found = _elements(message(sendbuf), "Reduce")
        job, x, out = sent(comm, "Reduce", found)
    _call(job, comm.communicator.reduce, x, op, root=root, out=out)
    return job


def allreduce(comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Job | None:
    """Reduce all ranks' items, element by element. Every rank gets the result."""
    if not on_device(sendbuf, recvbuf):
        return None
    job, x, out = _reduced(comm, "Allreduce", sendbuf, recvbuf)
    _call(job, comm.communicator.all_reduce, x, op, out=out)
    return job


def scan(comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Job | None:
    """Reduce the items of ranks 0 to r, on each rank r."""
    if not on_device(sendbuf, recvbuf):
        return None
    job, x, out = _reduced(comm, "Scan", sendbuf, recvbuf)
    _call(job, comm.communicator.scan, x, op, out=out)
    return job


def exscan(comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Job | None:
    """Reduce the items of ranks 0 to r - 1, on each rank r but 0."""
    if not on_device(sendbuf, recvbuf):
        return None
    if comm.rank == 0 and in_place(sendbuf):  # MPI does not change the array there
        found = _elements(message(recvbuf), "Exscan")
        job, x, _ = sent(comm, "Exscan", found)
        out = job.temporary(found.size, found.layout.base)
    else:
        job, x, out = _reduced(comm, "Exscan", sendbuf, recvbuf)
    _call(job, comm.communicator.exscan, x, op, out=out)
    return job


def reduce_scatter_block(
    comm: Ranks, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM
) -> Job | None:
    """Reduce all ranks' items, and give each rank as many of the result."""
    if not on_device(sendbuf, recvbuf):
        return None
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


def reduce_scatter(
    comm: Ranks,
    sendbuf: Any,
    recvbuf: Any,
    recvcounts: Sequence[int] | None = None,
    op: Any = MPI.SUM,
) -> Job | None:
    """Reduce all ranks' items, and give each rank a number of the result."""
    if not on_device(sendbuf, recvbuf):
        return None
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
    target = job.temporary(into.size, into.layout.base) if _same_memory(x, out) else out
    elements = into.layout.elements
    numbers = [count * elements for count in counts]
    if len(set(numbers)) == 1:
        _call(job, comm.communicator.reduce_scatter, x, op, out=target)
    else:
        method = comm.communicator.reduce_scatter_v
        _call(job, method, x, op, counts=numbers, out=target)
    if target is not out:
        job.copy(out, target)
    return job


def _reduced(
    comm: Ranks, what: str, sendbuf: Any, recvbuf: Any
) -> tuple[Job, Any, Any]:
    """Return the job, the input and the output of a reduction of whole arrays."""
    into = _elements(message(recvbuf), what)
    job = Job(comm.communicator, what, into.array)
    if in_place(sendbuf):
        if into.layout.runs is None:
            out = job.view(into)
        else:
            out = job.read(into)
            job.then_unpack(into, out)
        return job, out, out
    of = message(sendbuf)
    _check_equal(of, into, what)
    return job, job.read(of), job.write(into)


def _call(job: Job, method: Callable[..., Any], x: Any, op: Any, **given: Any) -> None:
    """Add a reduction to the job."""
    dtype = arrays.view(x, job.what).dtype
    found = operators.operator(op, dtype, job.what)
    alone = job.communicator.size == 1 or method.__name__ in ("scan", "exscan")
    logical = isinstance(found, str) and found in dtypes.LOGICAL and dtype.kind != "b"
    if alone and logical:
        # MPI's result of one rank's items is these items. The name would make them 0 or
        # 1, and its function is called only with items of two ranks.
        found = dtypes.REDUCTIONS[found]
    job.call(method, x, op=found, **given)


def _same_memory(x: Any, out: Any) -> bool:
    a, b = arrays.view(x, "x"), arrays.view(out, "out")
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


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
