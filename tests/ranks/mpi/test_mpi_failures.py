"""Messages and collectives in mpi4py's spelling that fail on one rank."""

import itertools
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.errors import CollectiveTimeout, RankLeft
from numba_symm.launch import devices
from numba_symm.mpi import comm as comm_of_mpi
from numba_symm.mpi import jobs, posts, progress
from numba_symm.mpi.pending import Receiving
from numba_symm.mpi.rooms import ENDED, FOUND, LINE, READ, ROOMS
from numba_symm.mpi.words import Envelope
from numba_symm.sharing import sent
from tests.interrupts import interrupted
from tests.orders import orders
from tests.ranks.helpers import needs_peers, of_one_island
from tests.whole import WHOLE

pytestmark = of_one_island  # of messages of device arrays
ROUNDS, TURNS = (100, 400) if WHOLE else (25, 200)


def array(*values):
    return cuda.to_device(np.array(values, "i4"))


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_a_failed_call_takes_no_message(comm, monkeypatch):
    """A later receive gets the message, even if it had matched the failed call."""
    right, left = around(comm)
    out, status = array(-1), MPI.Status()
    for host in (False, True):
        sent, room = (np.ones(1, "i4"), np.zeros(1, "i4")) if host else (out, out)
        for call in (comm.Sendrecv, comm.Isendrecv):
            with pytest.raises(MPI.Exception) as found:
                call(sent, comm.size, 0, room, left, 1)
            assert found.value.Get_error_class() == MPI.ERR_RANK
            assert not comm.post.posted
    for call in (comm.Sendrecv, comm.Isendrecv):
        with pytest.raises(MPI.Exception, match="or all on the host, got both"):
            call(out, right, 0, np.zeros(1, "i4"), left, 1)
    comm.Barrier()
    for number, tag in enumerate((1, 2, 1)):
        comm.Send(array(number), right, tag)
    comm.Send(np.ones(1, "i4"), right, 3)
    comm.Probe(left, 3)  # this message, of the host, is the last one sent
    for tag in (2, MPI.ANY_TAG):
        with pytest.raises(MPI.Exception):
            comm.Sendrecv(out, comm.size, 0, out, left, tag)
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(Receiving, "advance", interrupted)
        patch.setattr(comm.post, "receive", interrupted)
        patch.setattr(comm.post, "check", interrupted)
        for tag in (2, 5):  # one that is there, and one that is not
            with pytest.raises(KeyboardInterrupt):
                comm.Recv(out, left, tag)
        matched = comm.Mprobe(left, 2)
        with pytest.raises(KeyboardInterrupt):
            matched.Recv(out)
    matched.Recv(out)
    assert out.copy_to_host()[0] == 1
    comm.Send(array(1), comm.rank, 2)
    matched = comm.Mprobe(comm.rank, 2)
    comm.Send(array(2), comm.rank, 2)
    with monkeypatch.context() as patch:
        patch.setattr(comm.post, "expect", interrupted)
        for source, tag in ((comm.rank, 2), (left, 5)):
            with pytest.raises(KeyboardInterrupt):
                comm.Irecv(out, source, tag)
        with pytest.raises(KeyboardInterrupt):
            matched.Irecv(out)
    matched.Recv(out)
    match = comm.post.match
    for late in (False, True):
        with monkeypatch.context() as patch:

            def interrupted_once(found, late=late, patch=patch):
                patch.undo()
                if late:
                    match(found)
                raise KeyboardInterrupt

            patch.setattr(comm.post, "match", interrupted_once)
            sent = comm.Isend(array(2), comm.rank, 4)  # a Send may match it itself
            with pytest.raises(KeyboardInterrupt):
                comm.Recv(out, MPI.ANY_SOURCE, 4)  # which Python matches
        comm.Recv(out, comm.rank, 4)
        sent.Wait()
        assert not comm.Iprobe(comm.rank, 4)
    comm.Recv(out, comm.rank, 2)
    assert out.copy_to_host()[0] == 2
    comm.Send(array(1), comm.rank, 2)
    receive = comm.post.receive
    with monkeypatch.context() as patch:

        def interrupted_late(*given):
            while receive(*given) < ENDED:
                pass
            raise KeyboardInterrupt

        patch.setattr(comm.post, "receive", interrupted_late)
        with pytest.raises(KeyboardInterrupt):
            comm.Recv(out, comm.rank, 2)
    assert not comm.Iprobe(comm.rank, 2)  # it was copied, so it is not there again
    assert not comm.post.posted
    found = []
    for _ in range(2):
        message = comm.Improbe(left, MPI.ANY_TAG, status)
        message.Recv(out)
        found.append((status.tag, int(out.copy_to_host()[0])))
    assert found == [(1, 0), (1, 2)]
    host = np.zeros(1, "i4")
    comm.Recv(host, left, 3)
    comm.Barrier()


def test_a_message_that_matches_while_its_receive_is_withdrawn(comm, world):
    """It is not received by the withdrawn one, too."""
    own, (right, left) = comm.Dup(), around(comm)
    out, wanted, later = array(-1), array(-1), array(-1)
    own.Send(array(5), right, 1)
    world.Barrier()  # of mpi4py: the message has come, and nobody has looked
    given_up = own.Irecv(out, left, 1)
    given_up._withdraw()
    assert not own.Iprobe(left, 2)  # it goes on with what has begun
    own.Recv(wanted, left, 1)
    own.Sendrecv(array(6), right, 1, later, left, 1)
    found = [int(each.copy_to_host()[0]) for each in (out, wanted, later)]
    assert found == [-1, 5, 6]
    own.Free()


def test_messages_ask_no_event_during_a_capture(comm, monkeypatch, captured):
    """That would invalidate the capture."""
    asked = []
    monkeypatch.setattr(comm.post, "reap", lambda: asked.append(1))
    for call in (
        lambda: comm.Send(array(1), comm.rank),
        lambda: comm.Iprobe(comm.rank),
        lambda: comm.Improbe(comm.rank),
    ):
        text = "is not being captured"
        with captured(comm.post), pytest.raises(NotImplementedError, match=text):
            call()
    assert not asked


def test_two_threads(comm, monkeypatch):
    """What one of them changes, the other does not change meanwhile."""
    asked = []

    class Slow:
        def query(self):
            asked.append(1)
            time.sleep(0.05)
            return True

        def advance(self):
            del comm.post.arriving[self]
            return self.query()

    comm.post.arriving[Slow()] = None
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(comm.post.reap) for _ in range(2)]:
            each.result()
    assert len(asked) == 1
    lingering = [(Slow(), None, ExitStack()) for _ in range(2)]
    monkeypatch.setattr(jobs, "_lingering", lingering)
    pending = SimpleNamespace(record=lambda _: None, query=lambda: False)
    monkeypatch.setattr(jobs, "Event", lambda: pending)
    job = jobs.Job(comm.communicator, "test")
    with ThreadPoolExecutor(2) as threads:
        for each in [
            threads.submit(job._keep_until_end, 0, ExitStack()) for _ in range(2)
        ]:
            each.result()
    assert len(asked) == 3


@pytest.mark.parametrize("own", [False, True])
def test_threads_that_send_and_receive_at_a_time(comm, own):
    """Each has its own tag or communicator, from and to the same ranks."""
    right, left = around(comm)
    comms = [comm.Dup() if own else comm for _ in range(3)]

    def play(tag):
        comm = comms[tag - 1]
        out, found = array(-1), []
        for number in range(ROUNDS):
            sent = comm.Issend(array(number), right, tag)
            comm.Recv(out, left, tag)
            sent.Wait()
            found.append(int(out.copy_to_host()[0]))
        return found

    gpu = comm.communicator.device.ordinal  # a new thread has the first one
    with ThreadPoolExecutor(3, initializer=cuda.select_device, initargs=(gpu,)) as pool:
        for found in pool.map(play, (1, 2, 3)):
            assert found == list(range(ROUNDS))
    comm.Barrier()
    for each in comms if own else ():
        each.Free()


def test_the_gpu_is_current_in_each_thread(comm, monkeypatch):
    entered, x, out = [], array(7), array(0)
    comm.Sendrecv(x, comm.rank, 0, out, comm.rank)
    enter = devices.enter_thread

    def noted(*given):
        entered.append((*given, get_ident()))
        enter(*given)

    monkeypatch.setattr(devices, "enter_thread", noted)
    sent = comm.Isend(x, comm.rank)
    received = comm.Irecv(out, comm.rank)
    assert not entered  # this thread has called before

    def play():
        MPI.Request.Waitall([received, sent])
        comm.Sendrecv(x, comm.rank, 0, out, comm.rank)
        return get_ident()

    with ThreadPoolExecutor(1) as threads:
        thread = threads.submit(play).result()
    ordinal = comm.communicator.device.ordinal
    assert entered == [(ordinal, "Recv", thread)]
    assert out.copy_to_host()[0] == 7


@needs_peers
def test_the_end_of_a_program_after_another_ranks_failure(apart, monkeypatch):
    """The warning names the failure, and not memory that the library allocated."""
    made, reports = MPI.Comm(apart, timeout=20), []
    made.Send(array(1), made.rank, 1)
    assert sent.producer.sent
    last = made.rank == made.size - 1
    if last:
        made.communicator._calls.members.abandon(ValueError("7"), "Recv")
    monkeypatch.setattr(comm_of_mpi, "_open", [made])
    monkeypatch.setattr(sent.log, "warning", lambda *given: reports.append(given))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        comm_of_mpi.close_all()
    sent._tell_what_is_shared()
    assert not reports
    if not last:
        text = str(found.pop().message)
        assert text.startswith("at the end of the program: rank ")
        assert "left Recv with ValueError: 7; results since" in text
        assert text.endswith("are undefined. This communicator is closed now")
    assert not found
    made.Free()


def test_finalize_frees_first(apart, monkeypatch):
    made, seen = MPI.Comm(apart, timeout=20), []
    life = made._life
    monkeypatch.setattr(comm_of_mpi, "_open", [made])
    monkeypatch.setattr(comm_of_mpi.MPI, "Finalize", lambda: seen.append(life.made))
    MPI.Finalize()
    assert seen == [None]
    made.Free()


def test_a_failed_construction_duplicates_nothing(apart, monkeypatch):
    before = len(posts._posts)
    monkeypatch.setenv("NUMBA_SYMM_BACKEND", "wrong")
    with pytest.raises(MPI.Exception, match="NUMBA_SYMM_BACKEND"):
        MPI.Comm(apart, timeout=20)
    assert len(posts._posts) == before


@pytest.mark.parametrize("limit", [0, 1])
def test_an_interrupted_call_spoils_no_message(apart, monkeypatch, limit):
    """What it has sent arrives whole, nothing arrives twice, and Free waits for none.

    Above the limit, a thread may copy the message.
    """
    made, number = MPI.Comm(apart, timeout=20), itertools.count(1)
    made.post.limit = limit
    out = cuda.to_device(np.zeros(64, "i4"))
    received = []

    def call():
        tag = next(number)
        x = cuda.to_device(np.full(64, tag, "i4"))
        requests = [made.Isend(x, made.rank, tag) for _ in range(2)]
        made.Recv(out, made.rank, tag)
        requests[0].Wait()

    def take_what_was_left():
        status = MPI.Status()
        tags = []
        while (found := made.Improbe(made.rank, MPI.ANY_TAG, status)) is not None:
            found.Recv(out)
            assert set(out.copy_to_host()) == {status.tag}
            tags.append(status.tag)
        assert len(tags) <= 2
        assert not set(tags) & set(received)
        received.extend(set(tags))

    call()
    assert interrupted(call, take_what_was_left, turns=-(-TURNS // made.size))
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", "5")
    made.Free()


def test_a_message_that_was_matched_before_an_interrupt_arrives_once(comm, monkeypatch):
    out = array(0)
    sent = comm.Isend(array(1), comm.rank, 1)
    with monkeypatch.context() as patch:
        match = comm.post.match

        def interrupted_after(found):
            match(found)
            raise KeyboardInterrupt

        patch.setattr(comm.post, "match", interrupted_after)
        with pytest.raises(KeyboardInterrupt):
            sent.Test()
    comm.Recv(out, comm.rank, 1)
    assert out.copy_to_host()[0] == 1
    assert not comm.Iprobe(comm.rank, 1)
    sent.Wait()


@pytest.mark.parametrize("sends", [False, True])
def test_a_receive_that_was_matched_before_an_interrupt_ends_once(
    comm, monkeypatch, sends
):
    """Its message is there no more, also if a send looks at the receive first."""
    out, other = array(0), array(0)
    receives = comm.Irecv(out, MPI.ANY_SOURCE, 1)  # which Python matches
    sent = [comm.Isend(array(1), comm.rank, 1)]
    with monkeypatch.context() as patch:

        def interrupted_after(found):
            raise KeyboardInterrupt

        patch.setattr(comm.post, "answer", interrupted_after)
        with pytest.raises(KeyboardInterrupt):
            receives.Test()
    if sends:
        sent.append(comm.Isend(array(2), comm.rank, 2))
    receives.Wait()
    assert not comm.Iprobe(comm.rank, 1)
    if sends:
        comm.Recv(other, comm.rank, 2)
    assert (out.copy_to_host()[0], other.copy_to_host()[0]) == (1, 2 * sends)
    MPI.Request.Waitall(sent)


def test_a_message_that_one_thread_withdraws_goes_to_another(comm, monkeypatch):
    out, wanted, posted = array(-1), array(-1), []
    receive, gpu = comm.post.receive, comm.communicator.device.ordinal

    def interrupted(*given):
        if given[0][0] != FOUND:
            return receive(*given)
        posted.append(threads.submit(comm.Irecv, wanted, comm.rank, 1).result())
        raise KeyboardInterrupt

    pool = ThreadPoolExecutor(1, initializer=cuda.select_device, initargs=(gpu,))
    with pool as threads, monkeypatch.context() as patch:
        sent = comm.Isend(array(1), comm.rank, 1)
        patch.setattr(comm.post, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm.Recv(out, MPI.ANY_SOURCE, 1)  # which Python matches
    assert not comm.Iprobe(comm.rank, 1)
    posted[0].Wait()
    sent.Wait()
    assert (out.copy_to_host()[0], wanted.copy_to_host()[0]) == (-1, 1)


def test_a_receive_ends_while_another_thread_matches(comm, monkeypatch):
    """The thread looks through the receives, which do not change meanwhile."""
    warm, x, outs = array(0), array(7), [array(-1) for _ in range(2)]
    comm.Sendrecv(array(0), comm.rank, 0, warm, comm.rank, 0)
    monkeypatch.setattr(progress, "matching", {comm.post.words.progress: None})
    # A send from its own address does not match the first one.
    first, second, third = (
        comm.Irecv(out, comm.rank, tag) for tag, out in enumerate((x, *outs))
    )
    sent = [comm.Isend(x, comm.rank, tag) for tag in (0, 2)]
    cuda.synchronize()
    inside, ended, receive = threading.Event(), threading.Event(), comm.post.receive
    waits = []

    class Slow(tuple):
        def __iter__(self):
            inside.set()
            ended.wait(0.2)
            return super().__iter__()

    def then_match(*given):
        found = receive(*given)
        if found == ENDED and not waits:
            second.wanted = Slow(second.wanted)
            waits.append(threads.submit(progress.advance))
            inside.wait(5)
        return found

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(comm.post, "receive", then_match)
        first.Wait()
        ended.set()
        waits[0].result()
    third.Wait()
    MPI.Request.Waitall(sent)
    second.Cancel()
    second.Wait()
    assert [int(out.copy_to_host()[0]) for out in outs] == [-1, 7]


def test_a_message_whose_send_was_interrupted_stays_whole(comm, monkeypatch):
    """Its envelope may have been sent: then no later message uses its memory."""
    out, send = array(0), comm.post._send
    comm.Sendrecv(array(1), comm.rank, 1, out, comm.rank, 1)
    comm.Isend(array(7), comm.rank, 9)
    with monkeypatch.context() as patch:

        def interrupted_after(*given):
            send(*given)
            raise KeyboardInterrupt

        patch.setattr(comm.post, "_send", interrupted_after)
        with pytest.raises(KeyboardInterrupt):
            comm.Send(array(2), comm.rank, 2)
    comm.post.take_back()
    for _ in range(3):
        comm.Send(array(3), comm.rank, 3)
    comm.Recv(out, comm.rank, 2)
    assert out.copy_to_host()[0] == 2
    for tag in (3, 3, 3, 9):
        comm.Recv(out, comm.rank, tag)


@needs_peers
def test_an_interrupted_send_keeps_the_receive_that_it_has_begun(
    comm, world, monkeypatch
):
    last, out = comm.size - 1, array(-1)
    if comm.rank == last:
        comm.Send(array(7), 0, 1)
    world.Barrier()
    if comm.rank == 0:
        comm.Irecv(out, last, 1).Free()
        send = comm.post._send

        def interrupted(*given):
            send(*given)
            raise KeyboardInterrupt

        monkeypatch.setattr(comm.post, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm.Isend(array(8), last, 2)
        assert not comm.post.posted
        monkeypatch.undo()
        while comm.post.arriving:
            comm.post.reap()
        assert out.copy_to_host()[0] == 7
    elif comm.rank == last:
        comm.Recv(out, 0, 2)
        assert out.copy_to_host()[0] == 8
    comm.Barrier()


def test_what_was_read_is_not_told_for_an_earlier_message(comm):
    """An interrupted receive may tell it when another message has the slot."""
    words, slot = comm.post.words, ROOMS * comm.post.places[comm.rank] + ROOMS - 1
    before = words.values[LINE * slot + READ]
    for number in (9, 5):
        comm.post.refuse(Envelope(comm.rank, 0, 4, slot, before + number, 0))
    assert words.values[LINE * slot + READ] == before + 9
    words.store(slot, READ, before)


@needs_peers
def test_free_waits_for_no_rank_that_has_left(world, apart, comm, monkeypatch):
    made, other = MPI.Comm(apart, timeout=20), comm.Dup()
    grid = made.Create_cart([made.size])
    child, first = grid.Dup(), grid.Dup()
    stays = made.rank < made.size - 1
    if not stays:
        made.communicator._calls.members.abandon(ValueError("7"), "Recv")
    else:
        with pytest.raises(MPI.Exception, match="left Recv with ValueError: 7"):
            first.Free()  # until now, this rank did not know of its failure
        with pytest.raises(
            MPI.Exception, match="left Recv with ValueError: 7"
        ) as found:
            made.Recv(array(1), made.size - 1, 4)
        awaited = f"a message from rank {made.size - 1}, tag 4."
        assert found.value.__notes__ == [f"A receive was waiting for {awaited}"]
        for call in (child.Recv, lambda _, rank: child.Probe(rank)):
            with pytest.raises(MPI.Exception, match="left Recv with ValueError: 7"):
                call(array(1), made.size - 1)
        requests = made.Irecv(array(1)), made.Issend(array(1), made.size - 1)
        made.Free()
        for call in (made.Free, *(each.Wait for each in requests)):
            with pytest.raises(MPI.Exception, match="Free was called"):
                call()
        with pytest.raises(MPI.Exception, match="left Recv with ValueError: 7"):
            child.Recv(array(1), made.size - 1)
        grid.Free()
        child.Free()
    # No rank can know that a rank has left a communicator without collectives.
    monkeypatch.setenv("NUMBA_SYMM_SETUP_TIMEOUT", "0.1")
    late = r"waited for other ranks in Free \(set-up timeout: 0.1 s\)"
    if stays:
        if other.rank == 0:  # of a copy that does not end
            other.post.arriving[MagicMock(advance=lambda: False)] = None
        with pytest.raises(MPI.Exception, match=late) as found:
            other.Free()
        assert isinstance(found.value.__cause__, CollectiveTimeout)
        step = "this rank's receives to end" if other.rank == 0 else "all ranks to call"
        assert step in str(found.value.__cause__.__notes__)
    world.Barrier()
    if not stays:
        made.Free()
        with pytest.raises(MPI.Exception, match=late):
            other.Free()
        for each in (child, grid, first):
            each.Free()


def test_what_is_made_after_a_failure_works(world, apart):
    """It works although only some ranks know of the failure."""
    made = MPI.Comm(apart, timeout=20)
    if made.rank == 0:
        made.communicator._calls.members.abandon(ValueError("7"), "Recv")
        with pytest.raises(MPI.Exception, match="with ValueError: 7"):
            made.Probe()
    new = made.Dup()
    right, left = around(new)
    request, out = new.Irecv(array(-1), left, 1), array(-1)
    for _ in range(3):  # it looks for the message, which is not there
        assert not request.Test()
    world.Barrier()
    new.Send(array(1), right, 1)
    new.Sendrecv(array(5), right, 2, out, left, 2)
    request.Wait()
    assert out.copy_to_host()[0] == 5
    new.Free()
    with suppress(MPI.Exception):  # it raises on ranks that did not know the failure
        made.Free()


@needs_peers
@pytest.mark.parametrize("what", ["temporary", "pack", "launch"])
def test_a_rank_that_cannot_make_a_call_is_named_on_the_others(
    apart, monkeypatch, what
):
    comm = MPI.Comm(apart, timeout=5)
    pairs = MPI.INT.Create_vector(1, 1, 2).Create_resized(0, 8).Commit()
    out = array(*range(2 * comm.size))

    def failing(*_):
        raise MemoryError

    last = comm.rank == comm.size - 1
    if last and what == "temporary":
        monkeypatch.setattr(jobs.arrays, "empty", failing)
    elif last:
        made = (lambda *_: failing) if what == "launch" else failing
        monkeypatch.setattr(jobs.buffers, "pack", made)
    with pytest.raises(MemoryError if last else MPI.Exception) as found:
        comm.Allreduce([out, 1, pairs], array(0))
    if not last:
        assert isinstance(found.value.__cause__, RankLeft)
        assert "left Allreduce with MemoryError" in str(found.value)
    monkeypatch.undo()
    pairs.Free()
    comm.Free()


@orders("mpi.jobs.Job.start_beside")
def test_no_memory_is_freed_while_a_nonblocking_call_is_pending(comm, monkeypatch):
    """Freeing waits for the device."""
    ended, held = [], []

    class Event:
        def record(self, stream):
            pass

        def query(self):
            return bool(ended)

        synchronize = query

    @contextmanager
    def deferred():
        held.append(1)
        try:
            yield
        finally:
            held.pop()

    monkeypatch.setattr(jobs, "Event", Event)
    monkeypatch.setattr(jobs, "SIMULATED", False)
    monkeypatch.setattr(jobs.cuda, "defer_cleanup", deferred)
    monkeypatch.setattr(jobs, "_lingering", [])
    x = array(1)
    for finish in (MPI.Request.Wait, MPI.Request.Test):
        ended.clear()
        requests = [comm.Iallreduce(MPI.IN_PLACE, x) for _ in range(2)]
        assert not requests[0].Test()
        assert len(held) == 2
        ended.append(True)
        finish(requests[0])
        assert not held
    cuda.synchronize()  # x lives until then

    def failing(*_, **options):
        raise MemoryError

    failing.__name__ = "all_reduce"
    monkeypatch.setattr(comm.communicator._calls.enqueuer, "give_up", lambda *_: None)
    monkeypatch.setattr(comm.communicator, "all_reduce", failing)
    with pytest.raises(MemoryError):
        comm.Iallreduce(MPI.IN_PLACE, x)
    assert not held
