"""Numba's compiler, for the library's own kernels and device functions.

It makes the same code as ``cuda.compile`` does, in about two thirds of the time:

- The library's own functions have no closures and no expressions of whole arrays, so
  they need no passes for these. A user's operator has all of Numba's passes.
- Numba hashes and compares all its options whenever it types a call of its own. Here,
  the options are one object.
- A function that differs from a compiled one only in the device functions that it calls
  is not compiled again: see ``models.py``.
- The LLVM text of a function is made once, and not for each kernel that calls it.
- NVVM does not verify the code separately before it compiles it.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from numba.core.errors import TypingError
from numba.cuda import compiler, types
from numba.cuda.core import typed_passes, untyped_passes
from numba.cuda.core.callconv import CUDACallConv
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.core.compiler_machinery import PassManager
from numba.cuda.cudadrv import nvrtc, nvvm
from numba.cuda.descriptor import cuda_target
from numba.cuda.extending import overload
from numba.cuda.flags import CUDAFlags
from numba.cuda.target import CUDATargetContext, CUDATypingContext
from numba.cuda.utils import numba_target_override

from numba_symm.device import models

F = TypeVar("F", bound=Callable[..., Any])

OLDEST = (8, 0)
"""The lowest compute capability of the GPUs that kernels run on."""

_UNNEEDED = (
    untyped_passes.WithLifting,
    untyped_passes.InlineClosureLikes,
    untyped_passes.IRProcessing,
    typed_passes.InlineOverloads,
    typed_passes.NopythonRewrites,
    typed_passes.AnnotateTypes,
)


class _Compiler(compiler.CUDACompiler):  # type: ignore[misc]  # Numba is untyped
    """Numba's, without the passes that the library's own functions do not need."""

    def define_pipelines(self) -> list[Any]:
        """Return the pipeline."""
        (whole,) = super().define_pipelines()
        found = PassManager(whole.pipeline_name)
        found.passes = [each for each in whole.passes if each[0] not in _UNNEEDED]
        found.finalize()
        return [found]


class _Typing(CUDATypingContext):  # type: ignore[misc]
    """Numba's typing, which remembers the types of operators on numbers.

    Otherwise, Numba tries all definitions of ``+`` for each ``a + b``, and formats a
    message for each that does not match.
    """

    def __init__(self, shared: Any):
        self.__dict__ = shared.__dict__  # one state

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        """Return the signature of a call, or None."""
        named = getattr(func, "typing_key", func)  # Numba's type of a function, or it
        if (
            not (named is bool or getattr(named, "__module__", None) == "_operator")
            or kws
            or not all(isinstance(each, _NUMBERS) for each in args)
        ):
            return super().resolve_function_type(func, args, kws)
        if named not in _POWERS:
            args = tuple(map(types.unliteral, args))  # the value does not matter
        key = named, tuple(args)
        if key not in _operators:
            _operators[key] = super().resolve_function_type(func, args, kws)
        return _operators[key]


_NUMBERS = types.Number, types.Boolean, types.IntegerLiteral, types.BooleanLiteral
_POWERS = operator.pow, operator.ipow
_operators: dict[tuple[Any, tuple[Any, ...]], Any] = {}


@functools.cache
def _typing() -> _Typing:
    return _Typing(cuda_target.typing_context)


class _Target(CUDATargetContext):  # type: ignore[misc]
    """Numba's target, which remembers the sizes of LLVM's types.

    Otherwise, LLVM parses a module whenever Numba asks for one.
    """

    def __init__(self, shared: Any):
        self.__dict__ = shared.__dict__  # one state

    @functools.cache  # noqa: B019  # of the one object
    def get_abi_sizeof(self, ty: Any) -> int:
        """Return the bytes of an LLVM type."""
        return int(super().get_abi_sizeof(ty))


@functools.cache
def _target() -> _Target:
    return _Target(cuda_target.target_context)


class _Flags(CUDAFlags):  # type: ignore[misc]
    """Options that do not change, and that equal no others."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _new_flags(inlined: bool) -> _Flags:
    """Return the options of device functions, which LLVM inlines, or of kernels."""
    flags = _Flags()
    flags.no_compile = True  # to machine code; NVVM does that
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.inline = "never"
    flags.error_model = "numpy"
    flags.forceinline = inlined
    flags.nvvm_options = {"opt": 3}
    # Of all capabilities from this one on, the result is the same code of LLVM.
    flags.compute_capability = OLDEST
    flags.max_registers = None
    flags.lto = False
    return flags


_shared_flags = functools.cache(_new_flags)


def _flags(inlined: bool, own: bool) -> _Flags:
    """Return options for a function of the library's own, or of a user.

    Numba writes into them when it inlines a function: then SSA form is off, also for
    what is compiled later with the same options. So a user's function has its own.
    """
    if not own:
        return _new_flags(inlined)
    flags = _shared_flags(inlined)
    flags.enable_ssa = True
    return flags


def compiled(
    function: Callable[..., Any], args: tuple[Any, ...], return_type: Any = None
) -> Any:
    """Return Numba's result for a device function, which LLVM inlines.

    Args:
        function: the Python function.
        args: Numba's types of its arguments.
        return_type: what it returns; None: Numba finds it.
    """
    return _compiled(function, args, return_type)


@global_compiler_lock  # type: ignore[untyped-decorator]
def _compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    return_type: Any,
    bounds: tuple[int, int] | None = None,
) -> Any:
    """Return Numba's result for a kernel with such bounds, or a device function."""
    own = function.__module__.partition(".")[0] == __name__.partition(".")[0]
    given = function, args, return_type, bounds
    if not own:
        return _compiled_anew(*given, False)
    return models.compiled_like_another(
        function, given[1:], lambda: _compiled_anew(*given, True)
    )


def _compiled_anew(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    return_type: Any,
    bounds: tuple[int, int] | None,
    own: bool,
) -> Any:
    """Compile a function by Numba."""
    with numba_target_override():
        result = compiler.compile_extra(
            typingctx=_typing(),
            targetctx=_target(),
            func=function,
            args=args,
            return_type=return_type,
            flags=_flags(bounds is None, own),
            locals={},
            pipeline_class=_Compiler if own else compiler.CUDACompiler,
            call_conv=CUDACallConv(_target()),
            abi_info={},
        )
    library = result.library
    library.finalize()
    entry = library.get_function(result.fndesc.llvm_func_name)
    if bounds is None:
        entry.linkage = "linkonce_odr"  # Numba sets it when it compiles a caller
    else:
        compiler.kernel_fixup(entry, False)
        nvvm.set_launch_bounds(entry, bounds)
    return result


@global_compiler_lock  # type: ignore[untyped-decorator]
def kernel_ptx(
    function: Callable[..., None],
    args: tuple[Any, ...],
    cc: tuple[int, int],
    bounds: tuple[int, int],
    rounds_each: bool = False,
) -> str:
    """Return the PTX of a kernel.

    Args:
        function: the Python function.
        args: Numba's types.
        cc: the compute capability.
        bounds: the most threads of a block, and the fewest blocks of a multiprocessor.
        rounds_each: whether no product and sum are contracted to one operation.
    """
    library = _compiled(function, args, types.void, bounds).library
    options = {"opt": 3, "arch": nvrtc.get_arch_option(*cc)}
    unit = nvvm.CompilationUnit(options | ({"fma": 0} if rounds_each else {}))
    # Each once, after all that call it: NVVM drops what no module before it calls.
    for module in reversed(dict.fromkeys(reversed(library.modules))):
        unit.add_module(models.text_of(module))
    unit.lazy_add_module(nvvm.LibDevice().get())
    return str(unit.compile().decode().strip("\0").strip())


Refusal = TypingError
"""The error of arguments that a function of :func:`specialized` does not take."""


def specialized(function: Any) -> Callable[[F], F]:
    """Decorate the function that returns what kernels call in place of ``function``.

    It gets the types of the arguments, and literal types of constants. What it returns
    has the same parameters as ``function``.
    """
    options = {"forceinline": True}
    return overload(function, prefer_literal=True, jit_options=options)  # type: ignore[no-any-return]


def constant_of(argument: Any) -> Any:
    """Return the constant or the plain function that an argument's type is of, or None.

    An argument that a call leaves out is its default itself.
    """
    if isinstance(argument, str | bool):
        return argument
    if isinstance(argument, types.Omitted):
        return argument.value
    if isinstance(argument, types.Dispatcher):
        return argument.dispatcher.py_func
    return getattr(argument, "literal_value", None)
