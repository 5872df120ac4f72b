"""Schedules over many islands, without ranks: results, messages and limits."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from numba_symm import dtypes
from numba_symm.collectives.islands import construction
from numba_symm.collectives.islands.rails import strided
from numba_symm.collectives.islands.site import IN_THE_SIMULATOR, ON_GPUS
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.errors import ArgumentError
from tests.expected import expected
from tests.island_schedules import (
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
from tests.schedules import Machine, folded

APART = (0, 4), (1, 9), (2, 7), (3, 8), (5, 6)
SMALL = dataclasses.replace(IN_THE_SIMULATOR, staging=1 << 14)
SCANS = [each for each in OPERATIONS.values() if each.exchange.output.scans]
REDUCING = ("all_reduce", "reduce", "reduce_scatter", *(each.name for each in SCANS))
NAMES = (*REDUCING, "all_gather", "all_to_all", "broadcast")


def wanted(parts, operation, inputs, rank, root, op):
    """Return a rank's output: reduced within each island, then over the islands."""
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
    found = [{k: inputs[r] for k, r in enumerate(part) if r in used} for part in parts]
    found = [folded(each, op) for each in found if each]
    return folded(dict(enumerate(found)), op) if found else None


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


@st.composite
def jobs(draw):
    """Islands of any ranks, limits, and a call that has an output on several."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    ranks = [*range(sum(sizes))]
    if draw(st.booleans()):  # the ranks of an island need not be consecutive
        ranks = draw(st.permutations(ranks))
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    parts = sorted(tuple(sorted(ranks[a:b])) for a, b in itertools.pairwise(ends))
    limits = draw(st.sampled_from([SMALL, SMALL, SMALL, IN_THE_SIMULATOR, ON_GPUS]))
    name = draw(st.sampled_from(NAMES))
    power = 1 << draw(st.sampled_from([0, 3, 6, 9, 11, 12]))
    count = power + draw(st.integers(0, power - 1))
    if name in NAMES[-3:-1]:
        count = max(1, count // len(ranks))
    kind = draw(st.sampled_from(["float32", "int64", "complex64"]))
    root, seed = draw(st.integers(0, len(ranks) - 1)), draw(st.integers(0, 999))
    place = name == "all_to_all" and draw(st.booleans())
    return tuple(parts), limits, name, count, kind, seed, root, place


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(jobs())
@example((even(32, 1), ON_GPUS, "all_reduce", 1, "float32", 0, 0, False))
@example((even(9, 2), IN_THE_SIMULATOR, "reduce", 53, "float32", 2, 17, False))
@example((of_sizes(3, 3, 2), SMALL, "reduce_scatter", 701, "float32", 3, 7, False))
@example((of_sizes(1, 4, 2, 2, 3, 1), SMALL, "scan", 701, "float32", 3, 12, False))
@example((even(5, 2), SMALL, "broadcast", 8000, "float32", 0, 1, False))
@example((APART, SMALL, "all_gather", 701, "int64", 3, 9, False))
def test_results_have_the_bits_of_the_order_of_islands(job):
    check(*job)


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
                far = np.subtract(outer, 1) * step.apart
                for last in (far[far < 0].sum(), far[far > 0].sum()):
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
        for power in (9, 22, 30) if name == "all_to_all" else (9, 22, 40):
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
    for of in (parts, even(32, 2), tuple((i, i + 32) for i in range(32))):
        for name in ("all_to_all", "all_gather"):
            machine = check(of, ON_GPUS, name, 5)
            assert set(machine.sent.values()) == {log}, name
    for name in ("scan", "exscan", "reverse_scan"):  # of neighbors in other islands
        machine = check(of, ON_GPUS, name, 5)
        assert set(machine.sent.values()) == {log}, name
    for name in ("reduce", "broadcast"):
        machine = check(parts, ON_GPUS, name, 100)
        assert sum(machine.sent.values()) == 31
        assert max(machine.sent.values()) <= log
    job = ScheduledJob(parts)
    machine = Machine(job, 0)
    machine.run({rank: job.schedule(rank, "barrier", 0) for rank in range(32)})
    assert set(machine.sent.values()) == {log}


MIB = 1 << 20


def bounds(name, m, n, b):
    """Return the most messages and launches of a call.

    Args:
        name: the operation.
        m: the number of islands.
        n: the ranks of each.
        b: the bytes of the message, of all shards if each rank has one.
    """
    log = (m - 1).bit_length()
    exchange = log if m >= 512 else m - 1
    match name:
        case "all_reduce" | "reduce":
            chunks = max(9, 2 + b // (5 * MIB * n))
            return chunks * 2 * exchange, chunks * (2 * log + 8)
        case "reduce_scatter":
            chunks = 2 + b // min(4 * MIB * m, 4.6 * MIB * n)
            return chunks * exchange, chunks * (2 * log + 8 + 3 * (3.5 * n + 1))
        case "all_gather":
            return m - 1, m + 1
        case "all_to_all":
            return (m - 1) * n, (1 + b // (5 * MIB)) * (2 * log + 8)
        case "broadcast":
            return 9 * (log if m > 8 else m - 1), 9
    chunks = 1 + b * (2 * m + 2) // (31 * MIB)  # of a scan
    return chunks * (log if m > 8 else m * n - 1), 5 * chunks


CHOSEN_BY_A_MODEL = {
    "barrier": [(5, 5)],
    "all_reduce": [(5, 5), (10, 10), (558, 11)],
    "reduce": [(1, 5), (6, 10), (416, 15)],
    "reduce_scatter": [(5, 5), (5, 5), (310, 10)],
    "all_gather": [(5, 5), (5, 5), (31, 31)],
    "all_to_all": [(5, 5), (31, 1), (248, 1)],
    "broadcast": [(5, 5), (5, 5), (64, 65)],
    **{each.name: [(5, 5), (15, 15)] for each in SCANS},
}
"""Messages and steps of calls of 1 KiB, 1 MiB and 1 GiB over 32 islands of 8, when the
library computed times, and chose among more schedules than one for many islands."""


@pytest.mark.parametrize("name", CHOSEN_BY_A_MODEL)
def test_one_schedule_for_many_islands_is_nearly_as_short_as_the_best_of_several(name):
    job = ScheduledJob(even(32, 8))
    shards = job.size if name in (*NAMES[-3:-1], "reduce_scatter") else 1
    for power, before in zip((10, 20, 30), CHOSEN_BY_A_MODEL[name], strict=False):
        count = max(1, (1 << power) // 4 // shards)
        for rank in (0, 7, 8, job.size // 2, job.size - 1):
            steps = exchanges(job.schedule(rank, name, count, "float32"))
            now = sum(len(each.sends) for each in steps), len(steps)
            assert all(b <= 1.5 * a for a, b in zip(before, now, strict=True)), now


@pytest.mark.parametrize("islands", [2, 9, 24, 100, 1000])
def test_messages_and_launches_are_within_stated_bounds(islands):
    """Of calls of all sizes between nodes of 8; of the first rank and the last one."""
    job = ScheduledJob(even(islands, 8))
    for name in NAMES:
        scan = name not in (*REDUCING[:3], *NAMES[-3:])
        shards = job.size if name in (*NAMES[-3:-1], "reduce_scatter") else 1
        for power in range(8, 19 if scan else 35, 5):
            count = max(1, (1 << power) // 4 // shards)
            most = bounds(name, islands, 8, 4 * count * shards)
            for rank in (0, job.size - 1):
                steps = job.schedule(rank, name, count, "float32")
                sent = sum(len(each.sends) for each in exchanges(steps))
                assert sent <= most[0], (name, power, rank)
                assert launches(steps) <= most[1], (name, power, rank)


def test_shards_that_cross_together_take_no_more_messages_than_alone():
    """Nearly 256 KiB for each of 800 ranks: in 19 chunks, if they cross together."""
    job, count = ScheduledJob(even(100, 8)), 65280
    most = bounds("all_to_all", 100, 8, 4 * count * job.size)
    for rank in (0, job.size - 1):
        steps = job.schedule(rank, "all_to_all", count, "float32")
        assert sum(len(each.sends) for each in exchanges(steps)) <= most[0]
        assert launches(steps) <= most[1]


def test_ranks_of_unequal_islands_choose_the_same_steps():
    """The memory of a call has room for all results, by the ranks of some islands."""
    sizes = dataclasses.replace(IN_THE_SIMULATOR, kept=1 << 15)
    job = ScheduledJob(of_sizes(*[2, 4, 4] * 7, 2, 4), sizes)
    few, many = (
        {each.operation.name for each in flat(steps) if isinstance(each, Within)}
        for rank in (0, 2)
        for steps in [job.schedule(rank, "reduce_scatter", 1, "complex128")]
    )
    assert few == many == {"reduce"}


def test_ranges_at_equal_distances_are_one_copy():
    """In two axes, for the islands and the ranks of each, in any direction."""
    for places in (
        [*range(0, 90, 9)],
        [9 * i + 100 * k for i in range(5) for k in range(3)],
        [500 - 100 * k + 9 * i for k in range(4) for i in range(3)],
        [0, 5, 6, 7, 30, 60, 90, 91],
        [4],
    ):
        found = [
            place + k * outer + i * inner
            for place, (m, outer), (n, inner) in strided(places)
            for k in range(m)
            for i in range(n)
        ]
        assert found == places
    assert [len(strided([f * i for i in range(9)])) for f in (1, -7)] == [1, 1]
    assert len(strided([9 * i + 100 * k for i in range(5) for k in range(3)])) == 1


def test_calls_fit_for_as_many_islands_as_are_accepted():
    most = ON_GPUS.islands
    construction._refuse_too_many(most, ON_GPUS)
    text = f"expected at most {most} islands.*65536 KiB.*, got {most + 1};"
    with pytest.raises(ArgumentError, match=text):
        construction._refuse_too_many(most + 1, ON_GPUS)
    job = ScheduledJob(even(most, 1), most_chunks=4)
    for name in (*NAMES, "barrier"):
        assert job.schedule(most // 2, name, 9, "float16"), name
