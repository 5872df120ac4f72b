"""Functions that LLVM compiles, through llvmlite, as builtin functions of CPython."""

import ctypes
from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from numba_symm.driver_table import address_of

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


_PYTHON = (
    *("PyByteArray_AsString", "PyLong_AsUnsignedLongLong", "PyLong_FromLong"),
    *("PyThreadState_Get", "PyThreadState_GetID", "PyErr_Occurred"),
    *("PyEval_SaveThread", "PyEval_RestoreThread"),
    *("PyBytes_FromStringAndSize", "PyList_Append", "Py_DecRef"),
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
