"""Sharing GPU arrays between the processes of a node, by reference count.

In the producer, which may use or drop its array afterwards::

    handle = share(array, opens=2)  # small and picklable

In each of two consumers, which need not be related to the producer::

    array = open_shared(handle)  # maps the producer's memory, after the producer's work
    ...
    del array  # or array.close()

The memory lives until both consumers have given it back. Send handles through MPI,
through a queue of ``multiprocessing`` (with spawn, never with fork), or in a file.

Source: PyTorch's ``CudaIPCTypes``.
"""

from dataclasses import dataclass
from typing import Any

from numba_symm.arguments import index
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, streams
from numba_symm.sharing import kinds, layout, received
from numba_symm.sharing.counters import RefCounterFile
from numba_symm.sharing.layout import SharedHandle
from numba_symm.sharing.received import ReceivedData, consumer
from numba_symm.sharing.sent import (
    Limbo,
    SentData,
    collect_sent,
    new_ref_counted_sent_data,
    new_sent_data,
    producer,
)


def share(array: Any, opens: int = 1, stream: Any = None) -> SharedHandle:
    """Return a handle with which other processes open an array without a copy.

    The sharing begins with ``opens`` references. A call of :func:`open_shared` takes
    one of them; closing or dropping the opened array gives the reference back. When all
    references were given back or cancelled, the sharing is over, and ``open_shared``
    raises an error. The memory stays allocated while references remain, even if this
    process drops the array. Afterwards, the next call of :func:`share` or
    :func:`collect` frees the memory of a dropped array. The library also frees such
    memory when one of its allocations fails.

    For an array that :func:`open_shared` returned, the call waits for ``stream``, and
    returns the original handle. In the simulator, the call **copies** arrays into
    shared memory, in C order, except those of ``comm.empty``. Consumers do not see
    later writes to such an array.

    Args:
        array: a device array, strided or not, in memory of ``cudaMalloc``, of
            ``comm.empty`` or of an exportable pool. Consumers may write to the array.
        opens: how many times processes will open the array, at least 1. They may open
            it more often while references remain.
        stream: the stream that has written the array; consumers' streams wait for it.
            None: the stream that the array names (torch's or CuPy's current one for
            their arrays), else the legacy default stream of the array's GPU.

    Returns:
        A small object. Pickling, copying or dropping it has no effect.

    Raises:
        ArgumentError: ``array`` is not a device array, other processes cannot map its
            memory, or the stream is being captured.
        ClosedError: ``array`` is a received array whose producer has ended.
        ExchangeError: no socket can be made for consumers' requests; or ``array`` is a
            received array whose counters a stopped process keeps locked.

    Source: ``StorageSharing`` and ``CudaIPCTypes`` of PyTorch.
    """
    opens = _checked_opens(opens)
    kinds.current_ordinal()  # from here on the thread has a context
    view = arrays.view(array, "share")
    found = layout.of(array, view)
    chosen = arrays.stream_of(array) if stream is None else stream
    handle = streams.handle_or_default(chosen)
    received.refuse_capture(handle, "share")
    low, high = found.extent
    address, nbytes = view.address + low, high - low
    reference = received.received_around(address, nbytes) if nbytes else None
    if reference is not None:
        return received.share_again(reference, view.address, found, opens, handle)
    place = kinds.locate(address, nbytes)
    keeper: Any = _keeper(array)
    if place is None:
        keeper, found = kinds.private_copy(array), found.dense()
        address, low, nbytes = keeper.address, 0, found.extent[1]
        place = kinds.locate(address, nbytes)
    assert place is not None  # only private memory is nowhere
    start = address - place.base
    found = found.at(start - low)
    return _send(keeper, array, place, start, nbytes, found, opens, handle)


def _send(
    keeper: Any,
    array: Any,
    place: kinds.SharedAllocation,
    start: int,
    nbytes: int,
    found: layout.ArrayLayout,
    opens: int,
    stream: int,
) -> SharedHandle:
    """Return the handle of a new entry; consumers wait for ``stream``."""
    device = kinds.ordinal_of(place.base, place.nbytes)
    with new_sent_data(keeper, device, opens) as sent:
        sent.export = place.export
        sent.nbytes = nbytes
        sent.record(stream)
        handle = SharedHandle(
            producer=producer.address,
            file=sent.number,
            slot=sent.offset,
            serial=sent.serial,
            kind=place.kind,
            base=place.base,
            base_nbytes=place.nbytes,
            base_handle=place.data,
            pool=place.pool,
            start=start,
            nbytes=nbytes,
            layout=found,
            event=b"" if sent.event is None else sent.event.ipc_handle(),
            event_sync_required=sent.event_sync_required,
            device=kinds.uuid_of(device),
        )
        sent.set_digest(handle.digest)
        sent.set_original_ptr(keeper, None if keeper is array else array)
    producer.warn()
    return handle


def _checked_opens(opens: int) -> int:
    try:
        found = index(opens)
    except Exception:  # whatever an object's own method raises
        found = 0
    if not 1 <= found < 1 << 31:
        raise ArgumentError(
            f"share: expected opens from 1 to 2**31 - 1, got {opens!r}; pass the "
            "number of consumers' opens"
        )
    return found


def _keeper(array: Any) -> Any:
    """Return the object that keeps an array's memory; the array itself if needed."""
    if SIMULATED:
        return array._ary
    if hasattr(array, "__cuda_ndarray__"):
        return array.gpu_data
    library = type(array).__module__.partition(".")[0]
    return array.data if library in ("torch", "cupy") else array


def open_shared(handle: SharedHandle, stream: Any = None) -> Any:
    """Return the array that a handle names, mapped into this process.

    In the process that shared the array, the result is a view of the original. To give
    the array back, call ``array.close()``, or drop it and all its views. Both wait for
    the work that is then on ``stream``, so do neither while a stream is being captured.
    Afterwards the producer may free or reuse the memory. A call that raises an error
    takes no reference.

    Args:
        handle: a handle that :func:`share` returned.
        stream: the stream that will use the array; it waits for the producer's work.
            None: the legacy default stream.

    Returns:
        A Numba device array on the current GPU, which may differ from the producer's.
        After ``close()``, every use of the array raises ClosedError.

    Raises:
        ArgumentError: ``handle`` is not a handle, or the stream is being captured.
        ClosedError: all references were given back, or the producer has ended.
        BackendError: the memory cannot be mapped here.
        ExchangeError: the producer does not answer, or a suspended process keeps the
            counters locked; the text names this process.

    Source: ``rebuild_cuda_tensor`` of PyTorch's ``multiprocessing``.
    """
    found = ReceivedData(handle, stream)
    try:
        return found.array()
    except BaseException:
        found.undo()
        raise


def collect() -> bool:
    """Free the memory of dropped arrays that have no references left.

    The call also takes back the references of consumers that have ended.

    Returns:
        Whether any memory was freed.

    Raises:
        ExchangeError: a suspended process keeps counters locked; the text names this
            process. Memory with other counters is freed.

    Source: ``CudaIPCCollect`` of PyTorch.
    """
    consumer.retry()
    return collect_sent()


@dataclass(frozen=True)
class Stats:
    """Counts of what this process shares and has open.

    Attributes:
        limbo: shared arrays that this process has dropped, but which still have
            references.
        mappings: allocations of other processes that are mapped into this process.
        counters: arrays that this process shares, dropped or not.
        events: inter-process events in use, at most 1000.
        unopened: references to this process's arrays that no ``open_shared`` has taken.
    """

    limbo: int
    mappings: int
    counters: int
    events: int
    unopened: int


def stats() -> Stats:
    """Return how much this process shared and had open at the last collect."""
    return producer.guard.do(_stats)


def _stats() -> Stats:
    producer.note_dropped()
    return Stats(
        limbo=producer.limbo.size(),
        mappings=len(consumer.mapped),
        counters=sum(file.offsets_in_use() for file in producer.files),
        events=producer.events,
        unopened=producer.unopened(),
    )


__all__ = [
    "Limbo",
    "ReceivedData",
    "RefCounterFile",
    "SentData",
    "SharedHandle",
    "Stats",
    "collect",
    "new_ref_counted_sent_data",
    "open_shared",
    "share",
    "stats",
]
