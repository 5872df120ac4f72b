"""Processes that end early, killed or not: what the others keep, get back and see."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import numba_symm as ns
from numba_symm import sharing
from numba_symm.sharing import counters
from numba_symm.sharing.received import consumer
from tests.sharing.work import (
    PATIENCE,
    are,
    becomes,
    error_of,
    nothing_is_shared,
    numbers,
    resources,
    say,
)
from tests.spawned import outcomes, run_ranks

SIZE = 1000
ENDED = "ClosedError: the process that shared this array has ended"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def has_ended(handle):
    """Return whether an open finds that the producer has ended."""
    return error_of(ns.open_shared, handle).startswith(ENDED)


def loses_a_consumer(comm, how):
    """Rank 1 ends with arrays open, and rank 2 continues."""
    survivors = None if comm.rank == 1 else comm.among([0, 2])
    if comm.rank == 0:
        arrays = [numbers(SIZE, i) for i in range(5)]
        say(comm, [ns.share(x, opens=2) for x in arrays])
        del arrays
        comm.barrier()
        survivors.barrier()

        def only_the_survivors():
            sharing.collect()
            return sharing.stats().counters == 1

        returned = becomes(only_the_survivors)
        stats = sharing.stats()
        survivors.barrier()
        survivors.barrier()
        return returned, stats.limbo, stats.unopened, becomes(nothing_is_shared)
    handles = say(comm)
    opened = [ns.open_shared(handle) for handle in handles]
    if comm.rank == 1:
        more = ns.open_shared(handles[0])  # open twice
        comm.barrier()
        if how == "killed":
            die()
        return are(more, SIZE), len(opened)
    keep = opened[3]
    del opened
    comm.barrier()
    survivors.barrier()
    survivors.barrier()
    right = are(keep, SIZE, 3)
    del keep
    survivors.barrier()
    return right, nothing_is_shared()


def check_survivors(ended):
    for rank in (0, 2):
        assert not ended[rank].error, ended[rank].trace
    assert ended[0].value == (True, 1, 0, True)
    assert ended[2].value == (True, True)


def test_a_consumer_that_is_killed():
    ended = outcomes(3, loses_a_consumer, "killed")
    assert ended[1].code == -signal.SIGKILL
    check_survivors(ended)


def test_a_consumer_that_ends_with_arrays_open():
    ended = outcomes(3, loses_a_consumer, "ends")
    assert ended[1].value == (True, 5)
    check_survivors(ended)


def is_killed_while_busy(comm):
    if comm.rank == 0:
        x = numbers(SIZE)
        handle = ns.share(x, opens=comm.size)
        # After the others, it cannot be opened, because they open it too often.
        mine = ns.open_shared(handle)
        say(comm, handle)
        del x

        def only_mine():
            sharing.collect()
            sent = sharing.sent.producer.sent[handle.file, handle.slot]
            handle.cancel()
            return sent.counter_value() == 1

        alone = becomes(only_mine)
        right = are(mine, SIZE)
        del mine
        return alone, right, becomes(nothing_is_shared)
    handle = say(comm)
    threading.Timer(0.3 + 0.05 * comm.rank, die).start()
    while True:
        ns.open_shared(handle).close()


def test_consumers_that_are_killed_while_they_open_and_close():
    ended = outcomes(4, is_killed_while_busy)
    assert [one.code for one in ended[1:]] == [-signal.SIGKILL] * 3
    assert not ended[0].error, ended[0].trace
    assert ended[0].value == (True, True, True)


def is_stopped_amid_a_change(comm):
    """Rank 1 is stopped, as by Ctrl-Z, while it has the counters locked."""
    counters.PATIENCE = 0.5
    pid = comm.allgather(os.getpid())[1]
    if comm.rank == 1:
        x, y = (ns.open_shared(handle) for handle in say(comm))
        y.close()  # released, but not noticed yet
        (file,) = consumer._files.values()
        comm.barrier()
        file._acquire()
        os.kill(pid, signal.SIGSTOP)
        file._change(lambda: None)
        comm.barrier()
        x.close()
        comm.barrier()
        return nothing_is_shared()
    x = numbers(SIZE)
    handles = say(comm, [ns.share(x, opens=2), ns.share(x)])
    comm.barrier()
    wait_until_stopped(pid)
    facts = {}
    started = time.monotonic()
    facts["collect"] = error_of(sharing.collect)
    facts["open"] = error_of(ns.open_shared, handles[0])
    facts["cancel"] = error_of(handles[0].cancel)
    handle = ns.share(x)
    facts["another file"] = handle.file
    y = ns.open_shared(handle)
    facts["right"] = are(y, SIZE)
    y.close()
    facts["in time"] = time.monotonic() - started < PATIENCE
    facts["again"] = error_of(sharing.collect)
    os.kill(pid, signal.SIGCONT)
    comm.barrier()
    handles[0].cancel()
    comm.barrier()
    facts["clean"] = becomes(nothing_is_shared)
    facts["first file again"] = ns.share(x).file
    return pid, facts


def wait_until_stopped(pid):
    assert becomes(lambda: "(stopped)" in Path(f"/proc/{pid}/status").read_text())


def test_a_consumer_that_is_stopped_during_a_change_is_named():
    (pid, facts), clean = run_ranks(2, is_stopped_amid_a_change)
    for call in ("collect", "open", "cancel", "again"):
        stopped = f"ExchangeError: process {pid} that uses the same shared arrays has "
        assert facts.pop(call).startswith(stopped), call
    assert facts == {
        "another file": 1,
        "right": True,
        "in time": True,
        "clean": True,
        "first file again": 0,
    }
    assert clean


def loses_its_producer(comm, how):
    survivors = None if comm.rank == 0 else comm.among([1, 2])
    if comm.rank == 0:
        x = numbers(SIZE)
        y = numbers(SIZE)
        say(comm, (ns.share(x, opens=2), ns.share(y)))
        comm.barrier()
        if how == "killed":
            die()
        return None
    first, second = say(comm)
    x = ns.open_shared(first) if comm.rank == 1 else None
    comm.barrier()
    seen = becomes(lambda: has_ended(first))
    survivors.barrier()
    errors = [error_of(ns.open_shared, handle) for handle in (first, second)]
    errors.append(error_of(ns.share, x) if comm.rank == 1 else errors[0])
    cancelled = [first.cancel(), second.cancel()]
    if comm.rank == 1:
        x.close()
    # Another producer's arrays are unaffected.
    mine = numbers(SIZE)
    theirs = survivors.allgather(ns.share(mine))
    other = ns.open_shared(theirs[1 - survivors.rank])
    right = are(other, SIZE)
    del other
    survivors.barrier()
    return seen, errors, cancelled, right, nothing_is_shared()


def check_consumers(ended):
    for rank in (1, 2):
        assert not ended[rank].error, ended[rank].trace
        seen, errors, cancelled, right, clean = ended[rank].value
        assert seen
        assert all(error.startswith(ENDED) for error in errors), errors
        assert cancelled == [0, 0]
        assert right
        assert clean


def test_a_producer_that_is_killed():
    ended = outcomes(3, loses_its_producer, "killed")
    assert ended[0].code == -signal.SIGKILL
    check_consumers(ended)


def test_a_producer_that_ends_early_logs_what_was_shared():
    ended = outcomes(3, loses_its_producer, "ends")
    assert ended[0].code == 0
    nbytes = 2 * SIZE * 4
    said = rf"ends while 2 of its arrays \({nbytes} bytes\) are still shared"
    assert re.search(said, ended[0].output)
    check_consumers(ended)


def ends_well(comm):
    if comm.rank == 0:
        say(comm, ns.share(numbers(SIZE)))
        comm.barrier()
        return nothing_is_shared()
    ns.open_shared(say(comm)).close()
    comm.barrier()
    return True


def test_a_producer_that_ends_in_time_logs_nothing():
    ended = outcomes(2, ends_well)
    assert [(one.value, one.output) for one in ended] == [(True, "")] * 2


def meets_many_producers(comm):
    """Rank 0 opens the arrays of ranks that then end, and keeps no file of theirs."""
    x = numbers(SIZE)
    handles = comm.allgather(ns.share(x))
    if comm.rank != 0:
        comm.barrier()
        return None
    for handle in handles[1:]:
        ns.open_shared(handle).close()
    before = resources()["files"]
    comm.barrier()
    gone = [becomes(lambda h=handle: has_ended(h)) for handle in handles[1:]]
    after = resources()["files"]
    return all(gone), sum((before - after).values()), sum((after - before).values())


def test_files_of_producers_that_have_ended_are_closed():
    value = run_ranks(3, meets_many_producers)[0]
    gone, fewer, more = value
    assert gone
    assert fewer >= 2
    assert more == 0
