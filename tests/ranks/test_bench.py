"""The benchmark on the ranks of this job, with messages small enough to simulate."""

import dataclasses
import json
import os
import re
import types

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.bench import __main__ as bench
from numba_symm.bench import overlap, tune
from numba_symm.bench.bench_operations import OPERATIONS
from numba_symm.bench.contenders.as_mpi4py import STAGED
from numba_symm.bench.options import torch_multiplies
from numba_symm.bench.soak import CALLS, REPEATS, Client, SoakCall
from numba_symm.collectives import tuned
from numba_symm.collectives.operations import ALL_REDUCE, Operation
from numba_symm.collectives.select import ALL, Choice, Step
from numba_symm.environment import SIMULATED
from tests.ranks.helpers import bits, get, of_one_island, on_few_numbers, put

SMALL = ["-n", "2", "-w", "1", "-G", "2", "--against", "mpi"]


@pytest.fixture
def shown(world, capfd):
    """Return a function: the output of each rank since its last call, by rank."""
    return lambda: world.allgather(capfd.readouterr())


@pytest.fixture
def folder(world, tmp_path):
    """Return a folder of rank 0, which alone writes files."""
    return world.bcast(tmp_path)


def run(*words):
    return bench.main(["all_reduce", *map(str, words)])


def spoil(monkeypatch, world, when):
    """Flip the sign of one element of our results on the last rank.

    Args:
        when: returns whether to, for a call's x, out, op and algorithm.
    """
    right = OPERATIONS["all_reduce"]

    def spoiling(make):
        def made(comm, x, out, *more):
            call = make(comm, x, out, *more)

            def spoiled(stream):
                call(stream)
                comm.synchronize(stream)
                if world.rank == world.size - 1 and when(x, out, *more):
                    elements = get(out)
                    bits(elements)[-1] ^= 1 << (8 * elements.itemsize - 1)
                    put(out, elements)

            return spoiled

        return made

    wrong = dataclasses.replace(
        right, plan=spoiling(right.plan), call=spoiling(right.call)
    )
    monkeypatch.setitem(OPERATIONS, "all_reduce", wrong)


def test_a_small_run_is_right_and_recorded(world, folder, shown):
    file = folder / "r.json"
    assert run("-b", 16, "-e", 256, "-f", 16, *SMALL, "--json", file) == 0
    texts = shown()
    assert all(text.out == "" for text in texts[1:])
    rows = [line.split() for line in texts[0].out.splitlines() if line.startswith(" ")]
    assert [row[:4] for row in rows[:2]] == [
        ["16", "4", "float", "sum"],
        ["256", "64", "float", "sum"],
    ]
    assert [(row[7], row[14]) for row in rows[:2]] == [("0", "0")] * 2
    assert "# Out of bounds values : 0 OK" in texts[0].out
    assert texts[0].out.endswith(f"\n# written to {file}\n")
    found = world.bcast(json.loads(file.read_text()) if world.rank == 0 else None)
    assert found["facts"]["ranks"] == world.size
    assert list(found["contenders"]) == ["numba_symm", "mpi"]
    for row in found["rows"]:
        kinds = [(each["column"], each["way"], each["in_place"]) for each in row]
        assert kinds == [
            ("numba_symm", "plan", False),
            ("numba_symm", "call", False),
            ("numba_symm", "plan", True),
            ("mpi", "", False),
            ("mpi", "", True),
        ]
        for record in row:
            assert record["wrong"] == 0
            assert record["done"]["min"] <= record["done"]["median"]
            assert 0 < record["issue"]["median"] <= record["done"]["median"]


@on_few_numbers
def test_islands_are_pretended(world, folder, shown, monkeypatch):
    if world.size == 1:
        pytest.skip("needs two islands")
    for name in ("NUMBA_SYMM_ISLAND_SIZE", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")  # so that the run's value is undone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("NUMBA_SYMM_ENGINE", "mpi")
    file = folder / "r.json"
    words = ["-b", 512, "-e", 512, *SMALL, "--islands", world.size - 1]
    assert run(*words, "--json", file) == 0
    (text, *_) = shown()
    assert f"# islands of {world.size - 1} + 1 ranks, engine mpi (" in text.out
    found = world.bcast(json.loads(file.read_text()) if world.rank == 0 else None)
    names = [each["NCCL_HOSTID"] for each in found["facts"]["nccl"]]
    assert names == [*["0-0"] * (world.size - 1), "0-1"]


@on_few_numbers
def test_each_algorithm_has_a_column_and_may_refuse_a_type(world, shown):
    names = OPERATIONS["all_reduce"].algorithms
    words = ["-b", 64, "-e", 64, "-d", "int32", *SMALL, "--algorithm", "all"]
    assert run(*words) == 0
    (text, *_) = shown()
    (header,) = (line for line in text.out.splitlines() if " redop      time" in line)
    assert ("# times of the simulator mean nothing for GPUs\n" in text.out) == SIMULATED
    row, *_ = (
        line for line in text.out.splitlines() if line.split()[:2] == ["64", "16"]
    )
    assert header.split()[9 : 9 + len(names)] == list(names)
    for name, cell in zip(names, row.split()[8:], strict=False):
        assert (cell == "-") == (f"# Skipped {name}, int32 sum: " in text.out)


@on_few_numbers
@pytest.mark.parametrize("name", ["all_reduce", "sendrecv"])
def test_eager_calls_are_timed_in_three_ways(name, world, folder, shown):
    file = folder / "r.json"
    words = ["-b", 64, "-e", 64, *SMALL[:4], "-G", 2, "--eager", "--json", file]
    words += ["--algorithm", "sendrecv,group"] if name == "sendrecv" else []
    assert bench.main([name, *map(str, words)]) == 0
    (text, *_) = shown()
    found = world.bcast(json.loads(file.read_text()) if world.rank == 0 else None)
    (records,) = found["rows"]
    columns = ["numba_symm", "numba_symm", "mpi"]
    columns[2:2] = ["sendrecv", "group"] if name == "sendrecv" else []
    assert [each["column"] for each in records] == columns
    lines = [line for line in text.out.splitlines() if line.startswith(" ")]
    for record, line in zip(records, lines, strict=True):
        assert (record["wrong"], record["in_place"]) == (0, False)
        assert "graph" not in record
        times = [record[each]["median"] for each in ("issue", "done", "alone")]
        assert all(each > 0 for each in times)
        shown_times = [float(each) for each in line.split()[-4:-1]]
        assert shown_times == pytest.approx(times, rel=0.01)


V_FORMS = [name for name in OPERATIONS if name[-2:] == "_v"]


@on_few_numbers
@pytest.mark.parametrize("words", [*V_FORMS, "rms_norm --algorithm all"])
def test_v_forms_and_a_norm_by_two_calls_are_right(words, shown):
    words = [*words.split(), "-b", 256, "-e", 256, *SMALL]
    assert bench.main([*map(str, words)]) == 0
    (text, *_) = shown()
    assert "# Out of bounds values : 0 OK" in text.out
    assert ("Skipped" in text.out) == ("rms_norm" in words)  # MPI has no such call


@on_few_numbers
@pytest.mark.parametrize("name", ["reduce", "all_to_all", "scan", "broadcast"])
def test_mpi_is_right_in_place_too(name, folder, shown, world):
    file = folder / "r.json"
    words = [name, "-b", 256, "-e", 256, *SMALL, "--json", file]
    assert bench.main([*map(str, words)]) == 0
    found = world.bcast(json.loads(file.read_text()) if world.rank == 0 else None)
    (records,) = found["rows"]
    mpi = {each["in_place"]: each["wrong"] for each in records if not each["way"]}
    assert mpi == {False: 0, True: 0}


@on_few_numbers
def test_missing_contenders_are_reported(world, shown, monkeypatch):
    monkeypatch.setattr("numba_symm.bench.contenders.SIMULATED", True)
    assert run("-b", 16, "-e", 16, *SMALL[:-1], "nccl,torch") == 0
    (text, *_) = shown()
    assert "# nccl: missing, needs GPUs" in text.out
    assert "# torch: missing, needs GPUs" in text.out


@on_few_numbers
@pytest.mark.parametrize("in_place", [False, True])
def test_one_wrong_element_on_one_rank_fails_the_run_on_all(
    world, shown, monkeypatch, in_place
):
    spoil(monkeypatch, world, lambda x, out, *more: (x is out) == in_place)
    words = ["-b", 64, "-e", 64, "-d", "float,int64", *SMALL[:4], "-G", 0]
    assert run(*words, "--against", "mpi") == 1
    (text, *_) = shown()
    assert "FAILED" in text.out
    place = "in place" if in_place else "out of place"
    assert f"numba_symm plan, 64 bytes of float sum {place}: " in text.out
    assert f"numba_symm plan, 64 bytes of int64 sum {place}: " in text.out
    other = "out of place" if in_place else "in place"
    assert f"sum {other}: " not in text.out


@on_few_numbers
def test_calls_beside_a_product_are_right(world, folder, shown, monkeypatch):
    if SIMULATED:  # its times mean nothing, so one product is beside each graph
        monkeypatch.setattr(overlap.Overlap, "_typical", lambda *given: 1.0)
        monkeypatch.setattr(overlap, "PRODUCTS", 1)
    file = folder / "r.json"
    small = [*SMALL[:2], *SMALL[4:]]  # nothing is warmed up
    assert run("-b", 64, "-e", 64, *small, "--overlap", "--json", file) == 0
    (text, *_) = shown()
    by_torch, own = ("torch", "bfloat16"), ("a kernel of the benchmark", "float32")
    assert "# Out of bounds values : 0 OK" in text.out
    found = world.bcast(json.loads(file.read_text()) if world.rank == 0 else None)
    product = found["facts"]["product"]
    assert product in text.out
    assert all(word in product for word in (by_torch if torch_multiplies() else own))
    (records,) = found["rows"]
    kinds = sorted((each["column"], each["in_place"]) for each in records)
    names = ("mpi", "numba_symm")
    assert kinds == [(name, place) for name in names for place in (False, True)]
    for record in records:
        if record["column"] == "mpi" and not SIMULATED:
            assert record["skipped"] == "its calls cannot be captured"
            continue
        assert record["wrong"] == 0
        assert min(record["calls"], record["products"]) >= 1
        for name in ("collective", "product", "calls_first", "products_first"):
            assert 0 < record[name]["min"] <= record[name]["median"]


def test_wrong_usage_is_shown_by_one_rank_and_exits_all_with_code_2(shown):
    for words in (["-b", "x"], ["-q"]):
        with pytest.raises(SystemExit) as ended:
            run(*words)
        assert ended.value.code == 2
        first, *others = shown()
        assert first.err.count("usage: ") == 1
        assert all(text.err == "" for text in others)


@on_few_numbers
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("all_reduce", ["", STAGED]),
        ("sendrecv", ["", "requests", "persistent", STAGED]),
    ],
)
def test_calls_in_mpi4pys_spelling_are_compared(name, ways, world, folder, shown):
    file = folder / "r.json"
    words = ["-b", 64, "-e", 64, *SMALL[:4], "-G", 1, "--eager", "--json", file]
    words += ["--against", "as-mpi4py"]
    assert bench.main([name, *map(str, words)]) == 0
    (text, *_) = shown()
    assert "# Out of bounds values : 0 OK" in text.out
    found = world.bcast(json.loads(file.read_text()) if world.rank == 0 else None)
    theirs = [each for each in found["rows"][0] if each["column"] == "as-mpi4py"]
    assert [each["way"] for each in theirs] == ways
    assert all(each["wrong"] == 0 < each["alone"]["min"] for each in theirs)


def test_every_lane_of_a_soak_has_equally_many_steps():
    """Otherwise ranks of other lanes call in another order, and wait."""
    lane = object.__new__(Client)
    lane._random, lane._graph = np.random.default_rng(0), None
    lane._streams = [types.SimpleNamespace(handle=0)] * 2
    lane._note = lambda words: None
    lane._drawn = [SoakCall("", "reduce", 1, lambda handle: None)] * CALLS
    assert len([*lane.steps()]) == (CALLS + 1) * REPEATS


def used(world):
    """Return the algorithm that a new communicator takes for a small all-reduce."""
    names, bind = [], Operation.bind

    def noting(operation, algorithm, *args):
        names.append(algorithm)
        return bind(operation, algorithm, *args)

    with ns.Communicator(world, timeout=60) as comm, pytest.MonkeyPatch.context() as p:
        x = comm.zeros(4, np.float32)
        p.setattr(Operation, "bind", noting)
        comm.all_reduce(x)
        comm.synchronize()
    return names[0]


def gpu_of(world):
    with ns.Communicator(world, timeout=60) as comm:
        return comm.device.name


@on_few_numbers
@of_one_island
def test_rank_0s_measured_limits_are_used(world, folder, shown, monkeypatch):
    if world.size == 1:
        with pytest.raises(ns.ArgumentError, match="tune: expected 2 ranks or more"):
            tune.main([])
        return
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / str(world.rank)))
    with monkeypatch.context() as patch:
        patch.setattr(tune, "_gpus", lambda comm: 1)
        text = f"GPU for each rank, got 1 for {world.size}"
        with pytest.raises(ns.ArgumentError, match=text):
            tune.main(["--largest", "1K"])
    assert not tuned.file().exists()
    monkeypatch.setattr(tune, "_gpus", lambda comm: comm.size)
    monkeypatch.setattr(tune, "SMALLEST", "256")  # faster than 1K
    monkeypatch.setattr(tune, "REPEATS", "1")
    assert tune.main(["--largest", "256"]) == 0
    text = shown()[0].out
    assert "all_reduce, floats: " in text
    assert re.search(r"\d x as fast as by the built-in limits", text)
    limits = folder / "0" / tuned.file().relative_to(os.environ["XDG_DATA_HOME"])
    gpu, before = gpu_of(world), used(world)
    written = tuned.read(gpu, world.size).choices
    if SIMULATED:
        stored = "# not stored: times of the simulator mean nothing for GPUs"
        assert written is None
    else:
        stored = f"# written to {limits}"
        assert (written is not None) == (world.rank == 0)
    assert text.endswith(f"\n{stored}\n")
    for name in ("chunked", "one_shot_ll"):
        steps = (Step(name, (ALL, ALL, ALL)),)
        # Ranks that took their own would wait for each other indefinitely.
        own = (Step("direct", (ALL, ALL, ALL)),) if world.rank else steps
        tuned.write(gpu, world.size, {"all_reduce": Choice(own, own)})
        assert used(world) == name
    if world.rank == 0:
        tuned.write("another GPU", world.size, {"all_reduce": Choice(steps, steps)})
        text = f"of GPU another GPU, not of {gpu}"
        with pytest.warns(RuntimeWarning, match=text) as warned:
            assert used(world) == "one_shot_sentinel"
        assert [each.filename for each in warned] == [__file__]
    else:
        assert used(world) == "one_shot_sentinel"
    assert before in ALL_REDUCE.algorithms


@pytest.mark.parametrize(
    ("program", "words", "text"),
    [
        (tune, "--largest 1", "expected 1K or more, got '1'"),
        (tune, "--fast", "unrecognized arguments: --fast"),
    ],
)
def test_wrong_arguments_are_reported_once(world, shown, program, words, text):
    if program is tune and world.size == 1:
        return  # it refuses one rank first
    with pytest.raises(SystemExit) as ended:
        program.main(words.split())
    assert ended.value.code == 2
    first, *others = (each.err for each in shown())
    assert text in first
    assert not any(others)


@pytest.mark.parametrize("obstacle", ["a folder in place of the file", "the reverse"])
def test_limits_that_cannot_be_written_are_not_measured(
    world, folder, shown, monkeypatch, obstacle
):
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    monkeypatch.setattr(tune, "Run", None)
    if world.size > 1:
        if world.rank == 0 and obstacle == "the reverse":
            tuned.file().parent.touch()
        elif world.rank == 0:
            tuned.file().mkdir(parents=True)
        with pytest.raises(SystemExit):
            tune.main([])
        text = f"expected a file that you can write, got {tuned.file()}; set XDG_DATA"
        assert text in shown()[0].err
