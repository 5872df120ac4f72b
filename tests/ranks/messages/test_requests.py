"""Messages that run beside all other calls."""

import contextlib
import functools
import time
import weakref

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.collectives import requests
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import needs_peers, of_one_island, ordinary, put, refused
from tests.ranks.messages.contents import right_and_left

pytestmark = of_one_island

LARGE = 1 << 14 if SIMULATED else 1 << 24
"""Elements of a message that does not fit into the slots."""


@pytest.fixture
def comm(world):
    with ns.Communicator(world, timeout=60, requests=True) as made:
        if not SIMULATED:  # loading a kernel later would wait for pending requests
            made.prepare("sendrecv", "all_reduce")
        yield made


def filled(count, value):
    x = ordinary(count, np.float32)
    put(x, np.full(count, value, np.float32))
    return x


def holds(array, value):
    return (array.copy_to_host() == value).all()


@needs_peers
def test_requests_block_no_later_call(comm, world):
    """Large messages are under way while collectives and other messages complete."""
    right, left = right_and_left(comm)
    x, out = filled(LARGE, comm.rank), filled(LARGE, -1)
    small, taken, total = filled(5, comm.rank), filled(5, -1), filled(5, -1)
    # Loading a kernel waits for the device, so for the large messages.
    comm.all_reduce(small, out=total)
    comm.sendrecv(small, dst=right, out=taken, src=left)
    sent = comm.isend(x, dst=right)
    comm.all_reduce(small, out=total)
    comm.sendrecv(small, dst=right, out=taken, src=left)
    comm.synchronize()
    assert holds(total, sum(range(comm.size)))
    assert holds(taken, left)
    world.barrier()  # nobody receives the large message before
    assert not sent.test()
    assert "pending" in repr(sent)
    received = comm.irecv(out, src=left)
    assert received.synchronize() is out
    assert sent.synchronize() is None
    assert sent.test()
    assert received.test()
    assert "irecv, done" in repr(received)
    assert holds(out, left)
    world.barrier()


def frees():
    """Return whether Numba frees memory. In the simulator there is none to free."""
    return SIMULATED or not cuda.current_context().deallocations.is_disabled


@needs_peers
def test_arrays_are_released_and_freed_later(comm, world):
    """Freeing memory waits for the device, which a pending request occupies."""
    right, left = right_and_left(comm)
    x, y, out = (filled(5, comm.rank) for _ in range(3))
    kept = weakref.ref(x)
    if comm.rank == 0:
        late = comm.irecv(out, src=left)
        sent = comm.isend(x, dst=right)
        del x
        assert kept() is not None
        sent.synchronize()
        comm.isend(y, dst=right).synchronize()
        assert kept() is None
        assert not frees() or SIMULATED
        world.barrier()
        late.synchronize()
    else:
        for _ in range(2 * (comm.rank == 1)):
            comm.irecv(out, src=0).synchronize()
        world.barrier()
        if comm.rank == comm.size - 1:
            comm.isend(y, dst=0).wait()
    comm.synchronize()
    assert frees()
    world.barrier()


@needs_peers
def test_a_start_releases_the_arrays_of_all_that_have_ended(comm, world):
    """Though the program only lets streams wait, and asks for no message's end."""
    right, left = right_and_left(comm)
    x, out = filled(5, comm.rank), filled(5, -1)
    kept = weakref.ref(x)
    last = comm.irecv(out, src=left), comm.isend(x, dst=right)
    for request in last:
        request.wait()
        request._done.synchronize()
    del x
    assert kept() is not None
    last = comm.irecv(out, src=left)
    assert kept() is None
    comm.isend(filled(5, comm.rank), dst=right).synchronize()
    last.synchronize()
    assert frees()
    world.barrier()


@needs_peers
def test_arrays_of_an_interrupted_request_are_kept(world, monkeypatch):
    """Its kernel may still read them."""
    place = (requests._Worker, "launch") if SIMULATED else (PackedCall, "resume")
    original = getattr(*place)

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    comm = ns.Communicator(world, timeout=60, requests=True)
    x = filled(5, comm.rank)
    kept = weakref.ref(x)
    if comm.rank == 0:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(*place, interrupted)
            comm.isend(x, dst=1)
            pytest.fail("it was not interrupted")
        del x
    during = kept() is not None
    world.barrier()
    with contextlib.suppress(ns.RankLeft):
        comm.close()
    assert during
    assert comm.rank > 0 or kept() is None


@needs_peers
def test_split_and_close_with_requests(world):
    """A child has requests, too. Closing completes what was started."""
    with ns.Communicator(world, timeout=60, requests=True) as parent:
        out = filled(700, -1)
        with parent.dup() as comm:
            right, left = right_and_left(comm)
            assert comm.multiprocessors == parent.multiprocessors
            comm.irecv(out, src=left)
            comm.isend(filled(700, comm.rank), dst=right)
        assert holds(out, left)


@needs_peers
def test_wrong_requests_are_refused(comm, world):
    right, left = right_and_left(comm)
    x = filled(3, 0)
    for call, text in [
        (lambda: comm.isend(x, dst=comm.rank), "isend: dst: expected another rank"),
        (lambda: comm.irecv(x, src=comm.size), "irecv: src: expected a rank"),
        (lambda: comm.isend(np.zeros(3), dst=right), "isend: expected a device array"),
        (lambda: ns.Request.wait_any([]), "wait_any: expected at least one request"),
        (lambda: ns.Request.wait_all(3), "wait_all: expected a sequence of requests"),
        (lambda: ns.Request.wait_any([None]), "pass what isend and irecv returned"),
    ]:
        refused(world, ns.ArgumentError, call, text)
    with contextlib.ExitStack() as stack:
        stack.enter_context(comm.group())
        grouped = lambda: comm.isend(x, dst=right)  # noqa: E731
        refused(world, ns.ArgumentError, grouped, "isend: a group is open")
    with ns.Communicator(world, timeout=60) as plain:
        wrong = lambda: plain.irecv(x, src=left)  # noqa: E731
        refused(world, ns.ArgumentError, wrong, "pass requests=True to Communicator")
        for name in ("isend", "irecv"):
            early = functools.partial(plain.prepare, "send", name)
            texts = f"prepare('{name}'): expected a communicator", "pass requests=True"
            refused(world, ns.ArgumentError, early, *texts)
    differ = lambda: ns.Communicator(world, requests=comm.rank == 0)  # noqa: E731
    refused(world, ns.ArgumentError, differ, "requests=")


@needs_peers
@pytest.mark.parametrize("how", ["late", "too long"])
def test_a_failed_request_fails_on_every_rank(world, how):
    comm = ns.Communicator(world, timeout=1 if how == "late" else 60, requests=True)
    x, out = filled(5, 0), filled(3, -1)
    if comm.rank == 1:
        request = comm.irecv(out, src=0)
    elif comm.rank == 0 and how == "too long":
        request = comm.isend(x, dst=1)
    kind = ns.CollectiveTimeout if how == "late" else ns.CallMismatch
    if comm.rank == 1:
        with pytest.raises(kind):
            request.synchronize()
    world.barrier()
    text = "rank 1 waited for rank 0" if how == "late" else "another number of bytes"
    refused(world, kind, comm.check, text)
    refused(world, kind, lambda: comm.isend(x, dst=1 - min(1, comm.rank)), text)
    assert holds(out, -1)
    comm.close()


@needs_peers
def test_a_dropped_communicator_ends_its_requests(world):
    """It ends the other ranks' requests, too."""
    comm = ns.Communicator(world, timeout=600, requests=True)
    out = filled(LARGE, -1)
    request = comm.irecv(out, src=(comm.rank + 1) % comm.size)
    world.barrier()
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError), comm:
            _ = 1 / 0
    started = time.monotonic()
    kinds = ns.RankLeft, ns.ClosedError
    with pytest.raises(kinds):
        request.synchronize()
    assert time.monotonic() - started < 300
    world.barrier()
    if comm.rank:
        with contextlib.suppress(ns.RankLeft):
            comm.close()
