"""Calls of forked children are refused, and do not affect their parent."""

import atexit
import contextlib
import gc
import json
import os
import signal
import traceback

import numpy as np
from numba import cuda

import numba_symm as ns
from tests.absence import PATIENT
from tests.spawned import attempt, outcomes


def in_a_child(function, *args):
    """Return what a function returns in a forked child, which ends as scripts do."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        os.close(reads)
        found = None
        try:
            found = function(*args)
            gc.collect()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            os.write(writes, json.dumps(found).encode())
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


def calls_of(comm, x, memory, plan, store):
    right = (comm.rank + 1) % comm.size
    return {
        "check": comm.check,
        "synchronize": comm.synchronize,
        "all_reduce": lambda: comm.all_reduce(x),
        "all_reduce_init": lambda: comm.all_reduce_init(x),
        "plan": plan,
        "barrier": comm.barrier,
        "send": lambda: comm.send(x, dst=right),
        "gather": lambda: comm.gather(x),
        "group": lambda: comm.group().__enter__(),
        "empty": lambda: comm.empty(3),
        "rendezvous": lambda: comm.rendezvous(x),
        "split": lambda: comm.split(0),
        "dup": comm.dup,
        "with": lambda: comm.__enter__(),
        "memory's barrier": memory.barrier,
        "memory's put": lambda: memory.put(x, right),
        "memory's ctx": lambda: memory.ctx,
        "memory's get_buffer": lambda: memory.get_buffer(right, 1, np.int8),
        "exchange": lambda: store.all_gather(1, "one"),
    }


def child(comm, x, memory, plan, store, channel):
    """Use, leave and drop everything."""
    calls = calls_of(comm, x, memory, plan, store)
    told = {name: attempt(call)[0] for name, call in calls.items()}
    told["channel"] = attempt(channel.recv_fd, (comm.rank + 1) % comm.size)[0]
    channel.discard()
    with contextlib.suppress(KeyError), channel:
        raise KeyError
    with contextlib.suppress(ns.ClosedError, KeyError), comm:
        raise KeyError
    comm.__exit__(KeyError, KeyError(), None)
    told["close"] = attempt(comm.close)[0]
    return told


def forks(world):
    comm, dropped = (ns.Communicator(world, timeout=PATIENT) for _ in range(2))
    x = comm.zeros(10)
    memory, plan = comm.rendezvous(x), comm.all_reduce_init(x)
    store = ns.StoreExchange(world, "a store")
    channel = ns.IpcChannel(store)
    kept = [comm, x, memory, plan, store, channel]
    world.barrier()

    def drop():
        nonlocal dropped
        kept.clear()
        dropped = None

    told = in_a_child(child, *kept)
    silent = in_a_child(drop)
    world.barrier()
    # All of it works in the parent.
    y = comm.all_reduce(cuda.to_device(np.full(5, comm.rank, np.float32)))
    plan()
    memory.barrier()
    comm.synchronize()
    right = y.copy_to_host().tolist() == [3.0] * 5
    right = right and store.all_gather(world.rank, "ranks") == [0, 1, 2]
    with channel:
        for fd in channel.all_gather_fds(0):
            os.close(fd)
    right = right and comm.zeros(5).copy_to_host().tolist() == [0] * 5
    comm.close()
    dropped.close()
    return told, silent, right


def test_a_forked_child_is_refused_and_changes_nothing():
    for rank, ended in enumerate(outcomes(3, forks)):
        assert not ended.error, ended.trace
        told, silent, right = ended.value
        assert right
        assert silent is None
        assert ended.output == ""
        assert told.pop("close") == ""
        assert told.pop("channel").startswith("ClosedError: ")
        text = f"this process was forked from rank {rank} and cannot "
        assert text in told.pop("exchange")
        for name, error in told.items():
            assert error.startswith(f"ClosedError: {text}"), (name, error)
            assert error.endswith("with spawn, and construct what they need there"), (
                error
            )
