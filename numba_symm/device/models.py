"""Functions whose code differs from a compiled one only in what they call.

Device functions are constants of the functions that call them. So there are many
functions that differ only in these constants: for each element type, operator and
transport. Numba knows of a callee only the type of its result. So the LLVM code of such
functions differs only in the names of callees, and one of them is a model: the others
are its text with other names.

A function cannot be a model in three cases, because its code may then differ in more
than names: it passes a callee to a function, it also calls a callee by a global name,
or Numba inlines one of its callees.
"""

import copy
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from numba.core.errors import NumbaError
from numba.cuda import types
from numba.cuda.core.funcdesc import default_mangler, qualifying_prefix
from numba.cuda.cudadrv import nvvm
from numba.cuda.dispatcher import CUDADispatcher


def compiled_like_another(
    function: Callable[..., Any], given: tuple[Any, ...], compile_it: Callable[[], Any]
) -> Any:
    """Return Numba's result for a function: a model's with other names, or a new one.

    The caller has the compiler's lock.

    Args:
        function: one of the library's own.
        given: what else determines the result, such as the types of arguments.
        compile_it: returns a new result.
    """
    shape = _shape(function)
    if shape is None:
        return compile_it()
    key = *shape.code, *given
    model = _models.get(key)
    result = model and _like(model, shape.callees)
    if not result:
        calls: list[_Call] = []
        token = _calls.set(calls)
        try:
            result = compile_it()
        finally:
            _calls.reset(token)
        model = _model_of(function, result, shape.callees, calls)
        if model is not None:
            _models[key] = model
    return result


class DeviceFunction(CUDADispatcher):  # type: ignore[misc]
    """A device function that is compiled once for each argument types.

    A subclass has ``compile_device``, which returns Numba's result. It calls
    :func:`note_call` first, whenever Numba needs the function.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._templates: dict[tuple[Any, ...], Any] = {}

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return what types a call; see Numba. It is remembered."""
        if kws:
            return super().get_call_template(args, kws)
        key = tuple(map(types.unliteral, args))
        if key in self._templates:
            note_call(self, key)
            return *self._templates[key], args, {}
        template, signature, *given = super().get_call_template(args, kws)
        if given[0] == tuple(args):  # and no defaults
            self._templates[key] = template, signature
        return template, signature, *given


class _Call(NamedTuple):
    """A device function, and the types of arguments for which a caller needs it."""

    function: DeviceFunction
    args: tuple[Any, ...]


_calls: ContextVar[list[_Call] | None] = ContextVar("_calls", default=None)
"""What the function that is being compiled has called so far."""


def note_call(function: DeviceFunction, args: tuple[Any, ...]) -> None:
    """Note that the function that is being compiled, if any, calls another one."""
    found = _calls.get()
    if found is not None:
        found.append(_Call(function, args))


class _Shape(NamedTuple):
    """A function, apart from the device functions that it has as constants.

    Attributes:
        code: equal for functions that differ in nothing else.
        callees: the device functions, each once, in the order of the constants.
    """

    code: tuple[Any, ...]
    callees: list[DeviceFunction]


def _shape(function: Callable[..., Any]) -> _Shape | None:
    """Return the shape of a function; None: it must be compiled by itself."""
    if type(function) is not FunctionType or function.__defaults__:
        return None
    callees: list[DeviceFunction] = []

    def constant(value: Any) -> Any:
        """Return what is equal for equal constants."""
        if isinstance(value, DeviceFunction):
            if value not in callees:
                callees.append(value)
            return DeviceFunction, callees.index(value)
        if isinstance(value, CUDADispatcher):
            raise TypeError  # Numba inlines it; so it may call any of the others
        if isinstance(value, tuple):
            return type(value), *map(constant, value)
        hash(value)
        return type(value), value, repr(value)  # 1 == True, and 0.0 == -0.0

    try:
        cells = [constant(each.cell_contents) for each in function.__closure__ or ()]
    except TypeError:  # it has no hash
        return None
    # Equal code may come from modules whose globals differ.
    return _Shape((function.__code__, id(function.__globals__), *cells), callees)


class _Model(NamedTuple):
    """A compiled function, from which others of the same shape are made.

    Attributes:
        function: kept, so that no other module gets the identity of its globals.
        result: Numba's.
        calls: by the index of a callee, argument types for which Numba has asked for
            it; with its result.
        others: the libraries of all other functions that it calls.
    """

    function: Callable[..., Any]
    result: Any
    calls: list[tuple[int, tuple[Any, ...], Any]]
    others: list[Any]


_models: dict[tuple[Any, ...], _Model] = {}
_numbers = itertools.count()


def _model_of(
    function: Callable[..., Any],
    result: Any,
    callees: list[DeviceFunction],
    calls: list[_Call],
) -> _Model | None:
    """Return a model; None: its code may depend on more than names of callees."""
    if any(each in callees for each in _global_values(function)):
        return None
    signatures = [each for each in result.fndesc.calltypes.values() if each]
    passed = _dispatchers(each.args for each in signatures)
    if any(each in callees for each in passed):
        return None
    found = []
    for callee, args in dict.fromkeys(calls):
        if callee in callees:
            if args not in callee.overloads:
                return None  # it has failed to compile
            found.append((callees.index(callee), args, callee.overloads[args]))
    mine = {id(called.library) for _, _, called in found}
    others = [
        each
        for each in result.library._linking_libraries  # Numba lists them only in depth
        if id(each) not in mine
    ]
    return _Model(function, result, found, others)


def _dispatchers(found: Any) -> Iterator[Any]:
    """Yield the functions that are passed as arguments of these types, or in tuples."""
    for each in found:
        if isinstance(each, types.Dispatcher):
            yield each.dispatcher
        elif isinstance(each, tuple | types.BaseTuple):
            yield from _dispatchers(each)


def _global_values(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the values of a function's globals, and of those in other modules."""
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (getattr(value, each, None) for each in names)


def _like(model: _Model, callees: list[DeviceFunction]) -> Any:
    """Return the result of a function of the model's shape, or None.

    It is None if a callee has another type than the model's, or cannot be compiled.
    """
    found = []
    try:
        for index, args, before in model.calls:
            now = callees[index].compile_device(args)
            if now.signature != before.signature:
                return None
            found.append((before, now))
    except NumbaError:
        return None  # Numba raises it again, with the caller's lines
    before = model.result.fndesc
    fndesc = copy.copy(before)
    fndesc.uid = f"{before.uid}n{next(_numbers)}"
    fndesc.mangled_name = default_mangler(
        qualifying_prefix(fndesc.modname, fndesc.qualname),
        fndesc.argtypes,
        abi_tags=fndesc.abi_tags,
        uid=fndesc.uid,
    )
    names = {a.fndesc.mangled_name: b.fndesc.mangled_name for a, b in found}
    names[before.mangled_name] = fndesc.mangled_name
    codegen = model.result.target_context.codegen()
    library = codegen.create_library(fndesc.qualname)
    library._module = _Renamed(model.result.library._module, names)
    for each in (*(now.library for _, now in found), *model.others):
        library.add_linking_library(each)
    library.finalize()
    return model.result._replace(fndesc=fndesc, library=library)


class _Renamed:
    """Another function's module with other names, of which only the text is needed.

    Numba needs it, too, for a user's kernel that calls the function.

    Args:
        module: the other one's.
        names: the functions' names, by those in the module.
    """

    functions = ()  # whose linkage Numba sets; in the other module, it is set

    def __init__(self, module: Any, names: dict[str, str]):
        self._module = module
        self._names = names

    def __str__(self) -> str:
        return _NAME.sub(self._renamed, text_of(self._module).decode())

    def _renamed(self, found: re.Match[str]) -> str:
        return f'"{self._names.get(found[1], found[1])}"'


_NAME = re.compile(r'"(_Z[^"]*)"')
_ENVIRONMENT = re.compile(r'^@"_ZN08NumbaEnv[^"]*" = common global .*\n', re.MULTILINE)
"""A variable that Numba adds for each function, and that no code on a GPU uses."""

_texts: "weakref.WeakKeyDictionary[Any, bytes]" = weakref.WeakKeyDictionary()
"""The texts of functions, by their modules."""


def text_of(module: Any) -> bytes:
    """Return the text for NVVM of a module that does not change any more."""
    found = _texts.get(module)
    if found is None:
        found = _ENVIRONMENT.sub("", nvvm.llvm_replace(str(module))).encode()
        _texts[module] = found
    return found
