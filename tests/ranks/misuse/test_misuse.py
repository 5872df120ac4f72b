"""Every misuse raises on every rank, and the communicator works on."""

import inspect
import re

import numpy as np
import pytest

import numba_symm as ns
from numba_symm.environment import SIMULATED
from numba_symm.memory import backends
from tests.ranks.helpers import (
    check_works,
    needs_peers,
    of_one_island,
    ordinary,
)
from tests.ranks.misuse import junk


@pytest.mark.skipif(
    "config.pluginmanager.get_plugin('agreement').comm.size > 1",
    reason="one rank is enough, and waits for nobody",
)
@pytest.mark.parametrize("state", ["open", "debug", "closed"])
def test_whatever_is_passed_the_error_is_ours(world, state):
    """Each argument of each public call is replaced by junk, one at a time."""
    comm = ns.Communicator(world, timeout=60, debug=state == "debug")
    foreign = []
    misuses = junk.misuses(comm, world)
    next(misuses)
    if state == "closed":
        comm.close()
    for name, call, right in misuses:
        try:
            made = call()
        except ns.SymmError as error:
            # The root class itself is what another error was turned into.
            if (right and state != "closed") or type(error) is ns.SymmError:
                foreign.append(f"{name}: {error}")
        except Exception as error:
            foreign.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if isinstance(made, ns.Communicator | ns.IpcChannel):
                made.close()
            del made
    assert not foreign, "\n".join(foreign)
    if state != "closed":
        check_works(comm)
    comm.close()


# Arguments that must agree


@needs_peers
@pytest.mark.parametrize("make", ["empty", "zeros"])
def test_shapes_and_dtypes_must_agree(comm, everywhere, last, make):
    create = getattr(comm, make)
    for ours, theirs in (((5,), (4,)), ((3, 2), (2, 3)), ((4, 1), (4,)), ((0,), (1,))):
        everywhere(
            ns.ArgumentError,
            lambda a=ours, b=theirs: create(b if last else a, np.int16),
            f"{make}: rank",
            f"rank {comm.size - 1} has shape {theirs} of int16",
            f"shape {ours} of int16",
            "every rank must pass the same",
        )
    for ours, theirs in (("float32", "int32"), ("float64", "float32")):
        everywhere(
            ns.ArgumentError,
            lambda a=ours, b=theirs: create(4, b if last else a),
            f"rank {comm.size - 1} has shape (4,) of {theirs}",
            f"shape (4,) of {ours}",
        )
    check_works(comm)


@pytest.mark.parametrize("shape", [-1, (3, -2), 2.0, "ab", ("a", 1), (True,)])
def test_shapes_that_are_none_are_refused(comm, everywhere, shape):
    everywhere(ns.ArgumentError, lambda: comm.empty(shape), "expected integers from 0")
    check_works(comm)


def test_more_than_an_address_space_is_refused(comm, everywhere):
    memory = comm.rendezvous(comm.empty(4, np.float32))
    for shape in ((1 << 32, 1 << 32), 1 << 61, 1 << 70, (np.int64(1 << 62), 4)):
        for call in (
            lambda s=shape: comm.empty(s, np.float64),
            lambda s=shape: memory.get_buffer(0, s, np.float64),
        ):
            everywhere(ns.ArgumentError, call, "expected less than 2**63 bytes")
    everywhere(
        ns.ArgumentError,
        lambda: memory.get_buffer(0, 1 << 60, np.float32),
        "within the 16 bytes of a buffer",
    )
    check_works(comm)


def test_more_memory_than_there_is_raises_on_all(comm, everywhere):
    everywhere(ns.BackendError, lambda: comm.empty(1 << 47, np.int8), "empty failed on")
    check_works(comm)


@of_one_island
@pytest.mark.skipif(not SIMULATED, reason="a GPU's driver knows what there is")
def test_what_the_host_has_is_all_ranks_together(comm, world, everywhere):
    """Linux would kill a rank that writes to more of it."""
    most = world.bcast(backends.available()) // comm.size
    kept = comm.empty(most * 2 // 3, np.int8)  # unwritten, so Linux has no pages of it
    for nbytes in (most * 5 // 4, most * 2 // 3):
        everywhere(
            ns.BackendError,
            lambda n=nbytes: comm.empty(n, np.int8),
            f"bytes on each of {comm.size} ranks to fit into the memory of this node",
            "allocate less, or start fewer ranks",
        )
    del kept
    comm.empty(most * 2 // 3, np.int8)
    check_works(comm)


@needs_peers
def test_a_rendezvous_needs_one_place_on_all_ranks(comm, everywhere, last):
    x, y = comm.empty(10, np.float32), comm.empty(12, np.float32)
    here = comm.size - 1
    said = everywhere(
        ns.ArgumentError, lambda: comm.rendezvous(x[3:] if last else x), "offset 0"
    )
    assert f"rank {here} has allocation" in said
    assert "offset 12" in said
    everywhere(
        ns.ArgumentError,
        lambda: comm.rendezvous(y if last else x),
        "of 48 bytes",
        "of 40 bytes",
        "every rank must pass the same",
    )
    # Of one size, and yet not the same block:
    z = comm.empty(10, np.float32)
    everywhere(
        ns.ArgumentError, lambda: comm.rendezvous(z if last else x), "of 40 bytes"
    )
    everywhere(
        ns.ArgumentError,
        lambda: comm.rendezvous(x[::2] if last else x),
        "rendezvous: expected a contiguous array, got a strided one",
    )
    comm.rendezvous(x).barrier()
    check_works(comm)


def test_a_rendezvous_of_a_host_array_is_refused(comm, everywhere, last):
    x = np.zeros(3) if last else comm.allocator and ordinary(3, np.float64)
    everywhere(
        ns.ArgumentError, lambda: comm.rendezvous(x), "got ndarray in host memory"
    )
    check_works(comm)


@pytest.mark.skipif(not SIMULATED, reason="a GPU's ordinary memory can be registered")
def test_a_rendezvous_of_private_memory_is_refused(comm, everywhere, last):
    x = comm.empty(3, np.float64)
    y = ordinary(3, np.float64)
    said = everywhere(
        ns.ArgumentError, lambda: comm.rendezvous(y if last else x), "private memory"
    )
    assert "use comm.empty()" in said
    everywhere(ns.ArgumentError, lambda: comm.allocator.rendezvous(8, comm), "private")
    check_works(comm)


# Arguments of all_reduce


def test_attributes_cannot_be_assigned_to(comm):
    text = inspect.cleandoc(ns.Communicator.__doc__)
    text = text.partition("\nAttributes:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    assert len(documented) > 8
    for name in (*documented, "stream", "allocator"):
        before = getattr(comm, name)
        with pytest.raises(AttributeError, match=rf"\b{name}\b"):
            setattr(comm, name, 4)
        assert getattr(comm, name) is before
    with pytest.raises(AttributeError, match="no effect, got 4; make another comm"):
        comm.multiprocessors = 4
    comm.note = 4  # a program's own
    check_works(comm)


# Debug mode: every call is compared


DIFFERENCES = {
    "count": ((6, "f4", "sum", None), "6 float32", "7 float32"),
    "dtype": ((7, "i4", "sum", None), "7 int32", "7 float32"),
    "op": ((7, "f4", "max", None), "op 'max'", "op 'sum'"),
    "algorithm": ((7, "f4", "sum", "chunked"), "'chunked'", "'one_shot_"),
}


@needs_peers
@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_init"])
def test_debug_mode_reports_what_differs(careful, everywhere, last, name, difference):
    other, theirs, ours = DIFFERENCES[difference]
    count, dtype, op, algorithm = other if last else (7, "f4", "sum", None)
    x = ordinary(count, dtype)
    said = everywhere(
        ns.ArgumentError,
        lambda: getattr(careful, name)(x, op=op, algorithm=algorithm),
        "all_reduce: rank",
        "every rank must pass the same",
    )
    own = said.index(f"rank {careful.size - 1} has")
    assert theirs in said[own:]
    assert ours in said[:own]
    check_works(careful)


@needs_peers
def test_debug_mode_compares_what_functions_compute(careful, everywhere, last):
    """The functions have one name, and refer to different values."""
    factor = 2 if last else 1
    x = ordinary(3, "f4")
    said = everywhere(
        ns.ArgumentError,
        lambda: careful.all_reduce(x, op=lambda a, b: factor * a + b),
        "all_reduce: rank",
        "every rank must pass the same",
    )
    assert said.count("<lambda> (body ") == 2
    check_works(careful)


@needs_peers
@pytest.mark.parametrize("wrong", ["op", "array", "algorithm", "out"])
def test_debug_mode_reports_one_ranks_error_to_all(careful, everywhere, last, wrong):
    x = ordinary(4, np.float32)
    arguments = {"x": x, "op": "sum", "algorithm": None, "out": ordinary(4, np.float32)}
    if last:
        arguments |= {
            "op": {"op": "mean"},
            "array": {"x": np.zeros(4, np.float32)},
            "algorithm": {"algorithm": "ring"},
            "out": {"out": ordinary(5, np.float32)},
        }[wrong]
    everywhere(
        ns.ArgumentError,
        lambda: careful.all_reduce(**arguments),
        f"all_reduce failed on 1 of {careful.size} ranks",
        f"rank {careful.size - 1}: all_reduce: ",
    )
    check_works(careful)
