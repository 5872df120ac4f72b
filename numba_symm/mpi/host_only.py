"""Methods that refuse device arrays, and this package in mpi4py's place.

Classes with methods that take only host memory, and here refuse device arrays.

MPI would read their addresses as those of host memory. mpi4py's constants, such as
``MPI.INT`` and ``MPI.SUM``, are objects of these classes here.

Replaces ``mpi4py.MPI`` with this package, for programs that cannot be edited.

Extension modules in C get mpi4py's own objects, because they read the handles in them,
and may make calls of MPI without this library. So while such a module is loaded,
``mpi4py.MPI`` is mpi4py's, and a line on rank 0's standard error names the package.
"""

import sys
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from typing import Any

import mpi4py
from mpi4py import MPI

from numba_symm.collectives.invocation import check_writable
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, streams
from numba_symm.mpi import waited
from numba_symm.mpi.buffers import Kind, message, of_host, on_device
from numba_symm.mpi.comm import Comm, adopt_strays, close_all
from numba_symm.mpi.datatypes import translated
from numba_symm.mpi.errors import refusal
from numba_symm.mpi.win import reduced

_PLACE = "numba_symm.mpi"
"""Where pickle looks for the classes and for the constants, by their names."""


class File(MPI.File, metaclass=Kind):
    """A file; the methods are those of ``mpi4py.MPI.File``. They refuse device arrays.

    MPI would read their addresses as those of host memory.
    """

    _plain = MPI.File


class Datatype(MPI.Datatype, metaclass=Kind):
    """A datatype; the methods are those of ``mpi4py.MPI.Datatype``.

    ``Pack``, ``Unpack`` and their external forms refuse device arrays.
    """

    _plain = MPI.Datatype
    __module__ = _PLACE
    kept: Any  # by an object for pickling only

    def decode(self) -> Any:
        """Return the call that made the datatype, and its arguments."""
        return _mapped(super().decode(), _ours)

    def Get_contents(self) -> Any:
        """Return the arguments of the call that made the datatype."""
        return _mapped(super().Get_contents(), _ours)

    @property
    def contents(self) -> Any:  # type: ignore[override]
        """The arguments of the call that made the datatype."""
        return self.Get_contents()

    def __reduce__(self) -> Any:
        if (MPI.Datatype, self.handle) in _constants:
            return _reduced(self, MPI.Datatype)
        made: Any = MPI.Datatype(self).__reduce__()
        function, args = made
        return _made, (type(self), function, _mapped(args, _keeping))


class Op(MPI.Op, metaclass=Kind):
    """An operator; the methods are those of ``mpi4py.MPI.Op``."""

    _plain = MPI.Op
    __module__ = _PLACE

    @translated
    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Reduce the items of ``inbuf`` into those of ``inoutbuf``. Local.

        Both arrays are on the device, or both on the host. The host waits for the
        stream that ``inoutbuf`` names, else for the default stream.
        """
        if not on_device(inbuf, inoutbuf):
            super().Reduce_local(inbuf, inoutbuf)
            return
        what, of, into = "Reduce_local", message(inbuf), message(inoutbuf)
        if of.number != into.number:
            raise refusal(
                MPI.ERR_COUNT,
                f"{what}: mismatch in inbuf count {of.number} and inoutbuf count "
                f"{into.number}",
            )
        check_writable(into.view, what)
        named = arrays.stream_of(into.array)
        stream = streams.LEGACY_DEFAULT if named is None else named
        if not SIMULATED and streams.is_capturing(stream):
            raise refusal(
                MPI.ERR_OTHER,
                f"{what}: the host waits for the stream, so it cannot be captured; "
                "call it before or after the capture",
            )
        steps = reduced(of, into, self, what)  # have temporary arrays until the end
        for step in steps:
            step(stream)
        streams.synchronize(stream)

    def __reduce__(self) -> Any:
        if (MPI.Op, self.handle) in _constants:
            return _reduced(self, MPI.Op)
        made: Any = MPI.Op(self).__reduce__()
        return type(self).Create, made[1]


class Session(MPI.Session, metaclass=Kind):
    """A session; the methods are those of ``mpi4py.MPI.Session``."""

    _plain = MPI.Session


def _sizeof(arg: Any) -> int:
    """Return the bytes of a handle of MPI, of a class here as of mpi4py's."""
    return MPI._sizeof(getattr(arg, "_plain", arg))


def _from_mpis(kind: Any, name: str) -> Any:
    """Return a class method that returns an object of ``kind`` for one of mpi4py."""
    plain = getattr(kind._plain, name)

    def method(cls: Any, given: Any) -> Any:
        return _here(plain(given)) if cls is kind else cls(plain(given))

    method.__name__, method.__doc__ = name, plain.__doc__
    return classmethod(method)


for _kind in (Datatype, Op, Session):
    for _name in ("fromcode", "fromhandle", "fromint", "f2py"):
        if hasattr(_kind._plain, _name):
            setattr(_kind, _name, _from_mpis(_kind, _name))

_COPY = "copy the array to the host"
_BSEND = "Bsend of a device array needs no buffer"

for _name in dir(MPI.File):
    if _name.lower().lstrip("i").startswith(("read", "write")):
        _advice = f"a file takes no others; {_COPY}"
        setattr(File, _name, of_host(getattr(MPI.File, _name), _advice))
for _name in ("Pack", "Unpack", "Pack_external", "Unpack_external"):
    setattr(Datatype, _name, of_host(getattr(MPI.Datatype, _name), _COPY))
setattr(Session, "Attach_buffer", of_host(MPI.Session.Attach_buffer, _BSEND))  # noqa: B010
Attach_buffer = of_host(MPI.Attach_buffer, _BSEND)
Free_mem = of_host(MPI.Free_mem, "pass memory of MPI.Alloc_mem")

_KINDS = {kind._plain: kind for kind in (Datatype, Op, Session)}

_constants: dict[tuple[Any, int], tuple[str, Any]] = {}
"""The name and the object of each constant, by mpi4py's class and handle."""


def constant(value: Any) -> Any:
    """Return what is here in the place of a value of mpi4py's module.

    That is an object of these classes, or a dictionary of such. Others are the same.
    Equal constants of MPI, such as ``MPI.INT`` and ``MPI.SIGNED_INT``, are one object.
    """
    if type(value) in _KINDS:
        key = type(value), value.handle
        name = value.__reduce__()
        if key not in _constants and isinstance(name, str):
            _constants[key] = name, _KINDS[type(value)](value)
        return _here(value)
    if type(value) is dict and MPI.Datatype in map(type, value.values()):
        return {key: constant(each) for key, each in value.items()}
    return value


def _here(value: Any) -> Any:
    """Return a constant for an object of mpi4py that is equal to one, or a new object.

    mpi4py names its own constants only, and not each object can be reduced.
    """
    plain = type(value)
    found = _constants.get((plain, value.handle))
    return _KINDS[plain](value) if found is None else found[1]


constant(MPI.DATATYPE_NULL)  # types that MPI lacks are equal to it


def _mapped(found: Any, change: Callable[[Any], Any]) -> Any:
    """Return lists, tuples and dictionaries with each value changed."""
    kind = type(found)
    if kind is list or kind is tuple:
        return kind(_mapped(each, change) for each in found)
    if kind is dict:
        return {key: _mapped(each, change) for key, each in found.items()}
    return change(found)


def _ours(value: Any) -> Any:
    return _here(value) if type(value) is MPI.Datatype else value


def _keeping(value: Any) -> Any:
    """Return a datatype that keeps mpi4py's object, which frees the handle."""
    made = _ours(value)
    if made is not value and not value.is_predefined:
        made.kept = value
    return made


def _made(kind: type[Datatype], function: Any, args: Any) -> Datatype:
    """Make a datatype again, for a copy or after pickling.

    ``function`` frees the datatypes in ``args``, so it gets those that own the handles.
    """
    return kind(function(*_mapped(args, lambda each: getattr(each, "kept", each))))


def _reduced(value: Any, plain: Any) -> Any:
    """Return the name of a constant, or how to make another object equal to one."""
    name, known = _constants[plain, value.handle]
    return name if value is known else (type(value), (known,))


NAME = "mpi4py.MPI"

_options: dict[str, Any] | None = None
"""Those of :func:`install`, after it was called."""


def installed() -> bool:
    """Return whether :func:`install` was called."""
    return _options is not None


def install(**options: Any) -> None:
    """Put ``numba_symm.mpi`` in the place of ``mpi4py.MPI``. Collective over all ranks.

    What imports ``mpi4py.MPI`` afterwards gets this module. ``COMM_WORLD``,
    ``COMM_SELF`` and what is made of them then take device arrays. Call it in a
    program's first line, before any package imports ``mpi4py.MPI``. A second call with
    the same options does nothing. If MPI is not initialized, ``Init`` makes the
    communicators, and until then, they are mpi4py's.

    Modules of C (those of petsc4py, h5py or mpi4jax, for example) still get mpi4py's
    own objects. Pass them host arrays.

    Args:
        options: ``device``, ``timeout``, ``stream`` and others, as for :class:`Comm`.

    Raises:
        MPI.Exception: on all ranks; nothing is replaced then.
        ArgumentError: an earlier call had other options.
    """
    global _options
    if _options is not None:
        if options and options != _options:
            raise ArgumentError(
                f"install: expected the options of the first call, {_options}, got "
                f"{options}; call it once, in the program's first line"
            )
        return
    facade = sys.modules["numba_symm.mpi"]
    if MPI.Is_initialized() and not MPI.Is_finalized():
        _make_communicators(options)
    early = _early()
    if early:
        warnings.warn(
            f"install: expected to be called before mpi4py.MPI is imported, but "
            f"{', '.join(early)} imported it earlier, and {_KEEP[len(early) > 1]} "
            "mpi4py's communicators, which take host arrays only; call install in the "
            "program's first line",
            RuntimeWarning,
            stacklevel=2,
        )
    _options = options
    _place(facade)
    _let_c_have(_ForC())


_KEEP = ("keeps", "keep")


def Init() -> None:
    """Initialize MPI; after :func:`install`, also make its communicators."""
    MPI.Init()
    if _options is not None:
        _make_communicators(_options)


def Init_thread(required: int = MPI.THREAD_MULTIPLE) -> int:
    """Do as :func:`Init`; return the level of support for threads."""
    provided = MPI.Init_thread(required)
    if _options is not None:
        _make_communicators(_options)
    return provided


def Finalize() -> None:
    """Free all communicators, as the end of the program does, and end MPI."""
    close_all()
    MPI.Finalize()


def _make_communicators(options: dict[str, Any]) -> None:
    """Replace COMM_WORLD and COMM_SELF. Collective over all ranks."""
    facade: Any = sys.modules["numba_symm.mpi"]
    world = Comm(MPI.COMM_WORLD, **options)
    own = waited.find(MPI.COMM_SELF) or world._wrapped(MPI.COMM_SELF, owned=False)
    world._life.name, own._life.name = "COMM_WORLD", "COMM_SELF"
    facade.COMM_WORLD, facade.COMM_SELF = world, own
    adopt_strays(world)


def _place(module: types.ModuleType) -> None:
    sys.modules[NAME] = module
    mpi4py.MPI = module  # what ``from mpi4py import MPI`` reads


def _early() -> list[str]:
    """Return the modules that have mpi4py's own module."""
    own = ("mpi4py", "numba_symm")
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in own
        and any(value is MPI for value in [*getattr(module, "__dict__", {}).values()])
    )


class _ForC(types.ModuleType):
    """``mpi4py.MPI`` while a module of C is loaded: mpi4py's own names.

    Attributes:
        used: whether any was read.
    """

    def __init__(self) -> None:
        super().__init__(NAME)
        self.used = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") or name == "__pyx_capi__":
            self.used = True
        return getattr(MPI, name)


_named: set[str] = set()
"""The packages whose modules of C got mpi4py's objects."""


def _let_c_have(for_c: _ForC) -> None:
    """Let modules of C find mpi4py's own module, and Python's this package.

    A module of C may import others of either kind while it is loaded. Another thread
    that imports ``mpi4py.MPI`` at that moment gets what the module of C gets.
    """

    def wrap(kind: Any, name: str, shown: types.ModuleType) -> None:
        plain = getattr(kind, name)

        def method(self: Any, given: Any) -> Any:
            before = sys.modules[NAME]
            if before is shown or (shown is facade and before is not for_c):
                return plain(self, given)
            used, for_c.used = for_c.used, False
            _place(shown)
            try:
                return plain(self, given)
            finally:
                _place(before)
                if shown is for_c and for_c.used:
                    _tell(self.name)
                for_c.used = used

        setattr(kind, name, method)

    facade = sys.modules["numba_symm.mpi"]
    wrap(ExtensionFileLoader, "create_module", for_c)
    wrap(ExtensionFileLoader, "exec_module", for_c)
    wrap(SourceFileLoader, "exec_module", facade)


def _tell(name: str) -> None:
    """Say once for each package that its calls stay with MPI."""
    package = name.partition(".")[0]
    if package in _named or package == "mpi4py":
        return
    _named.add(package)
    if not MPI.Is_initialized() or MPI.COMM_WORLD.rank == 0:
        sys.stderr.write(
            f"numba_symm: {package} has C code that calls MPI, so its calls stay with "
            "mpi4py's objects; pass it host arrays\n"
        )
