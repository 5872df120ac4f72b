"""The benchmark on GPUs: graphs, and the contenders that are installed."""

import itertools
import json
from contextlib import nullcontext

import pytest
from numba import cuda

import numba_symm as ns
from numba_symm.bench import __main__ as bench
from numba_symm.bench.bench_operations import REDUCTIONS, TYPES
from numba_symm.bench.contenders import CONTENDERS
from numba_symm.bench.measure import new_stream
from numba_symm.gpu import streams

NAMES = {"nccl", "nccl-cupy", "nccl-symm", "torch", "mpi"}
AGAINST = f"--against {','.join(sorted(NAMES))}"


@pytest.fixture
def measured(world, tmp_path):
    """Return a function that runs the benchmark; it returns exit code and record."""
    file = world.bcast(tmp_path) / "r.json"

    def run(*words, operation="all_reduce"):
        code = bench.main([operation, *map(str, words), "--json", str(file)])
        return code, world.bcast(
            json.loads(file.read_text()) if world.rank == 0 else None
        )

    return run


def records(found):
    return [each for each in itertools.chain(*found["rows"]) if "skipped" not in each]


def test_graphs_and_eager_calls_of_everybody_are_right(world, measured):
    words = f"-b 1K -e 4M -f 64 -n 5 -w 2 -G 3 {AGAINST} --algorithm all"
    code, found = measured(*words.split())
    assert code == 0
    most = cuda.get_current_device().MULTIPROCESSOR_COUNT
    assert {*found["contenders"], *found["missing"]} == NAMES | {"numba_symm"}
    assert all(found["missing"].values())
    for record in records(found):
        captured = record["column"] != "mpi" and record["way"] != "call"
        assert ("graph" in record) == captured
        assert record["wrong"] == 0
        if captured:
            assert 0 < record["graph"]["min"] <= record["graph"]["median"]
            assert record["calls"] % record["buffers"] == 0
            assert record.get("launches") or record["way"] != "plan"
            for launch in record.get("launches", ()):
                occupied = launch["multiprocessors"]
                assert 0 < occupied <= min(launch["blocks"], most)


@pytest.mark.parametrize("name", ["all_reduce", "sendrecv"])
def test_eager_calls_are_timed_beside_those_of_everybody(world, measured, name):
    """Also ours on arrays of torch and CuPy. A launch has no result."""
    words = "-b 1K -e 1M -f 1024 -n 5 -w 2 -G 3 --eager --against all"
    more = ["--algorithm", "all"] if name == "sendrecv" else []
    code, found = measured(*words.split(), *more, operation=name)
    assert code == 0
    assert {*found["contenders"], *found["missing"]} == {*CONTENDERS, "numba_symm"}
    seen = {each["column"] for each in records(found)}
    assert seen >= {"numba_symm", "launch"} | ({"group"} if more else set())
    for record in records(found):
        assert record["wrong"] == (None if record["column"] == "launch" else 0)
        assert 0 < record["issue"]["median"] <= record["done"]["median"]
        assert record["alone"]["min"] > 0


@pytest.mark.parametrize("placement", ["--plain", "-c1"])
def test_every_type_and_reduction_is_right(measured, placement):
    words = "-b 8K -e 8K -d all -o all -n 2 -w 0 -G 2 --against nccl,torch"
    code, found = measured(*words.split(), placement)
    assert code == 0
    kinds = {(each["type"], each["op"]) for each in records(found)}
    assert len(kinds) == len(TYPES) * len(REDUCTIONS)
    skipped = {
        each["column"] for each in itertools.chain(*found["rows"]) if "skipped" in each
    }
    assert "nccl" not in skipped


def test_calls_beside_a_product_are_right(measured):
    words = f"-b 64K -e 16M -f 256 -G 3 {AGAINST} --overlap"
    code, found = measured(*words.split())
    assert code == 0
    for record in records(found):
        assert record["wrong"] == 0
        calls, products, *both = (
            record[name]["median"]
            for name in ("collective", "product", "calls_first", "products_first")
        )
        assert record["by_products"] == max(both) / products
        assert 1 < products / calls < 9


def test_a_capture_that_raises_is_ended(world):
    """Also one that a query has invalidated, as a call of the library may do."""
    stream = new_stream()
    for spoil in (lambda handle: None, streams.spoil_capture):

        def raises(handle, spoil=spoil):
            spoil(handle)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            stream.capture([raises], lambda _: nullcontext())
        cuda.synchronize()
        ns.Communicator(world, timeout=60).close()
