"""Functions that LLVM compiles for the host, and the driver's that they call.

The driver's functions that packed calls call, by address.

In the simulator, they are Python functions, which do at once what the driver enqueues.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from numba_symm import environment
from numba_symm.environment import SIMULATED
from numba_symm.gpu import driver

WHERE = (
    *("cuStreamIsCapturing", "cuStreamGetId", "cuStreamWaitEvent", "cuLaunchKernelEx"),
    *("cuMemcpyDtoDAsync", "cuMemsetD32Async", "cuGraphLaunch", "cuEventRecord"),
    *("cuEventQuery", "cuStreamQuery"),
)
"""The functions of the driver that are called, in the order of ``Gate.driver``."""

WORD = ctypes.c_int64


def struct(name: str, **fields: Any) -> Any:
    """Return a class of C structures."""
    members = list(fields.items())
    return type(name, (ctypes.Structure,), {"_fields_": members})


Config = struct(
    "Config",
    grid=ctypes.c_uint * 3,
    block=ctypes.c_uint * 3,
    shared=ctypes.c_uint,  # bytes
    stream=ctypes.c_void_p,
    attributes=ctypes.c_void_p,
    count=ctypes.c_uint,
    attribute=ctypes.c_uint64,  # the first one: its identifier, its value
    value=ctypes.c_int * 16,
)
"""The driver's ``CUlaunchConfig``, and one ``CUlaunchAttribute`` after it."""


def launch_config(blocks: int, threads: int, held: int, early: bool) -> Any:
    """Return the driver's description of a launch, without its stream.

    Args:
        blocks: the number of thread blocks.
        threads: of a logical block.
        held: logical blocks of a thread block.
        early: whether it may start while the kernel before it runs.
    """
    config = Config(grid=(blocks, 1, 1), block=(threads, held, 1))
    if early:
        config.attribute = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        config.value[0], config.count = 1, 1
        config.attributes = ctypes.addressof(config) + Config.attribute.offset
    return config


def address_of(function: Any) -> int:
    """Return the address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Raised(threading.local):
    error: BaseException | None = None


_raised = _Raised()


def raised() -> BaseException | None:
    """Return what a step in the simulator has raised in this thread, and forget it."""
    error, _raised.error = _raised.error, None
    return error


_launches: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def stand_in(launch: Any) -> int:
    """Return a number that the simulator takes for a kernel: ``launch.simulate()``."""
    _launches[id(launch)] = launch
    return id(launch)


def _simulate_launch(config: int, number: int, parameters: int, more: int) -> None:
    _launches[number].simulate()


def _simulate_copy(target: int, source: int, nbytes: int, stream: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _simulate_fill(address: int, word: int, count: int, stream: int) -> None:
    ctypes.c_uint32.from_address(address).value = word


def _simulate_nothing(*args: int) -> None:
    pass


ARGUMENTS = (2, 2, 3, 4, 4, 4, 2, 2, 1, 1)  # of the functions in WHERE

_SIMULATED = {
    "cuLaunchKernelEx": _simulate_launch,
    "cuMemcpyDtoDAsync": _simulate_copy,
    "cuMemsetD32Async": _simulate_fill,
}


def callback(function: Callable[..., None], arguments: int) -> Any:
    """Return a C function, whose status is 1 if ``function`` raises."""

    def call(*args: int) -> int:
        try:
            function(*args)
        except BaseException as error:
            _raised.error = error
            return 1
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int, *[WORD] * arguments)(call)


@functools.cache
def _simulated_driver() -> list[Any]:
    return [
        callback(_SIMULATED.get(name, _simulate_nothing), arguments)
        for name, arguments in zip(WHERE, ARGUMENTS, strict=True)
    ]


@functools.cache
def addresses() -> list[int]:
    """Return the addresses of the functions in ``WHERE``."""
    if SIMULATED:
        return [address_of(each) for each in _simulated_driver()]
    own = environment.zero_is_per_thread()
    flags = 2 if own else 1  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, LEGACY
    return [
        int(driver.call("cuGetProcAddress", name.encode(), 12000, flags)[0])
        for name in WHERE
    ]


def address(name: str) -> int:
    """Return the address of one of the functions in ``WHERE``."""
    return addresses()[WHERE.index(name)]


@functools.cache
def launch() -> Callable[..., int]:
    """Return the driver's launch, for steps of Python."""
    kinds = [ctypes.c_int, *[WORD] * 4]
    return ctypes.CFUNCTYPE(*kinds)(address("cuLaunchKernelEx"))


I64, I32 = ir.IntType(64), ir.IntType(32)
ANY = ir.IntType(8).as_pointer()


class Emitter:
    """Emits instructions on words of 8 bytes by address."""

    def __init__(self, module: ir.Module, name: str, result: Any, *args: Any):
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, args), name)
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def at(self, base: Any, offset: int, kind: Any = I64) -> Any:
        """Return a pointer."""
        return self.b.inttoptr(self.b.add(base, I64(offset)), kind.as_pointer())

    def load(self, base: Any, offset: int = 0, kind: Any = I64) -> Any:
        """Load a word."""
        return self.b.load(self.at(base, offset, kind))

    def store(self, value: Any, base: Any, offset: int = 0) -> None:
        """Store a word."""
        self.b.store(value, self.at(base, offset))

    def is_(self, relation: str, a: Any, b: int) -> Any:
        """Compare a word with a number."""
        return self.b.icmp_signed(relation, a, I64(b))

    def python(self, name: str, result: Any, *args: Any) -> Any:
        """Call a function of CPython, or one of this module."""
        kind = ir.FunctionType(result, [each.type for each in args])
        found = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.b.call(found, args)

    def number(self, value: Any) -> Any:
        """Return the number of an int; raise an error for another one."""
        found = self.python("PyLong_AsUnsignedLongLong", I64, value)
        with self.b.if_then(self.is_("==", found, -1), likely=False):
            error = self.python("PyErr_Occurred", ANY)
            missing = self.b.icmp_unsigned("!=", error, ANY(None))
            with self.b.if_then(missing):
                self.b.ret(ANY(None))
        return found


class Builtin(Emitter):
    """Emits a function for Python that takes integers, and returns an integer.

    Args:
        module: the module.
        name: the function's name.
        numbers: how many integers it takes.
        block: whether a bytearray is before them, whose address is ``block``.
    """

    def __init__(self, module: ir.Module, name: str, numbers: int, block: bool = False):
        super().__init__(module, name, ANY, ANY, ANY.as_pointer(), I64)
        _, self.given, _ = self.function.args
        if block:
            memory = self.python("PyByteArray_AsString", ANY, self.object(0))
            self.block = self.b.ptrtoint(memory, I64)
        places = range(block, block + numbers)
        self.args = [self.number(self.object(n)) for n in places]

    def object(self, n: int) -> Any:
        """Return an argument."""
        return self.b.load(self.b.gep(self.given, [I64(n)]))

    def leave(self, result: Any) -> None:
        """Return an integer."""
        self.b.ret(self.python("PyLong_FromLong", ANY, result))


_PYTHON = (
    *("PyByteArray_AsString", "PyLong_AsUnsignedLongLong", "PyLong_FromLong"),
    *("PyThreadState_Get", "PyThreadState_GetID", "PyErr_Occurred"),
    *("PyEval_SaveThread", "PyEval_RestoreThread"),
    *("PyBytes_FromStringAndSize", "PyList_Append", "PyList_Size"),
    *("PyTuple_New", "PyTuple_SetItem", "PyDict_GetItemWithError", "PyObject_GetAttr"),
    *("PyObject_Vectorcall", "PyObject_VectorcallMethod", "PyErr_Clear"),
    *("Py_IncRef", "Py_DecRef"),
)


def engine_of(*emitters: Callable[[ir.Module], object]) -> Any:
    """Return an engine with the functions that these emit."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Also where the interpreter does not export them.
    for name in _PYTHON:
        llvm.add_symbol(name, address_of(getattr(ctypes.pythonapi, name)))
    llvm.add_symbol("clock_gettime", address_of(ctypes.CDLL(None).clock_gettime))
    module = ir.Module("numba_symm")
    for emit in emitters:
        emit(module)
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    return engine


class _Def(ctypes.Structure):
    """CPython's ``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_FASTCALL = 0x80  # METH_FASTCALL


def definition(engine: Any, name: str) -> Any:
    """Return CPython's description of a function, which must live as long as it."""
    return _Def(name.encode(), engine.get_function_address(name), _FASTCALL)


new_function = ctypes.pythonapi.PyCFunction_NewEx
new_function.restype = ctypes.py_object
new_function.argtypes = ctypes.c_void_p, ctypes.py_object, ctypes.py_object


@functools.cache
def builtin(engine: Callable[[], Any], name: str) -> Callable[..., int]:
    """Return a function that a :class:`Builtin` has emitted.

    Args:
        engine: returns its engine, always the same one.
        name: its name.
    """
    found = definition(engine(), name)
    made: Callable[..., int] = new_function(ctypes.addressof(found), None, found)
    return made
