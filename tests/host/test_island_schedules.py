"""Schedules over many islands, without ranks: results, messages and limits."""

import dataclasses
import math

import numpy as np
import pytest

from numba_symm import dtypes
from numba_symm.bench.laboratory.schedules import (
    SOURCE,
    STAGING,
    TARGET,
    Combine,
    Convert,
    CopyStep,
    ExchangeStep,
    Pack,
    ScheduledJob,
    Within,
    even,
    exchanges,
    flat,
    launches,
    of_sizes,
)
from numba_symm.collectives.islands import several
from numba_symm.collectives.islands.sizes import IN_THE_SIMULATOR, ON_GPUS
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.errors import ArgumentError
from tests.expected import expected
from tests.schedules import Machine, folded

SHAPES = [
    *(even(2, 2), even(5, 1), even(4, 3), even(9, 2), even(32, 1)),
    *(of_sizes(3, 3, 2), of_sizes(1, 4, 2, 2, 3, 1), of_sizes(4, 1)),
    ((0, 2, 4), (1, 5, 8), (3, 6, 7), (9,)),
    tuple((i, i + 5) for i in range(5)),
]
SCANS = [each for each in OPERATIONS.values() if each.exchange.output.scans]
REDUCING = ("all_reduce", "reduce", "reduce_scatter", *(each.name for each in SCANS))
NAMES = (*REDUCING, "all_gather", "all_to_all", "broadcast")


def wanted(parts, operation, inputs, rank, root, op):
    """Return a rank's output: reduced within each island, then in their order."""
    size = len(inputs)
    exchange = operation.exchange
    if not operation.reduces:
        return expected(operation, inputs, rank, root, None, None, np.concatenate)
    if operation.at_root and rank != root:
        return None
    if exchange.sends_shards:
        count = len(inputs[0]) // size
        inputs = [each[rank * count :][:count] for each in inputs]
    used = set(exchange.output.used(rank, size, root))
    found = [[inputs[r] for r in part if r in used] for part in parts]
    found = [folded(each, op) for each in found if each]
    return folded(found, op) if found else None


def check(parts, sizes, name, count, kind="float32", seed=0, root=0, place=False):
    """Execute a call on all ranks, and compare every bit. Returns the machine."""
    job, operation = ScheduledJob(parts, sizes), OPERATIONS[name]
    many = job.size if name in ("all_gather", "all_to_all", "reduce_scatter") else 1
    element = dtypes.element(np.dtype(kind), "test")
    machine = Machine(job, count * many * element.itemsize, seed)
    random = np.random.default_rng(seed)
    number = count * operation.shards(job.size)
    inputs = [random.standard_normal(number).astype(kind) for _ in range(job.size)]
    at = TARGET if place or operation.in_place else SOURCE
    for rank, values in enumerate(inputs):
        machine.at(rank, at, values.nbytes)[:] = values.view(np.uint8)
    machine.run(
        {
            rank: job.schedule(rank, name, count, kind, root=root, place=place)
            for rank in range(job.size)
        }
    )
    for rank in range(job.size):
        result = wanted(parts, operation, inputs, rank, root, "sum")
        if result is not None:
            found = machine.values(rank, TARGET, len(result), element)
            assert found.tobytes() == result.tobytes(), (name, rank)
    return machine


@pytest.mark.parametrize(
    "parts", SHAPES, ids=lambda p: "+".join(str(len(i)) for i in p)
)
def test_results_have_the_bits_of_the_order_of_islands(parts):
    """Small calls, calls in one chunk, and in several that share the memory."""
    small = dataclasses.replace(IN_THE_SIMULATOR, staging=1 << 14)
    sizes = {1: ON_GPUS, 2: IN_THE_SIMULATOR, 53: IN_THE_SIMULATOR, 701: small}
    last = sum(map(len, parts)) - 1
    for seed, (count, limits) in enumerate(sizes.items()):
        for name in NAMES:
            each = count // len(parts) if name in NAMES[-3:] else count
            check(parts, limits, name, max(1, each), seed=seed, root=last * (seed % 2))
        check(parts, limits, "all_to_all", count, "int64", seed, place=True)


def inside(job, steps, nbytes):
    """Check that all addresses are in the memory that they are meant for."""
    ends = {at: at + nbytes for at in (SOURCE, TARGET)}
    ends[STAGING] = STAGING + job.sizes.staging

    def within(address, size):
        base = max(at for at in ends if at <= address)
        assert address + size <= ends[base], (hex(address), size)

    for step in flat(steps):
        match step:
            case ExchangeStep():
                for parcel in (*step.sends, *step.receives):
                    within(parcel.address, parcel.nbytes)
            case CopyStep():
                within(step.source, step.nbytes)
                within(step.target, step.nbytes)
            case Pack():
                within(step.whole, math.prod(step.shape))
                *outer, run = step.shape
                last = np.dot(np.subtract(outer, 1), step.apart)
                within(step.spread + int(last), run)
            case Combine():
                within(step.first, step.stride * step.number)
            case Convert():
                within(step.source, step.count * step.kinds[0].itemsize)
                within(step.target, step.count * step.kinds[1].itemsize)
            case Within():
                call = step.call
                for address in {call.source, call.target} - {0}:
                    within(address, call.nbytes)


def passed(steps, peer, sending):
    """Return the bytes of each parcel to a rank, or from it, in their order."""
    each = [e.sends if sending else e.receives for e in exchanges(steps)]
    return [p.nbytes for parcels in each for p in parcels if p.peer == peer]


UNEVEN = of_sizes(*[8] * 20, *[6] * 12)
LARGE = [even(2, 64), even(33, 1), even(1000, 8), even(10_000, 1)]
LARGE += [of_sizes(*(1 + i % 8 for i in range(100)))]
KINDS = [("int8", "sum"), ("float16", "avg"), ("complex128", "sum")]


@pytest.mark.parametrize("parts", LARGE, ids=lambda p: f"{len(p)} islands")
def test_schedules_fit_and_match_for_many_islands_and_all_sizes(parts):
    job = ScheduledJob(parts, most_chunks=4)
    random = np.random.default_rng(len(parts))
    for name in (*NAMES, "barrier"):
        shards = name in NAMES[-3:-1] or name == "reduce_scatter"
        for power in (30,) if name == "all_to_all" else (9, 40):
            kind, op = KINDS[random.integers(3)] if name in REDUCING else KINDS[0]
            if "scan" in name:
                op = "sum"
            rank = int(random.integers(job.size))
            count = (1 << power) + int(random.integers(99))
            element = dtypes.element(np.dtype(kind), "test")
            count = max(1, count // element.itemsize // (job.size if shards else 1))
            of_call = name, count, kind, op, int(random.integers(job.size)), False
            steps = job.schedule(rank, *of_call)
            nbytes = count * element.itemsize * (job.size if shards else 1)
            inside(job, steps, nbytes)
            met = [p.peer for e in exchanges(steps) for p in (*e.sends, *e.receives)]
            if met:
                peer = met[int(random.integers(len(met)))]
                there = job.schedule(peer, *of_call)
                for sending in (True, False):
                    here = passed(steps, peer, sending)
                    assert here == passed(there, rank, not sending), of_call


def test_few_messages_are_needed_for_small_calls():
    """⌈log₂ 32⌉ from each rank, or one to each island but the first."""
    parts, log = even(32, 1), 5
    machine = check(parts, ON_GPUS, "reduce_scatter", 100)
    assert set(machine.sent.values()) == {log}
    for name, of in (("reduce_scatter", even(32, 2)), ("all_gather", UNEVEN)):
        job = ScheduledJob(of)
        for rank in range(0, job.size, 7):
            steps = job.schedule(rank, name, 20)
            assert len(exchanges(steps)) == log, name
            assert launches(steps) <= 8, name
    for name in ("all_reduce", "all_gather", "scan"):
        machine = check(parts, ON_GPUS, name, 100)
        assert set(machine.sent.values()) == {log}, name
        assert sum(machine.nbytes.values()) <= 32 * 31 * (400 + 16)
    for name in ("reduce", "broadcast"):
        machine = check(parts, ON_GPUS, name, 100)
        assert sum(machine.sent.values()) == 31
        assert max(machine.sent.values()) <= log
    job = ScheduledJob(parts)
    machine = Machine(job, 0)
    machine.run({rank: job.schedule(rank, "barrier", 0) for rank in range(32)})
    assert set(machine.sent.values()) == {log}


BOUNDS = {
    # By operation: launches, and parcels that a rank sends, of islands and chunks.
    "all_reduce": (lambda m, n: 8 * n, lambda m, n: 2 * (m - 1) * n),
    "reduce": (lambda m, n: 8 * n, lambda m, n: 2 * (m - 1) * n),
    "reduce_scatter": (lambda m, n: 60 * n, lambda m, n: (m - 1) * n),
    "broadcast": (lambda m, n: 2 * n, lambda m, n: m - 1 + n),
    "all_gather": (lambda m, n: min(m + 1, 3 * n + 2), lambda m, n: m - 1),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("islands", [16, 100, 1000])
def test_launches_and_parcels_of_large_calls_are_bounded(name, islands):
    """Of 1 GiB between nodes of 8. A chunk has at least 14 MiB of staging memory."""
    job, nbytes = ScheduledJob(even(islands, 8)), 1 << 30
    received = 2 * nbytes // 8
    chunks = max(9, -(-received // (14 << 20)) + 1)
    if name == "broadcast":
        chunks = max(chunks, 2 * islands + 1)
    if name == "all_gather":  # or as many islands as a half of the memory has room for
        chunks = -(-9 * nbytes // 8 // (32 << 20)) + 2
        chunks = chunks if nbytes // job.size < 900 << 10 else islands
    count = nbytes // 4 // (job.size if name in NAMES[-3:-2] + NAMES[2:3] else 1)
    steps = job.schedule(0, name, count, "float32")
    most_launches, most_sent = (bound(islands, chunks) for bound in BOUNDS[name])
    assert launches(steps) <= most_launches
    assert sum(len(each.sends) for each in exchanges(steps)) <= most_sent


def test_calls_fit_for_as_many_islands_as_are_accepted():
    most = ON_GPUS.islands
    several._refuse_too_many(most, ON_GPUS)
    text = f"expected at most {most} islands.*65536 KiB.*, got {most + 1};"
    with pytest.raises(ArgumentError, match=text):
        several._refuse_too_many(most + 1, ON_GPUS)
    job = ScheduledJob(even(most, 1), most_chunks=4)
    for name in (*NAMES, "barrier"):
        assert job.schedule(most // 2, name, 9, "float16"), name
