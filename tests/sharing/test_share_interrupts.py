"""Ctrl-C and alarms at any moment of a call: nothing hangs, nothing stays taken."""

import gc
import sys

import pytest

import numba_symm as ns
from numba_symm import sharing
from numba_symm.environment import SIMULATED
from numba_symm.launch import locks
from numba_symm.sharing.received import consumer
from numba_symm.sharing.sent import producer
from tests.interrupts import interrupted
from tests.sharing.work import are, becomes, nothing_is_shared, numbers, open_files, say
from tests.spawned import run_ranks

SIZE = 100
TURNS = 1500
FEW = 5  # files that signals between two calls of Python's own may leave open


def check():
    assert not consumer.guard._lock._is_owned()
    assert not producer.guard._lock._is_owned()


def opens_amid_interrupts(comm, how):
    if comm.rank == 0:
        x = numbers(SIZE)
        say(comm, ns.share(x, opens=10 * TURNS))
        del x
        comm.barrier()
        (file,) = producer.files
        free = locks.try_lock(file._fd, sharing.counters._MUTEX)
        locks.unlock(file._fd, sharing.counters._MUTEX)
        references = sharing.stats().unopened, file.value(0)
        comm.barrier()
        exact = SIMULATED or how == "mapped"
        return free, exact, references, not exact or becomes(nothing_is_shared)
    sys.unraisablehook = lambda *_: None  # what is raised in a finaliser
    handle = say(comm)

    def close():
        ns.open_shared(handle).close()

    def drop():
        x = ns.open_shared(handle)
        del x

    kept = ns.open_shared(handle)
    if how == "not mapped":
        kept.close()
        kept = None
    files = open_files()
    hits = [interrupted(call, check, TURNS) for call in (close, drop)]
    gc.collect()
    sharing.collect()
    ((_, counters),) = consumer._files.items()
    left = {
        "opens": len(counters._held),
        "mappings": len(consumer.mapped),
        "closing": len(consumer.closing),
        "watches": len(consumer._watches),
        "dropped": len(consumer.dropped),
        "files": open_files() - files,
    }
    comm.barrier()
    comm.barrier()
    right = kept is None or are(kept, SIZE)
    del kept
    handle.cancel()
    return hits, left, right


@pytest.mark.parametrize("how", ["mapped", "not mapped"])
def test_interrupts_of_opens(how):
    producers, (hits, left, right) = run_ranks(2, opens_amid_interrupts, how)
    free, exact, references, gone = producers
    assert min(hits) > TURNS // 10
    assert free
    assert right
    assert (left["closing"], left["dropped"]) == (0, 0)
    if not exact:  # GPU memory that was being mapped or unmapped keeps its reference
        return
    kept = int(how == "mapped")
    assert references[1] - references[0] == kept
    files = left.pop("files")
    assert left == {
        "opens": kept,
        "mappings": kept,
        "closing": 0,
        "watches": kept,
        "dropped": 0,
    }
    assert sum(files.values()) < FEW, files
    assert gone


def shares_amid_interrupts(comm):
    x = numbers(SIZE)
    ns.share(x).cancel()
    files = open_files()
    handles = []

    def share():
        handles.append(ns.share(x, opens=2))
        ns.open_shared(handles[-1]).close()
        handles.pop().cancel()
        sharing.collect()

    hits = interrupted(share, check, TURNS)
    gc.collect()
    right = are(x, SIZE)
    cancel_all()  # of some, a signal took the handle
    grown = open_files() - files
    return hits, right, nothing_is_shared(), sharing.stats(), grown


def cancel_all():
    for sent in list(producer.sent.values()):
        sent.file.cancel(sent.offset, sent.serial)


def test_interrupts_of_shares():
    ((hits, right, clean, stats, files),) = run_ranks(1, shares_amid_interrupts)
    assert hits > TURNS // 10
    assert right
    assert clean, stats
    assert sum(files.values()) < FEW, files
