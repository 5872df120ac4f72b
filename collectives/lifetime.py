"""The lifetime of communicators: construction, split, close, and drop."""

import atexit
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from numba_symm import arguments, environment, process
from numba_symm.collectives import enqueueing, kernel_set
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.protocols.binding import Endpoint
from numba_symm.collectives.protocols.workspace import (
    HELD,
    MAX_BLOCKS,
    channels,
    layout,
)
from numba_symm.collectives.requests import Requests
from numba_symm.collectives.requests import multiprocessors as requests_multiprocessors
from numba_symm.environment import SIMULATED
from numba_symm.errors import (
    ArgumentError,
    CollectiveError,
    ExchangeError,
    RankLeft,
    SymmError,
)
from numba_symm.gpu import arrays, loads, streams
from numba_symm.gpu.kernels import load_listed
from numba_symm.gpu.streams import StreamOrder
from numba_symm.launch import devices, ranks, waiting
from numba_symm.launch.failures import DROPPED
from numba_symm.launch.members import Island, Members
from numba_symm.launch.ranks import TaggedComm
from numba_symm.launch.store import Undo
from numba_symm.memory.allocator import Heap

_open: "weakref.WeakSet[Calls]" = weakref.WeakSet()
_in_use: dict[Members, str] = {}  # the backends of open communicators, in order


def open_members() -> list[Members]:
    """Return the ranks of each open communicator of this process."""
    return [calls.members for calls in list(_open)]


def backend() -> str:
    """Return the name of the backend in use, or of the backend that is tried first."""
    if _in_use:
        return next(reversed(_in_use.values()))
    return environment.requested_backend() or environment.BACKENDS[0]


class Options(NamedTuple):
    """The options of a communicator, as the caller of the constructor passed them."""

    stream: Any
    debug: Any
    multiprocessors: int | None
    requests: Any


M = TypeVar("M", bound=Members)


def begin(
    make: Callable[[ExitStack], M],
    options: Options,
    build: "Callable[[M, Heap, Settings, ExitStack], Calls]",
) -> Calls:
    """Return the calls of a new communicator. Collective.

    Args:
        make: makes the ranks; see :class:`Members` for its argument.
        options: the options.
        build: makes the calls of one island, or of several.
    """
    with Undo() as undo:
        members = make(undo)
        heap = Heap(members)
        undo.callback(heap.close_locally)
        calls = build(members, heap, agreed_settings(members, options), undo)
        opened(calls)
        undo.pop_all()  # to drop ``calls`` would report an interrupt from now on
    return calls


def of_one(island: Island, heap: Heap, settings: "Settings", undo: ExitStack) -> Calls:
    """Return the calls of one island. Collective."""
    stream, debug, requests, whole = settings
    size = island.world.size
    limit = _left_by_requests(whole, size) if requests else whole
    order, end, memory = joined(heap, limit, undo)
    calls = Calls(island, heap, order, end, stream, debug, memory)
    if requests:
        nbytes = channels(size, True).end
        memory, workspace = heap.allocate(nbytes, "workspace of requests")
        calls.requests = Requests(end, workspace.addresses, memory, whole)
        if not SIMULATED:
            calls.requests.provide()
    return calls


class Settings(NamedTuple):
    """The settings of a communicator, which all but ``stream`` are equal on all ranks.

    Attributes:
        stream: the stream of calls, as the caller of the constructor passed it.
        debug: whether the ranks compare their calls.
        requests: whether messages may run beside all other calls.
        limit: the most multiprocessors of a GPU, of all ranks' limits the least.
    """

    stream: Any
    debug: bool
    requests: bool
    limit: int


def agreed_settings(members: Members, options: Options) -> Settings:
    """Check the settings of a communicator. Collective."""
    exchange = members.exchange
    with exchange.agreed("Communicator") as each:
        debug = arguments.flag(options.debug, "Communicator", "debug")
        requests = arguments.flag(options.requests, "Communicator", "requests")
        streams.handle_or_default(options.stream)
        asked = environment.chosen_multiprocessors(options.multiprocessors)
        limit = _multiprocessors(asked)
        if asked is None and not SIMULATED:  # simulated ranks never share a GPU
            sharers = devices.sharers(members.gpus)[members.gpu.uuid]
            limit = max(1, limit // sharers)
        given = f"multiprocessors={asked}, debug={debug}, requests={requests}"
        each.mine, each.usual = limit, given
    exchange.refuse_different(each.usuals, "Communicator")
    return Settings(options.stream, debug, requests, min(each.all))


def joined(
    heap: Heap, limit: int, undo: ExitStack, more: int = 0
) -> tuple[StreamOrder, Endpoint, arrays.Memory]:
    """Return an island's order of streams, this rank's end, and its workspace.

    Collective within the island.

    Args:
        heap: the symmetric memory of the island.
        limit: the most multiprocessors that kernels occupy.
        undo: closes the order after a failure.
        more: bytes of other memory, after the workspace.
    """
    from numba_symm.collectives import tuned

    island = heap.island
    size, rank = island.world.size, island.world.rank
    order = StreamOrder()
    undo.callback(order.close)
    memory, workspace = heap.allocate(layout(size).nbytes + more, "workspace")
    with island.exchange.agreed("preparing the workspace"):
        _fill_sentinels(island, workspace.addresses[rank])
        if not SIMULATED:  # here, where a failure is an error on all ranks
            enqueueing.places()
    end = Endpoint(
        rank=rank,
        size=size,
        guard=island.guard,
        workspaces=tuple(workspace.addresses),
        max_blocks=min(MAX_BLOCKS, HELD * limit),
        multiprocessors=limit,
        place=heap.place,
        order=order,
        choices=tuned.agreed(island.exchange, island.gpu.name, size),
    )
    return order, end, memory


def opened(calls: Calls) -> None:
    """Note a communicator's calls, which are closed or dropped in the end."""
    members = calls.members
    if not SIMULATED:
        _load_ahead(calls)
    held = calls.heap, calls.enqueuer.graphs, calls.requests, streams.current_context()
    calls.when_dropped = weakref.finalize(calls, _drop, repr(calls), members, *held)
    calls.when_dropped.atexit = False  # the end of the process frees it
    _in_use[members] = members.backend.name
    _open.add(calls)
    process.watch(calls)


def _load_ahead(calls: Calls) -> None:
    """Load kernels that calls will probably need, before anything waits for a rank."""
    if calls.size == 1 or not environment.loads_ahead():
        return
    with loads.ahead():
        load_listed(ranks.of_job(calls.members.comm))
        if len(calls.members.parts) == 1:  # ``end`` has all ranks' workspaces
            kernel_set.load_default(calls.end)


def child(
    calls: Calls,
    what: str,
    divided: Callable[[], ranks.Comm | TaggedComm | None],
    members: Sequence[int],
    join: "Join",
) -> Calls | None:
    """Return the calls of a new communicator with the settings of this one.

    Collective, within the call ``what``.

    Args:
        calls: the calls of this communicator.
        what: the call.
        divided: returns the ranks of the new communicator, or None, where an object of
            the user's is in the place of mpi4py's communicator. It may block, because
            it runs only if all ranks have reached it.
        members: these ranks' numbers in this communicator, in the order of the new
            ones; empty for a rank of none.
        join: makes the new communicator of its ranks.
    """
    part: ranks.Comm | TaggedComm | None
    exchange, step = calls.members.exchange, f"{what}: all ranks have arrived"
    with exchange.agreed(what):
        comm = ranks.checked_tagged(calls.members.comm)
        if not isinstance(comm, TaggedComm):
            part = exchange.together(step, divided)
    if isinstance(comm, TaggedComm):
        part = comm.child(members, lambda used: exchange.all_gather(used, step))
    made_here = None
    try:
        # A child fails on all its ranks; this agreement makes the other ranks raise.
        with exchange.agreed(what):
            if part is not None:
                made_here = _child_of(calls, part, members, join)
    except BaseException as error:
        together = exchange.is_everybodys(error)
        if together:
            have = exchange.all_gather(made_here is not None, f"{what}: undone")
            together = all(have[rank] for rank in members)
        if made_here is not None and together:
            close(made_here)
        elif made_here is not None:
            close_locally(made_here, error)
        raise
    return made_here


Join = Callable[[Calls, ranks.Comm | TaggedComm, Sequence[int]], Calls]
"""Returns a new communicator of some ranks of one: their messages, their numbers."""


def join(calls: Calls, comm: ranks.Comm | TaggedComm, members: Sequence[int]) -> Calls:
    """Return a new communicator of some ranks of one island. Collective."""
    parent = calls.members.at_home(members)
    device, timeout = calls.gpu.ordinal, calls.members.timeout

    def make(undo: ExitStack) -> Island:
        return Island(comm, undo, device, timeout, part=True, parent=parent)

    return begin(make, options_of(calls), of_one)


def options_of(calls: Calls) -> Options:
    """Return the options of a communicator, for one of some of its ranks."""
    return Options(
        stream=calls.streams.given,
        debug=calls.agreement.debug,
        multiprocessors=multiprocessors_of(calls),
        requests=calls.requests is not None,
    )


def _child_of(
    calls: Calls,
    comm: ranks.Comm | TaggedComm,
    members: Sequence[int],
    join: Join,
) -> Calls:
    board, exchange = calls.members.board, calls.members.exchange
    ahead = False

    def left() -> None:
        nonlocal ahead
        board.look()
        # A rank may be past it because all had arrived, which this one may see later.
        before, ahead = ahead, any(map(exchange.is_ahead, members))
        if before and ahead:
            raise RankLeft(f"{exchange.call}: a rank has left the new communicator")

    try:
        with waiting.watching(left):  # a rank may leave before the child has a board
            return join(calls, comm, members)
    except CollectiveError as error:
        board.look()
        raise ExchangeError(str(error)) from error  # the parent has not failed
    except BaseException as error:
        if not isinstance(error, SymmError):
            # Otherwise its ranks would wait for this one if it had not begun.
            waiting.leave(comm, error, exchange.call)
        raise


def close(calls: Calls) -> None:
    """Close a communicator on all ranks; after a failure, on this rank."""
    members = calls.members
    if members.closed:
        return
    with calls.thread.alone("close"):
        calls.enqueuer.refuse_in_group("close")
        known = members.known_failure
        try:
            if not SIMULATED:
                streams.synchronize_device()
            elif calls.requests is not None:
                calls.requests.close()
            failure = members.failure_after_meeting()
            if failure is not None:
                raise failure
            # All ranks do this now. A rank that left it by an interrupt would report
            # that to ranks that may have freed the communicator of the reports.
            waiting.undisturbed(lambda: _close(calls))
        except BaseException as error:
            failure = None  # its traceback has this frame, whose objects it would keep
            close_locally(calls, error, "close")
            # Ranks that fail simultaneously raise different failures; one is enough.
            if not isinstance(error, CollectiveError) or known is None:
                raise


def _close(calls: Calls) -> None:
    _forget(calls)
    calls.heap.close()
    calls.members.close()
    if not _open:  # no kernel of this process waits for another rank
        loads.release()


def close_locally(calls: Calls, cause: BaseException, operation: str = "") -> None:
    """Close on this rank, even if steps fail; report the cause to the other ranks."""
    members = calls.members
    with ExitStack() as steps:  # run in reverse order
        steps.callback(members.close_locally)
        steps.callback(calls.heap.close_locally)
        steps.callback(_forget, calls)
        steps.callback(members.abandon, cause, operation)


def leave(calls: Calls, error: BaseException | None) -> None:
    """Leave a ``with`` statement, by an exception or without one."""
    members = calls.members
    if error is None:
        close(calls)
    elif not members.closed:
        # Do not wait for the other ranks, which may still be within the statement.
        members.abandon(error)
        try:
            with calls.thread.alone("close"):
                close_locally(calls, error)
        except SymmError as also:  # the first error matters more
            error.add_note(f"closing the communicator failed too: {also}")


def _forget(calls: Calls) -> None:
    _open.discard(calls)
    calls.disown()
    if calls.requests is not None:
        calls.requests.close()
    if calls.members.engine is not None:
        calls.members.engine.settle()
    calls.forget()
    _in_use.pop(calls.members, None)


def _fill_sentinels(island: Members, workspace: int) -> None:
    """Mark mailboxes as empty, before a peer may store into them."""
    for region in layout(island.world.size).sentinels:
        nbytes = region.end - region.slots
        island.backend.fill(workspace + region.slots, nbytes, 0xFF)


def limit_of(multiprocessors: int) -> int:
    """Return how many multiprocessors of a GPU a communicator occupies by default.

    It is less than a quarter, so the blocks of four communicators of a process can wait
    simultaneously, and leave multiprocessors to the kernels that they wait for. Ranks
    that share a GPU divide this number, because MPS runs their kernels simultaneously.
    """
    return max(1, multiprocessors // 4 - 1)


def multiprocessors_of(calls: Calls) -> int:
    """Return the most multiprocessors that all kernels of a communicator occupy."""
    requests = calls.requests
    return calls.end.multiprocessors if requests is None else requests.multiprocessors


def _left_by_requests(limit: int, size: int) -> int:
    """Return how many multiprocessors the other calls may occupy."""
    if SIMULATED:  # blocks run one after another there, and occupy nothing
        return limit
    taken = requests_multiprocessors(size)
    if limit <= taken:
        raise ArgumentError(
            f"requests=True: expected more than {taken} multiprocessors, of which "
            f"requests between {size} ranks occupy {taken}, got {limit}; pass "
            f"multiprocessors={taken + 1} or more"
        )
    return limit - taken


def _multiprocessors(asked: int | None) -> int:
    """Return as many of this GPU's multiprocessors as ``asked``; None: the default."""
    if SIMULATED:
        return MAX_BLOCKS // HELD if asked is None else asked
    from cuda.core import Device

    number = int(Device().properties.multiprocessor_count)
    if asked is None:
        return limit_of(number)
    if asked > number:
        raise ArgumentError(
            f"multiprocessors={asked}: this GPU has {number}; pass at most as many"
        )
    return asked


def _drop(name: str, members: Members, *held: Any) -> None:
    """Release a communicator that was dropped; report that to the other ranks.

    The garbage collector may call this in any thread, at any moment. Unmapping is
    deferred, because it waits for the GPU.
    """
    members.why_closed = "the communicator was dropped; keep it until it is closed"
    with ExitStack() as steps:  # run in reverse order
        steps.callback(warnings.warn, f"{name} was not closed", ResourceWarning)
        steps.callback(_in_use.pop, members, None)
        steps.callback(setattr, members, "closed", True)
        steps.callback(streams.defer, _undo, members, *held)
        steps.callback(members.abandon, DROPPED)


def _undo(
    members: Members,
    heap: Heap,
    made: enqueueing.Graphs,
    requests: Requests | None,
    context: Any,
) -> None:
    """Unmap the memory of a dropped communicator."""
    with ExitStack() as steps:  # run in reverse order
        steps.enter_context(streams.on_context(context))
        steps.callback(members.close_locally)
        steps.callback(heap.close_locally)
        steps.callback(made.close)
        if requests is not None:
            steps.callback(requests.close)


@atexit.register  # before what it must follow: the last registered runs first
def _end_islands() -> None:
    # Both are imported for several islands only.
    watchdog = sys.modules.get("numba_symm.launch.watchdog")
    if watchdog is not None:
        watchdog.fall_silent_at_exit()
    nccl = sys.modules.get("numba_symm.engines.nccl")
    if nccl is not None:
        nccl.wait_for_aborts()


@atexit.register
def _warn_of_open() -> None:
    """Warn of communicators that are still open; the exit code does not change.

    It does not warn after an exception, because then the program never reached
    ``close``. A record on the board ends the waits of the other ranks, and names the
    reason.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    for calls in list(_open):
        if not calls.when_dropped.alive:
            continue  # the parent's, in a forked child
        calls.members.abandon(error or "ended without closing the communicator")
        if error is None:
            warnings.warn(
                f"{calls!r} was still open at exit: call close() on every rank, or use "
                "a with statement",
                RuntimeWarning,
                stacklevel=1,
            )
