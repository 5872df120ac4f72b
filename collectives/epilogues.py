"""Epilogues of calls: ``all_reduce(x, epilogue=f, args=(…))``.

Small reductions have one kernel (``kernels/mailed_epilogue.py``). In all other calls,
the call's own kernels store the reduced elements, rounded to the type of ``x``, and
``kernels/epilogue.py`` applies the user's function to them. These elements are stored
in the output if it has the type of ``x`` and overlaps no argument, otherwise in the
staging memory, which the caller's arrays do not overlap.
"""

import inspect
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba.core.errors import NumbaError

from numba_symm import dtypes
from numba_symm.arguments import shown
from numba_symm.collectives.invocation import Invocation, are_apart, check_writable
from numba_symm.collectives.kernels import epilogue, mailed_epilogue
from numba_symm.collectives.operations import Operation
from numba_symm.collectives.protocols.binding import Call, Endpoint, Enqueue
from numba_symm.collectives.protocols.exchanges import Output
from numba_symm.collectives.protocols.finishing import Work
from numba_symm.device.puts import COLUMNS, EACH, NUMBER, ONE, ROWS, Operand
from numba_symm.dtypes import Element, UserEpilogue
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays
from numba_symm.gpu.arrays import ArrayView, Fields
from numba_symm.launch.devices import GPU

MOST = 8
"""Most arguments of an epilogue, because each takes registers."""


class Number(NamedTuple):
    """A number among the arguments.

    Attributes:
        dtype: the name of its NumPy dtype; "float": that in which x accumulates.
        bits: those of an integer, or of a float64.
    """

    dtype: str
    bits: int


def read(given: Invocation[Operation]) -> Invocation[Operation]:
    """Return the call with hashable values in the place of functions and arrays."""
    what = given.operation.name
    if given.epilogue is None:
        raise ArgumentError(
            f"{what}: expected epilogue= with args= and row_sum=, got None; pass a "
            "function"
        )
    function = _function(given.epilogue, f"{what}: expected epilogue to be")
    row_sum = None
    if given.row_sum is not None:
        row_sum = _function(given.row_sum, f"{what}: expected row_sum to be")
    if not isinstance(given.args, tuple | list):
        raise ArgumentError(
            f"{what}: expected args to be a tuple of device arrays and numbers, got "
            f"{type(given.args).__name__}; write args=(y,) for one"
        )
    if len(given.args) > MOST:
        raise ArgumentError(
            f"{what}: expected at most {MOST} args, got {len(given.args)}; put several "
            "numbers into one array"
        )
    args = tuple(
        _argument(each, f"{what}: args[{i}]") for i, each in enumerate(given.args)
    )
    found = UserEpilogue(function, row_sum)
    _check_parameters(found, len(args), what)
    second = given.second
    if second is not None:
        second = arrays.fields(second, f"{what}: out[1]")
    return given._replace(epilogue=found, args=args, row_sum=None, second=second)


def _function(value: Any, expected: str) -> FunctionType:
    function = getattr(value, "py_func", value)  # for a function decorated by Numba
    if isinstance(function, FunctionType):
        return function
    raise ArgumentError(
        f"{expected} a function of scalars, got {shown(value)}; pass one, plain or "
        "decorated with cuda.jit(device=True)"
    )


def _argument(value: Any, what: str) -> Fields | Number:
    if isinstance(value, bool | np.bool_):
        return Number("bool", int(value))
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ArgumentError(
                f"{what}: expected an int of 64 bits, got {value}; pass a float"
            )
        return Number("int64", value)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return Number("float", _bits(np.float64(value)))
    if isinstance(value, np.generic) and value.dtype in dtypes.DTYPES:
        if value.dtype.itemsize > 8:
            raise ArgumentError(
                f"{what}: expected a number of at most 8 bytes, got one of "
                f"{value.dtype.name}; pass it in an array of one element"
            )
        return Number(value.dtype.name, _bits(value))
    return arrays.fields(value, what)


def _bits(value: Any) -> int:
    found = np.zeros(8, np.uint8)
    found[: value.itemsize] = np.frombuffer(value.tobytes(), np.uint8)
    return int(found.view(np.int64)[0])


def _check_parameters(found: UserEpilogue, number: int, what: str) -> None:
    """Refuse functions that do not take the arguments."""
    by_row = found.row_sum is not None
    taken = "the element, " + "the row's sum, " * by_row + f"and {number} of args"
    for function, name, count, words in (
        (found.function, "epilogue", 1 + by_row + number, taken),
        (found.row_sum, "row_sum", 1 + number, f"the element, and {number} of args"),
    ):
        if function is None:
            continue
        try:
            inspect.signature(function).bind(*range(count))
        except TypeError as error:
            raise ArgumentError(
                f"{what}: expected {name} to take {count} scalars ({words}), got "
                f"{function.__qualname__}{inspect.signature(function)}: {error}"
            ) from error


def checked(
    given: Invocation[Operation],
    x: ArrayView,
    out: ArrayView,
    size: int,
    gpu: GPU,
) -> Work:
    """Return what an epilogue is to do, or refuse its arguments.

    Args:
        given: the call, as ``read`` returns it.
        x: the input.
        out: the output.
        size: the number of ranks.
        gpu: this rank's GPU.
    """
    operation, found = given.operation, given.epilogue
    what = operation.name
    for view, name in ((x, "x"), (out, "out")):
        if view.order != "C":
            raise ArgumentError(
                f"{what}: expected {name} in C order with epilogue=, whose rows are "
                "along the last axis, got Fortran order; pass its transpose, or a copy"
            )
    if given.op in dtypes.LOCATED:
        raise ArgumentError(
            f"{what}: expected an operator of single numbers with epilogue=, got "
            f"op={given.op!r}; apply a kernel of your own to its pairs"
        )
    outputs = [out]
    if given.second is not None:
        outputs.append(_second(ArrayView(*given.second), x, out, f"{what}: out[1]"))
        arrays.check_device(outputs[1], gpu.ordinal, f"{what}: out[1]")
    source = dtypes.element(x.dtype, what)
    targets = tuple(dtypes.element(view.dtype, what) for view in outputs)
    if found.row_sum and (source.complex or not source.floating):
        raise ArgumentError(
            f"{what}: expected x of floats with row_sum=, whose sum has the type in "
            f"which x accumulates, got {source.name}; convert the array"
        )
    shape = operation.shape(x, size)
    operands, words = [], []
    for i, each in enumerate(given.args):
        name = f"{what}: args[{i}]"
        if isinstance(each, Number):
            operand, word = _number(each, source)
        else:
            view = ArrayView(*each)
            operand, word = _array(view, shape, name), view.address
            arrays.check_device(view, gpu.ordinal, name)
            for output in outputs:
                _check_apart(view, operand, output, name)
        operands.append(operand)
        words.append(word)
    if not SIMULATED:
        others = (operand.element for operand in operands)
        for element in (source, *targets, *others):
            given_gpu = gpu.compute_capability, gpu.name, what
            dtypes.check_capability(element, *given_gpu)
    by_row = found.row_sum is not None
    by_row |= any(operand.along in (ROWS, COLUMNS) for operand in operands)
    total = math.prod(shape)
    columns = shape[-1] if by_row and shape else total
    rows = total // columns if columns else 0
    work = found, source, targets, tuple(operands), tuple(words), rows, columns
    made = Work(*work, tuple(view.address for view in outputs[1:]))
    if SIMULATED:
        _check_functions(made)
    return made


def _check_functions(work: Work) -> None:
    """Refuse functions that Numba would not compile on a GPU, in the simulator."""
    found, kind = work.epilogue, work.source.accumulate.type
    others = [each.element.accumulate.type(1) for each in work.operands]
    total = [kind(1)] * (found.row_sum is not None)
    kinds = [target.accumulate.type for target in work.targets]
    why = dtypes.unfit(found.function, [kind(1), *total, *others], kinds)
    if found.row_sum is not None:
        why = why or dtypes.unfit(found.row_sum, [kind(1), *others], [kind])
    if why:
        raise _refusal(work, why)


def _refusal(work: Work, why: object) -> ArgumentError:
    total = [work.source] if work.epilogue.row_sum else []
    others = [operand.element for operand in work.operands]
    kinds = [each.accumulate.name for each in (work.source, *total, *others)]
    return ArgumentError(
        f"epilogue: expected functions that numba.cuda compiles for scalars of "
        f"{', '.join(kinds)}, got epilogue={work.epilogue}: {why}"
    )


def _number(given: Number, source: Element) -> tuple[Operand, int]:
    """Return the operand of a number, and its bits."""
    if given.dtype != "float":
        return Operand(dtypes.element(np.dtype(_named(given.dtype)), "args"), NUMBER), (
            given.bits
        )
    wide = source.accumulate.name in ("float64", "complex128")
    value = np.int64(given.bits).view(np.float64)
    found = value if wide else np.float32(value)
    return Operand(dtypes.element(found.dtype, "args"), NUMBER), _bits(found)


def _named(name: str) -> Any:
    return next(dtype for dtype in dtypes.DTYPES if dtype.name == name)


def _array(view: ArrayView, shape: tuple[int, ...], what: str) -> Operand:
    """Return the operand of an array, or refuse the array."""
    element = dtypes.element(view.dtype, what)
    if view.order != "C":
        raise ArgumentError(
            f"{what}: expected a contiguous array in C order, got one of shape "
            f"{view.shape} strided or in Fortran order; pass a contiguous copy"
        )
    arrays.check_aligned(view, what)
    found, last, rows = _stripped(view.shape), shape[-1:], (*shape[:-1], 1)
    if found == _stripped(shape):
        along = EACH
    elif not found:
        along = ONE
    elif found == _stripped(last):
        along = COLUMNS
    elif found == _stripped(rows):
        along = ROWS
    else:
        raise ArgumentError(
            f"{what}: expected an array of the output's shape {shape}, of its last "
            f"axis {last}, of its rows {rows}, or of one element, got shape "
            f"{view.shape}"
        )
    return Operand(element, along)


def _second(view: ArrayView, x: ArrayView, out: ArrayView, what: str) -> ArrayView:
    """Return the second output, or refuse it."""
    if view.order != "C" or view.size != out.size:
        raise ArgumentError(
            f"{what}: expected a contiguous array in C order, of {out.size} elements "
            f"as out[0], got one of shape {view.shape}, in {view.order} order"
        )
    arrays.check_aligned(view, what)
    check_writable(view, what)
    if not (are_apart(view, x) and are_apart(view, out)):
        raise ArgumentError(
            f"{what}: expected an array apart from x and out[0], got arrays that "
            "overlap; it may be one of args"
        )
    return view


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without leading axes of length 1, as in broadcasting."""
    return tuple(itertools.dropwhile(lambda n: n == 1, shape))


def _check_apart(view: ArrayView, operand: Operand, out: ArrayView, what: str) -> None:
    """Refuse an argument that the kernel may store into before it is read."""
    same = (
        operand.along == EACH
        and view.address == out.address
        and view.nbytes == out.nbytes
    )
    if not same and not are_apart(view, out):
        raise ArgumentError(
            f"{what}: expected an array apart from out, or out itself, got arrays that "
            "overlap otherwise"
        )


def room_of(work: Work, given: Invocation[Operation], out: ArrayView) -> int:
    """Return the bytes of staging memory that a call needs; 0: it uses the output."""
    views = [ArrayView(*each) for each in given.args if not isinstance(each, Number)]
    apart = all(are_apart(view, out) for view in views)
    if apart and work.source == work.targets[0]:
        return 0
    return -(-work.rows * work.columns * work.source.itemsize // 256) * 256


def bind(end: Endpoint, work: Work, given: int, result: int) -> Enqueue:
    """Return what enqueues the kernel of an epilogue.

    Args:
        end: this rank's end of its island.
        work: what is to be done.
        given: the address of the reduced elements.
        result: that of the output.
    """
    with compiling(work):
        return epilogue.bind(end, work, given, result)


def fused(
    end: Endpoint, work: Work, given: Invocation[Operation], name: str, call: Call
) -> Enqueue | None:
    """Return what enqueues a call and its epilogue in one kernel; None: there is none.

    Args:
        end: this rank's end of its island, the only one.
        work: what is to be done.
        given: the call.
        name: its algorithm.
        call: the call to bind.
    """
    operation = given.operation
    transport = operation.algorithms[name].transport
    if (
        operation.exchange.output is not Output.REDUCED
        or name != f"one_shot_{transport}"
        or not mailed_epilogue.fits(end, work, call.op, transport)
    ):
        return None
    with compiling(work):
        return mailed_epilogue.bind(end, work, call, transport, operation.exchange)


@contextmanager
def compiling(work: Work) -> Iterator[None]:
    """Raise ArgumentError if Numba cannot compile the user's functions."""
    try:
        yield
    except NumbaError as error:
        raise _refusal(work, error) from error
