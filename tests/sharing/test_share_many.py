"""Many arrays: in a row, alive simultaneously, from many threads; nothing may grow."""

import threading
import time
import warnings

import numba_symm as ns
from numba_symm import sharing
from numba_symm.environment import SIMULATED
from tests.sharing.work import (
    are,
    becomes,
    growth,
    nothing_is_shared,
    numbers,
    resources,
)
from tests.spawned import run_ranks

IN_A_ROW = 5_000
AT_A_TIME = 100
ALIVE = 2_000
THREADS = 4
EACH = 40


def settled():
    """Return the resources when threads have closed the files of their latest work."""
    found = resources()
    while True:
        time.sleep(0.02)
        if (again := resources())["files"] == found["files"]:
            return again
        found = again


def shares_in_a_row(comm):
    """Share arrays of two allocations alternately; a consumer opens and drops each."""
    mine = [numbers(100), numbers(100, 50)]
    before, right = None, True
    for turn in range(IN_A_ROW // AT_A_TIME):
        if turn == 4:
            before = settled()
        if comm.rank == 0:
            comm.allgather([ns.share(mine[i % 2]) for i in range(AT_A_TIME)])
            comm.barrier()
        else:
            handles = comm.allgather(None)[0]
            for i, handle in enumerate(handles):
                x = ns.open_shared(handle)
                if turn % 20 == 0:
                    right = right and are(x, 100, 50 * (i % 2))
                del x
            comm.barrier()
    sharing.collect()
    after = settled()
    comm.barrier()
    return right, growth(before, after), nothing_is_shared()


def test_nothing_grows_with_the_number_of_shares():
    for right, grown, clean in run_ranks(2, shares_in_a_row):
        assert right
        assert not grown
        assert clean


def holds_many(comm):
    if comm.rank == 0:
        arrays = [numbers(20, i) for i in range(ALIVE)]
        handles = [ns.share(x) for x in arrays]
        shared = sharing.stats()  # before the consumer may open any
        comm.allgather(handles)
        comm.barrier()  # all opened
        kept = sharing.stats()
        arrays.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharing.collect()
            sharing.collect()
        texts = [str(one.message) for one in caught]
        limbo = sharing.stats().limbo
        comm.barrier()
        gone = becomes(nothing_is_shared)
        comm.barrier()
        return shared, kept, limbo, texts, gone, SIMULATED
    opened = [ns.open_shared(handle) for handle in comm.allgather(None)[0]]
    comm.barrier()
    comm.barrier()
    right = all(are(x, 20, i) for i, x in enumerate(opened))
    opened.clear()
    clean = nothing_is_shared()
    comm.barrier()
    return right, clean


def test_many_alive_simultaneously():
    producer, consumer = run_ranks(2, holds_many)
    shared, kept, limbo, texts, gone, simulated = producer
    events = 0 if simulated else sharing.sent.EVENTS
    assert shared == sharing.Stats(0, 0, ALIVE, events, ALIVE)
    assert kept == sharing.Stats(0, 0, ALIVE, events, 0)
    assert limbo == ALIVE
    assert len(texts) == 1
    assert texts[0].startswith(f"{ALIVE} shared arrays were dropped here while")
    assert gone
    assert consumer == (True, True)


def uses_threads(comm):
    """Every thread of every rank shares arrays and opens those of the next rank."""
    barrier = threading.Barrier(THREADS + 1, timeout=300)
    box, failures = {}, []

    def work(thread):
        from numba import cuda

        cuda.select_device(0)  # a thread begins without a context
        try:
            mine = [numbers(50, 1000 * thread + i) for i in range(EACH)]
            box[thread] = [ns.share(x, opens=2) for x in mine]
            barrier.wait()  # all have shared
            barrier.wait()  # the main thread has exchanged the handles
            for i, handle in enumerate(box["theirs"][thread]):
                x, y = ns.open_shared(handle), ns.open_shared(handle)
                x.close()
                if not are(y, 50, 1000 * thread + i):
                    failures.append((thread, i))
                if i % 3 == 0:
                    sharing.collect()
                if i % 5 == 0:
                    ns.share(y[:7]).cancel()
            del mine
        except BaseException as error:
            failures.append(repr(error))
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    everyone = comm.allgather({i: box[i] for i in range(THREADS)})
    box["theirs"] = everyone[(comm.rank + 1) % comm.size]
    barrier.wait()
    for thread in threads:
        thread.join()
    comm.barrier()
    clean = becomes(nothing_is_shared)
    comm.barrier()
    return failures, clean


def test_threads():
    assert run_ranks(2, uses_threads) == [([], True)] * 2
