"""Sharing any GPU array between processes of a host, by reference count.

In one process, the producer, which goes on to use or drop the array as it likes::

    handle = share(array, opens=2)  # small and picklable: send it as you send anything

In two others, which need not be related to it::

    array = open_shared(handle)  # the producer's memory, mapped; ordered after its work
    ...
    del array  # or array.close()

The memory lives until both have given it back. Handles travel by MPI, a queue of
``multiprocessing`` (started by spawn, never by fork) or a file.

Source: PyTorch's ``CudaIPCTypes``.
"""

import operator
from dataclasses import dataclass
from typing import Any

from numba_symm import arrays, streams
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.sharing import kinds, layout, received
from numba_symm.sharing.consumer import consumer
from numba_symm.sharing.handle import SharedHandle
from numba_symm.sharing.received import ReceivedData
from numba_symm.sharing.ref_counters import RefCounterFile
from numba_symm.sharing.sent import (
    Limbo,
    SentData,
    collect_sent,
    new_ref_counted_sent_data,
    new_sent_data,
    producer,
)


def share(array: Any, opens: int = 1, stream: Any = None) -> SharedHandle:
    """Return a handle by which other processes open an array without a copy.

    The memory stays while references to it are out, though the array is dropped here:
    one for each open to come, until it is taken and given back, or cancelled. It is
    freed by the next call of this or of :func:`collect`, or when an allocation of this
    library fails. Once all references were given back the sharing is over, and opening
    the handle raises.

    A received array may be shared on; that gives its own handle again, and waits for
    ``stream``. Under Numba's simulator, arrays of ``comm.empty`` are shared in place;
    other arrays are in private memory and **copied** into shared memory, in C order:
    what is written to them later is not seen.

    Args:
        array: any device array, strided or not, of ``cudaMalloc``, of ``comm.empty``
            or of an exportable pool. Consumers may write to it.
        opens: how many times it will be opened, by any process; at least 1. More
            opens are possible while references are out.
        stream: what has written the array; consumers' streams wait for it. None: the
            stream the array names, torch's or CuPy's current one for their arrays,
            else the legacy default stream of the array's GPU.

    Returns:
        A small object that can be pickled, copied, and dropped, without any effect.

    Raises:
        ArgumentError: it is no device array, its memory is of a kind that other
            processes cannot map, or the stream is being captured.
        ClosedError: it is a received array whose producer has ended.
        ExchangeError: no socket can be made for consumers' requests; or it is a
            received array, of which a stopped process keeps the counters locked.

    Source: ``StorageSharing`` and ``CudaIPCTypes`` of PyTorch.
    """
    opens = _checked_opens(opens)
    kinds.current_ordinal()  # from here on the thread has a context
    view = arrays.view(array, "share")
    found = layout.of(array, view)
    handle = streams.handle_or_default(view.stream if stream is None else stream)
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
    place: kinds.Place,
    start: int,
    nbytes: int,
    found: layout.Layout,
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
        found = operator.index(opens)
    except Exception:  # whatever an object's own method raises
        found = 0
    if not 1 <= found < 1 << 31:
        raise ArgumentError(f"share: opens={opens!r}; give how often it will be opened")
    return found


def _keeper(array: Any) -> Any:
    """Return what keeps an array's memory, the array itself only if need be."""
    if SIMULATED:
        return array._ary
    if hasattr(array, "__cuda_ndarray__"):
        return array.gpu_data
    library = type(array).__module__.partition(".")[0]
    return array.data if library in ("torch", "cupy") else array


def open_shared(handle: SharedHandle, stream: Any = None) -> Any:
    """Return the array behind a handle, mapped into this process.

    In the process that shared it, a view. Give the array back by ``array.close()``, or
    by dropping it and all views of it: its producer may free or reuse the memory once
    ``stream`` is done with what it has then. That waits for ``stream``, so do neither
    while a stream is being captured. An open that raises takes no reference.

    Args:
        handle: from :func:`share`; may be opened many times, by many processes.
        stream: what will use the array; it waits for the producer's work. None: the
            legacy default stream.

    Returns:
        A Numba device array on the current GPU, which may be another one than the
        producer's. After ``close()`` every use of it raises ClosedError.

    Raises:
        ArgumentError: it is not a handle that :func:`share` gave, or the stream is
            being captured.
        ClosedError: all references were given back, or the producer has ended.
        BackendError: the memory cannot be mapped here.
        ExchangeError: the producer does not answer, or a process that is stopped keeps
            the counters locked; the text names it.

    Source: ``rebuild_cuda_tensor`` of PyTorch's ``multiprocessing``.
    """
    found = ReceivedData(handle, stream)
    try:
        return found.array()
    except BaseException:
        found.undo()
        raise


def collect() -> bool:
    """Free the memory that other processes were the last to use.

    Also notices consumers that have died, and takes their references back.

    Returns:
        Whether there was any.

    Raises:
        ExchangeError: a process that is stopped keeps counters locked; the text names
            it. What it does not keep is freed.

    Source: ``CudaIPCCollect`` of PyTorch.
    """
    consumer.retry()
    return collect_sent()


@dataclass(frozen=True)
class Stats:
    """What this process shares and has open.

    Attributes:
        limbo: blocks that were dropped here while references to them are out.
        mappings: allocations of other processes that are mapped here.
        counters: arrays shared from here, dropped or not.
        events: inter-process events that are out, at most 1000.
        unopened: references given out from here that no open has taken yet.
    """

    limbo: int
    mappings: int
    counters: int
    events: int
    unopened: int


def stats() -> Stats:
    """Return what this process shares and has open, as of the last collect."""
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
