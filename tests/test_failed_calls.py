"""A call that fails on one rank, or an object that one rank drops, fails all ranks.

Once arguments are checked, a call that fails on one rank fails on all. The others have
enqueued theirs, which would otherwise exchange data with later calls.
"""

import contextlib
import itertools

import numpy as np
from numba import cuda

import numba_symm as ns
from numba_symm.gpu import arrays, streams
from numba_symm.gpu.kernels import Kernel, Launch
from tests.absence import AWAY, PATIENT, SOON
from tests.gates import intercepted
from tests.spawned import attempt, run_ranks


@contextlib.contextmanager
def failing(comm, holder, name, after=0, error=ns.DriverError):
    """Let a function fail in its call number ``after``, from 0.

    It is one of the library, or one of the driver that packed calls of ``comm`` call.
    """
    left = [after]

    def act():
        if left[0] == 0:
            raise error("out of resources\nas was to be expected")
        left[0] -= 1

    if holder is DRIVER:
        with intercepted(comm, name, act):
            yield
        return
    real = getattr(holder, name)

    def call(*args, **options):
        act()
        return real(*args, **options)

    setattr(holder, name, call)
    try:
        yield
    finally:
        setattr(holder, name, real)


# Each prepares, and returns the call that is to fail.


def all_reduce(comm, x):
    return lambda: comm.all_reduce(x)


def into(comm, x):
    y = cuda.device_array_like(x)
    return lambda: comm.all_reduce(x, out=y, algorithm="two_shot_marked")


def direct(comm, x):
    mine = comm.zeros(100, np.float32)
    return lambda: comm.broadcast(mine, algorithm="direct")


def direct_shards(comm, x):
    mine = comm.zeros(100, np.float32)
    return lambda: comm.all_reduce(mine, out=mine, algorithm="direct")


def plan(comm, x):
    return comm.all_reduce_init(x)


def barrier(comm, x):
    return comm.barrier


def messages(comm, x):
    y = cuda.device_array_like(x)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.sendrecv(x, dst=right, out=y, src=left)


def group(comm, x):
    exchange = messages(comm, x)

    def call():
        with comm.group():
            comm.all_reduce(x)
            exchange()

    return call


def group_with_captured_call(comm, x):
    """The second call of a group fails on a stream that is said to be in a capture."""
    captured = 1 - streams.LEGACY_DEFAULT

    def call():
        real = streams.spoil_capture
        streams.spoil_capture = lambda handle: handle == captured
        try:
            with comm.group():
                comm.all_reduce(x)
                comm.all_reduce(x)
                launches = comm._calls.thread.group.pending.launches
                launches[1] = launches[1][0], captured
        finally:
            streams.spoil_capture = real

    return call


def gather(comm, x):
    return lambda: comm.gather(x)


def reduce_scatter_v(comm, x):
    return lambda: comm.reduce_scatter_v(x, counts=[40, 30, 30])


def memory_barrier(comm, x):
    return comm.rendezvous(comm.zeros(10)).barrier


DRIVER = object()
LAUNCH = (DRIVER, "cuLaunchKernelEx")
CALLS = {
    "all_reduce": [
        ("a launch", all_reduce, (*LAUNCH, 0)),
        ("an event after a launch", all_reduce, (DRIVER, "cuEventRecord", 0)),
        ("compiling", all_reduce, (Kernel, "bind", 0)),
        ("memory for the output", all_reduce, (arrays, "empty", 0)),
        ("a plan's launch", plan, (*LAUNCH, 0)),
        ("the last launch of two", direct_shards, (*LAUNCH, 1)),
        ("the launch of one in a group", group, (*LAUNCH, 1)),
        ("a refusal amid a group", group, (*LAUNCH, 1, ns.ArgumentError)),
    ],
    "broadcast": [("the last launch of two", direct, (*LAUNCH, 1))],
    "barrier": [
        ("a launch", barrier, (*LAUNCH, 0)),
        ("compiling", barrier, (Kernel, "bind", 0)),
        ("a memory's", memory_barrier, (Launch, "__call__", 0)),
    ],
    "sendrecv": [
        ("a launch", messages, (*LAUNCH, 0)),
        ("compiling", messages, (Kernel, "bind", 0)),
    ],
    "group": [
        ("the messages' launch", group, (*LAUNCH, 0)),
        ("a captured launch after another", group_with_captured_call, (*LAUNCH, 1)),
    ],
    "gather": [("compiling", gather, (Kernel, "bind", 0))],
    "reduce_scatter_v": [("the launch of a part", reduce_scatter_v, (*LAUNCH, 2))],
}


def fails_on_one_rank(world):
    facts = []
    for where, prepare, point in itertools.chain(*CALLS.values()):
        comm = ns.Communicator(world, timeout=PATIENT)
        x = cuda.to_device(np.full(100, comm.rank, np.float32))
        call = prepare(comm, x)
        world.barrier()
        with failing(comm, *point) if comm.rank == AWAY else contextlib.nullcontext():
            own = attempt(call)
        later = attempt(lambda: (comm.all_reduce(x), comm.synchronize()))  # noqa: B023
        world.barrier()
        error = (*point, ns.DriverError)[3].__name__
        facts.append((where, error, own, later, attempt(comm.close)))
    with ns.Communicator(world, timeout=PATIENT) as comm:
        y = comm.all_reduce(x)
        comm.synchronize()
        again = y.copy_to_host().tolist() == [3.0] * 100
    return facts, again


def test_a_call_that_fails_on_one_rank_fails_on_all():
    """The rank raises the error; all later calls of all ranks name the rank."""
    for rank, (facts, again) in enumerate(run_ranks(3, fails_on_one_rank)):
        assert again
        names = [name for name, calls in CALLS.items() for _ in calls]
        for name, (where, error, own, later, close) in zip(names, facts, strict=True):
            left = f"RankLeft: rank {AWAY} left {name} with {error}"
            told = f"{left}: out of resources; "
            what = name, where, rank, own, later, close
            if rank == AWAY:
                assert own[0].startswith(f"{error}: out of resources"), what
            else:  # in the simulator kernels end, and say nothing, before it returns
                assert own[0] == "" or own[0].startswith(told), what
            assert later[0].startswith(told), what
            assert own[1] + later[1] < SOON, what
            assert close[0] == "", what  # every rank has raised it before


def drops_its_communicator(world):
    comm = ns.Communicator(world, timeout=PATIENT)
    x = cuda.to_device(np.ones(10, np.float32))
    comm.all_reduce(x)
    comm.synchronize()
    world.barrier()
    told = []
    if world.rank == AWAY:
        del comm
    else:
        told = [attempt(lambda: (comm.all_reduce(x), comm.synchronize()))[0]]
        told += [attempt(lambda: comm.zeros(3))[0], attempt(comm.close)[0]]
    world.barrier()
    return told


def test_calls_after_a_rank_has_dropped_its_communicator():
    text = f"RankLeft: rank {AWAY} dropped the communicator without closing it; results"
    for rank, told in enumerate(run_ranks(3, drops_its_communicator)):
        if rank != AWAY:
            assert [error.startswith(text) for error in told] == [True, True, False]
            assert told[2] == ""
