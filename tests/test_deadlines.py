"""Ranks that are late or absent: every wait ends, and its error names both ranks.

The ranks are spawned processes, because mpirun would end the whole job. Without a GPU
they run in Numba's CUDA simulator. Functions on ranks return facts, and the tests check
these.
"""

import functools
import re
import time

import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import device as symm
from numba_symm.collectives import operations
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.operations import BROADCAST
from numba_symm.collectives.protocols.binding import Series
from numba_symm.gpu import loads
from numba_symm.launch import failures
from tests.absence import AWAY, PATIENT, SOON, context_is_alive, input_of, reduced
from tests.spawned import attempt

# Calls of the ranks that are present, which need the absent rank. Each function makes
# what needs all ranks, and returns such a call, without arguments.


def all_reduce(algorithm):
    def prepare(comm):
        x = input_of(comm)
        return lambda: comm.all_reduce(x, algorithm=algorithm)

    return prepare


def exchange(name, algorithm):
    def prepare(comm):
        x = cuda.to_device(np.ones(4 * comm.size, np.float32))
        return lambda: getattr(comm, name)(x, algorithm=algorithm)

    return prepare


def direct(name, root=0):
    def prepare(comm, count=100):
        x = comm.zeros(100, np.float32)[:count]
        out = {"out": x} if (name, comm.rank) == ("reduce", root) else {}
        return lambda: getattr(comm, name)(x, root=root, algorithm="direct", **out)

    return prepare


def plan(comm):
    return comm.all_reduce_init(input_of(comm), algorithm="one_shot_ll")


def barrier(comm):
    return comm.barrier


def memory_barrier(comm):
    memory = comm.rendezvous(comm.empty(10))
    return lambda: memory.barrier(channel=3)


def peer_of(comm):
    return AWAY if comm.rank != AWAY else 0


def put_signal(comm):
    memory = comm.rendezvous(comm.empty(10))

    def twice():
        memory.put_signal(peer_of(comm), channel=5)
        memory.put_signal(peer_of(comm), channel=5)

    return twice


def wait_signal(comm):
    memory = comm.rendezvous(comm.empty(10))
    return lambda: memory.wait_signal(peer_of(comm), channel=127)


# The same by a user's own kernels; ``result`` is False if the rank was absent.


@cuda.jit
def put_kernel(ctx, peer, result):
    if cuda.threadIdx.x == 0:
        symm.put_signal(ctx, peer, 2)
        result[0] = symm.put_signal(ctx, peer, 2)


@cuda.jit
def wait_kernel(ctx, peer, result):
    if cuda.threadIdx.x == 0:
        result[0] = symm.wait_signal(ctx, peer, 2)


@cuda.jit
def meet_kernel(ctx, peer, result):
    result[cuda.threadIdx.x] = symm.barrier(ctx, 2)


def own(kernel, answers=1):
    def prepare(comm):
        ctx = comm.rendezvous(comm.empty(10)).ctx
        result = cuda.to_device(np.full(4, 7, np.int32))

        def run():
            kernel[1, 4](ctx, peer_of(comm), result)
            assert comm.rank == AWAY or not result.copy_to_host()[:answers].any()

        return run

    return prepare


ALGORITHMS = {
    name: (
        all_reduce(name),
        f"{re.escape(failures.TABLE[made.waits[0]].words)}, block 0, epoch 1",
    )
    for name, made in operations.ALL_REDUCE.algorithms.items()
}
OPERATIONS = {
    **ALGORITHMS,
    "all_gather": (
        exchange("all_gather", "one_shot_ll"),
        "all_gather, block 0, epoch 1",
    ),
    "reduce_scatter": (
        exchange("reduce_scatter", "chunked"),
        "reduce_scatter, block 0, epoch 1",
    ),
    "reduce_scatter (direct)": (
        exchange("reduce_scatter", "direct"),
        "reduce_scatter, block 0, epoch 1",
    ),
    "all_to_all": (
        exchange("all_to_all", "copy_engine"),
        r"all_to_all \(copy_engine\), block 0, epoch 1",
    ),
    "broadcast": (
        exchange("broadcast", "one_shot_marked"),
        "broadcast, block 0, epoch 1",
    ),
    "scan": (exchange("scan", "one_shot_sentinel"), "scan, block 0, epoch 1"),
    "reduce": (
        exchange("reduce", "chunked"),
        r"reduce \(chunked\), block 0, epoch 1",
    ),
    "reduce (direct)": (direct("reduce"), r"reduce \(direct\), block 0, epoch 1"),
    "broadcast (direct)": (
        direct("broadcast"),
        r"broadcast \(direct\), block 0, epoch 1",
    ),
    "plan": (plan, r"all_reduce \(one_shot\), block 0, epoch 1"),
    "barrier": (barrier, r"barrier, block 0, epoch 1"),
    "memory_barrier": (memory_barrier, r"wait_signal, channel 3"),
    "put_signal": (put_signal, r"put_signal, channel 5"),
    "wait_signal": (wait_signal, r"wait_signal, channel 127"),
    "own_put_signal": (own(put_kernel), r"put_signal, channel 2"),
    "own_wait_signal": (own(wait_kernel), r"wait_signal, channel 2"),
    "own_barrier": (own(meet_kernel, answers=4), r"wait_signal, channel 2"),
}


def one_rank_stays_away(world, name):
    prepare, _ = OPERATIONS[name]
    with ns.Communicator(world, timeout=PATIENT) as comm:
        if not name.startswith(("own", "put", "wait")):
            prepare(comm)()  # compiled before a second counts
            comm.synchronize()
    comm = ns.Communicator(world, timeout=2.0)
    call = prepare(comm)
    memory = comm.rendezvous(comm.empty(10))
    world.barrier()
    facts = {}
    if world.rank != AWAY:
        facts["error"] = attempt(lambda: (call(), comm.synchronize()))
    world.barrier()
    if world.rank == AWAY:  # later than the deadline of the others
        facts["error"] = attempt(lambda: (call(), comm.synchronize()))
    refusals = {
        "all_reduce": lambda: comm.all_reduce(input_of(comm)),
        "all_reduce_init": lambda: comm.all_reduce_init(input_of(comm)),
        "barrier": comm.barrier,
        "empty": lambda: comm.empty(10),
        "zeros": lambda: comm.zeros(10),
        "rendezvous": lambda: comm.rendezvous(memory.get_buffer(0, 1, "f4")),
        "memory's barrier": memory.barrier,
        "memory's put_signal": lambda: memory.put_signal((world.rank + 1) % 3),
        "check": comm.check,
        "synchronize": comm.synchronize,
    }
    facts["refused"] = {what: attempt(refusals[what]) for what in refusals}
    facts["alive"] = context_is_alive()
    facts["close"] = attempt(comm.close)
    facts["closed"] = [attempt(comm.check), attempt(comm.barrier), attempt(comm.close)]
    with ns.Communicator(world, timeout=PATIENT) as comm:
        facts["again"] = reduced(comm)
    return facts


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_that_does_not_arrive(three, name):
    facts = three.run(one_rank_stays_away, name)
    _, where = OPERATIONS[name]
    where = where.replace("block 0", r"block \d")  # some run at the same time
    text = (
        rf"CollectiveTimeout: rank [02] waited for rank {AWAY} in {where} "
        r"\(timeout: 2 s\); "
    )
    for rank, fact in enumerate(facts):
        error, seconds = fact["error"]
        assert re.match(text, error), (rank, error)
        if rank == AWAY:  # it does not wait, but raises the failure of the others
            assert seconds < (SOON if name.startswith("own") else 1.9)  # compiles it
        else:
            assert seconds < SOON, (rank, seconds)
        for what, (refusal, seconds) in fact["refused"].items():
            assert re.match(text, refusal), (rank, what, refusal)
            assert seconds < 1.9, (rank, what, seconds)
        assert fact["alive"]
        error, seconds = fact["close"]
        assert error == ""  # they have raised it before
        assert seconds < SOON
        check, call, close = (error for error, _ in fact["closed"])
        assert check.startswith("ClosedError: ")
        assert call == check
        assert close == ""
        assert fact["again"]


def comes_when_the_others_have_left(world):
    comm = ns.Communicator(world, timeout=1.0)
    x = comm.zeros(100, np.float32)
    world.barrier()

    given = Invocation(BROADCAST, x, out=x, algorithm="direct", root=0)
    # Enqueued in time, but started late.
    packed, stream, *_ = comm._calls.bound(given)
    launch = Series(*packed.parts)

    def call():
        launch(stream)
        comm.synchronize()

    error = "" if world.rank == AWAY else attempt(call)[0]
    x.copy_to_device(np.full(100, 5 + world.rank, np.float32))
    world.barrier()
    if world.rank == AWAY:
        error = attempt(call)[0]
        x.copy_to_device(np.full(100, 5 + world.rank, np.float32))
    world.barrier()
    kept = x.copy_to_host().tolist() == [5.0 + world.rank] * 100
    world.barrier()
    attempt(comm.close)
    return error, kept


def test_a_rank_that_arrives_too_late_writes_no_array(three):
    """Its peers may use their arrays again, because they have raised the failure."""
    for error, kept in three.run(comes_when_the_others_have_left):
        assert error.startswith("CollectiveTimeout: ")
        assert kept


def roots_of_two_differ(world, name, roots, op, count):
    comm = ns.Communicator(world, timeout=PATIENT)
    x, root = cuda.to_device(np.full(count, 5.0, np.float32)), roots[world.rank]
    args = {"root": root} | ({"op": op[world.rank]} if op else {})
    world.barrier()
    errors = []
    other = "one_shot_marked" if name == "broadcast" else "one_shot_ll"
    for algorithm in (other, "one_shot_marked", other):
        call = functools.partial(getattr(comm, name), x, algorithm=algorithm, **args)
        errors.append(attempt(lambda call=call: (call(), comm.synchronize())))
        world.barrier()
    attempt(comm.close)
    return errors


@pytest.mark.parametrize(
    ("name", "roots", "op"),
    [
        ("broadcast", (0, 1), None),
        ("broadcast", (1, 0), None),
        ("reduce", (0, 1), ("sum", "sum")),
        ("reduce", (1, 0), ("sum", "sum")),
        ("reduce", (0, 0), ("sum", "max")),
    ],
)
def test_different_calls_of_two_ranks_raise_in_the_next_one(two, name, roots, op):
    """Some calls have a single vector, for which only one thread waits."""
    for first, *later in two.run(roots_of_two_differ, name, roots, op, 3):
        errors = [error for error, _ in (first, *later)]
        told = [error for error in errors if error]
        assert len(told) >= len(later), errors
        for error in told:
            # With the call's number, if a rank has compared the records before.
            assert re.match(r"CallMismatch: rank \d's call( \d+)? differs from", error)
        assert sum(seconds for _, seconds in (first, *later)) < PATIENT / 2


def loads_too_long(world):
    """A rank loads a kernel of another communicator's call while the others wait."""
    with ns.Communicator(world, timeout=PATIENT) as other:
        comm = ns.Communicator(world, timeout=0.5)
        with loads.of("scan"), loads.noted("short"):
            pass  # one that ended in time is not named
        other.barrier()
        other.synchronize()
        if world.rank == AWAY:
            with loads.of("all_gather"), loads.noted("one_shot"):
                while not comm._calls.members.failed:
                    time.sleep(0.01)
        calls = lambda: comm.all_reduce(input_of(comm)), comm.synchronize
        texts = [attempt(call)[0] for call in calls]
        comm.close()
        return texts[comm.rank != AWAY :]


def test_an_error_names_the_kernel_that_a_rank_loads(three):
    cause = re.compile(
        rf"rank {AWAY} has been loading all_gather's kernel for "
        r"(0\.[5-9]|[1-9]\d*\.\d) s, which waits for its GPU; "
        r"call comm\.prepare\('all_gather'\) before other calls"
    )
    for texts in three.run(loads_too_long):
        assert all(cause.search(text) for text in texts), texts
        assert not any("scan" in text or "was not late" in text for text in texts)
