"""The host's part of a plain call: what is checked, and what is remembered."""

import contextlib
import inspect
import re
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.driver import MemoryPointer

from numba_symm.collectives import invocation, select, staging
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.invocation import Invocation
from numba_symm.collectives.messages import Group
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE,
    Operation,
)
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, entry, streams
from numba_symm.launch import devices
from tests.gates import gate

X, Y = 1 << 20, 2 << 20  # addresses


@pytest.fixture
def launched():
    """Return the arrays of the launches, in order."""
    return []


@pytest.fixture
def bound():
    """Return the calls that were worked out, in order."""
    return []


@pytest.fixture
def calls(monkeypatch, bound, launched):
    """Return the calls of rank 0 of 2, whose launches only note their arguments."""

    def bind(operation, algorithm, end, call):
        bound.append(call)
        return lambda stream: launched.append((call.source, call.target, call.count))

    monkeypatch.setattr(Operation, "bind", bind)
    monkeypatch.setattr(arrays, "check_device", lambda *args: None)
    monkeypatch.setattr(devices, "enter_thread", lambda *args: None)
    made = gate(monkeypatch)
    order = SimpleNamespace(
        gate=made.gate, eager=lambda handle: contextlib.nullcontext()
    )
    end = SimpleNamespace(rank=0, size=2, choices=select.CHOICES)
    gpu = SimpleNamespace(ordinal=0, name="GPU", compute_capability=(9, 0))
    nothing = lambda: None  # noqa: E731
    members = SimpleNamespace(
        check=nothing,
        closed=False,
        gpu=gpu,
        parts=[(0, 1)],
        board=made.board,
        engine=object(),  # without graphs
    )
    heap = SimpleNamespace()
    return Calls(members, heap, order, end, None, False, None)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            lambda comm: comm.all_reduce(1, "sum"),
            "Communicator.all_reduce(x, op='sum', out=None, stream=None, "
            "algorithm=None, wire=None, epilogue=None, args=(), row_sum=None, "
            "leaves=False), by keyword after x: all_reduce() takes 2 ",
        ),
        (
            lambda comm: comm.send(1, 1, stream=2),
            "Communicator.send(x, dst=…, stream=None), by keyword after x: send() ",
        ),
        (
            lambda comm: comm.recv(1, 1),
            "Communicator.recv(out, src=…, count=None, stream=None), by keyword after ",
        ),
        (
            lambda comm: comm.scan_init(1, 2),
            "Communicator.scan_init(x, op='sum', out=None,",
        ),
        (
            lambda comm: comm.scatter_v_init(1, 2),
            "Communicator.scatter_v_init(x, counts=None, displs=None, root=0, out=None",
        ),
        (lambda comm: comm.all_reduce(1, ops="sum"), "leaves=False), by keyword"),
        (lambda comm: comm.send(1), "send() missing 1 required keyword-only argument"),
        (lambda comm: comm.split(1, 2, 3), "Communicator.split() takes from 2 to 3 "),
    ],
)
def test_an_error_for_wrong_arguments_has_the_correct_call(calls, write, words):
    made = Communicator.__new__(Communicator)
    made._calls = calls
    with pytest.raises(TypeError, match=re.escape(words)) as raised:
        write(made)
    assert raised.value.__context__ is None  # it is Python's error


@pytest.mark.parametrize(
    ("name", "right"),
    [
        (
            "Allreduce",
            "all_reduce(x, op='sum', out=None, stream=None, algorithm=None, wire=",
        ),
        ("allreduce", "all_reduce(x"),
        ("allReduce", "all_reduce(x"),
        ("Iallreduce", "all_reduce(x"),
        ("bcast", "broadcast(x, root=0"),
        ("Reduce_scatter", "reduce_scatter_v(x, counts=…"),
        ("Reduce_scatter_block", "reduce_scatter(x"),
        ("Isend", "isend(x, dst=…"),
        ("Get_rank", "rank, or"),
        ("Free", "close(), or"),
    ],
)
def test_the_names_of_others_raise_with_ours(name, right):
    made = Communicator.__new__(Communicator)
    with pytest.raises(AttributeError, match=re.escape(f"write comm.{right}")):
        getattr(made, name)
    assert not hasattr(made, "Alltoallw")
    assert callable(made.isend)
    assert name not in dir(made)
    assert "all_reduce" in dir(made)


def test_every_name_that_an_error_has_instead_is_an_attribute():
    rights = {*invocation._OURS.values()}
    assert rights == {*invocation._CALLS, *invocation._NAMES}
    assert all(hasattr(Communicator, right) for right in rights - {"rank", "size"})


def array(address, shape=(8, 4), dtype="f4", order="C"):
    like = np.empty(shape, dtype, order)
    memory = MemoryPointer(None, driver.CUdeviceptr(address), like.nbytes)
    return DeviceNDArray(shape, like.strides, like.dtype, gpu_data=memory)


def call(calls, x, out, op="sum", operation=ALL_REDUCE):
    return calls.call(Invocation(operation, x, out=out, op=op))


def test_equal_arrays_are_worked_out_once(calls, bound, launched):
    out = array(Y)
    for _ in range(3):
        assert call(calls, array(X), out) is out
    assert len(bound) == 1
    assert launched == [(X, Y, 32)] * 3


@pytest.mark.parametrize(
    ("x", "out"),
    [
        ({"address": X + 128}, {}),
        ({}, {"address": Y + 128}),
        ({"shape": (4, 8)}, {}),
        ({"shape": (4, 4)}, {"shape": (4, 4)}),
        ({"dtype": "i4"}, {"dtype": "i4"}),
        ({"order": "F"}, {"order": "F"}),
    ],
    ids=str,
)
def test_other_arrays_are_worked_out_again(calls, bound, x, out):
    call(calls, array(X), array(Y))
    call(calls, array(**{"address": X} | x), array(**{"address": Y} | out))
    assert len(bound) == 2


class Theirs:
    """An array of another library."""

    def __init__(self, address, shape, order):
        self.fields = address, shape, np.dtype("f4"), order, False


def test_a_new_output_is_of_the_callers_library(calls, launched, monkeypatch):
    def empty(like, shape, order, stream):
        return Theirs(Y, shape, order)

    def over(memory, shape, dtype):
        return Theirs(memory.address, shape, "C")

    library = arrays.Library("theirs", empty, over, None)
    read = arrays._ArrayClass(lambda x, what: x.fields, None, None, library=library)
    monkeypatch.setitem(arrays.KINDS, Theirs, read)
    monkeypatch.setattr(streams, "is_capturing", lambda stream: False)
    found = call(calls, Theirs(X, (8, 4), "F"), None)
    assert found.fields == (Y, (8, 4), np.float32, "F", False)
    found = call(calls, Theirs(X, (8, 4), "C"), None, operation=ALL_GATHER)
    assert found.fields == (Y, (2, 8, 4), np.float32, "C", False)
    assert launched == [(X, Y, 32)] * 2
    monkeypatch.setattr(streams, "is_capturing", lambda stream: True)
    with pytest.raises(ArgumentError, match="pass out= while a stream is being capt"):
        call(calls, Theirs(X, (8, 4), "C"), None)
    # Of an input with gaps, which is replaced by an array of Numba's.
    dense = staging.Replaced.__new__(staging.Replaced)
    dense._x, dense._out = Theirs(X, (8, 4), None), None
    dense.x = dense.out = array(X)
    assert dense.result(array(Y)).fields == (Y, (8, 4), np.float32, "C", False)
    dense._x = array(X)
    made = array(Y)
    assert dense.result(made) is made


def test_another_option_is_worked_out_again(calls, bound):
    given = Invocation(REDUCE, array(X), array(Y), root=0)
    others = [{}, {"op": "max"}, {"algorithm": "chunked"}, {"root": 1}]
    for other in others * 2:
        calls.call(given._replace(**other))
    assert [each.op for each in bound] == ["sum", "max", "sum", "sum"]
    assert [each.root for each in bound] == [0, 0, 0, 1]


def test_new_mappings_are_worked_out_again(calls, bound):
    for changed in (False, False, True):
        if changed:
            calls.heap.changed()
        call(calls, array(X), array(Y))
    assert len(bound) == 2


@pytest.mark.parametrize(
    ("x", "out", "text"),
    [
        ({"dtype": "i4"}, {}, "out of 32 int32 .*, got 32 float32"),
        ({}, {"dtype": "i4"}, "got 32 int32"),
        ({}, {"shape": (4, 4)}, "got 16 float32"),
        ({}, {"order": "F"}, "got C order and F order"),
        ({"address": X + 2}, {}, "aligned to its 4-byte"),
        ({}, {"address": X + 4}, "overlap"),
    ],
    ids=str,
)
def test_arrays_that_differ_from_checked_ones_are_refused(calls, bound, x, out, text):
    call(calls, array(X), array(Y))
    x, out = array(**{"address": X} | x), array(**{"address": Y} | out)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=text):
            call(calls, x, out)
    assert len(bound) == 1


@pytest.mark.parametrize("op", ["median", 3, None, ["sum"]], ids=str)
def test_an_unknown_operator_is_refused(calls, op):
    call(calls, array(X), array(Y))
    with pytest.raises(ArgumentError, match="expected an operator, got op="):
        call(calls, array(X), array(Y), op)


def test_debug_mode_binds_a_call_as_usual_before_the_ranks_compare_it(calls, launched):
    met = []

    @contextlib.contextmanager
    def meeting(what, recorded=False):
        assert not recorded
        met.append((what, len(calls.memory.young), len(launched)))
        yield

    calls.agreement.debug = True
    calls.members.failed = False
    calls.members.set_up = meeting
    calls.members.exchange = SimpleNamespace(
        agreed=meeting, agree_equal=lambda *texts: met.append(texts)
    )
    call(calls, array(X), array(Y))
    words = "32 float32 in C order, op 'sum', algorithm 'one_shot_sentinel'"
    one = ("all_reduce", 1, 0)  # bound, not launched
    assert met == [one, one, (words, "all_reduce")]
    assert len(launched) == 1
    met.clear()
    with pytest.raises(ArgumentError, match="overlap"):  # on all ranks, as they agree
        call(calls, array(X), array(X + 4))
    assert met == [("all_reduce", 1, 1)] * 2
    assert len(launched) == 1


def test_an_operation_without_an_operator_remembers_its_calls(calls, bound):
    for _ in range(2):
        call(calls, array(X), array(Y, (2, 8, 4)), operation=ALL_GATHER)
    assert len(bound) == 1


def test_what_follows_the_array_is_passed_by_keyword():
    """By position, one argument could be mistaken for another."""
    others = "empty", "zeros", "split", "prepare", "launch_limit", "device_workspace"
    others += "dot", "dot_init"  # whose two arrays may change places
    for name, method in inspect.getmembers(Communicator):
        if name.startswith("_") or not callable(method) or name in others:
            continue
        positional = [
            each.name
            for each in inspect.signature(method).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        assert len(positional) <= 2, (name, positional)  # self, and one more


def test_an_interrupt_of_a_group_that_opens_makes_no_later_call_slow(
    calls, monkeypatch
):
    opened = calls.thread.open

    def interrupted():
        opened()
        raise KeyboardInterrupt

    monkeypatch.setattr(calls.thread, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), Group(calls, "group"):
        pass
    assert calls.enqueuer.gate.slow & entry.GROUPED
    with calls.thread.alone("all_reduce"):
        pass
    assert not calls.enqueuer.gate.slow & entry.GROUPED
    assert not calls.enqueuer.gate.thread
