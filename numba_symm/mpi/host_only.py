"""Classes with methods that take only host memory, and here refuse device arrays.

MPI would read their addresses as those of host memory. mpi4py's constants, such as
``MPI.INT`` and ``MPI.SUM``, are objects of these classes here.
"""

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from numba_symm import arrays, streams
from numba_symm.collectives.checks import check_writable
from numba_symm.environment import SIMULATED
from numba_symm.mpi.buffers import message, of_host, on_device
from numba_symm.mpi.errors import refusal
from numba_symm.mpi.kinds import Kind
from numba_symm.mpi.one_sided import reduced
from numba_symm.mpi.reading import translated

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
        if not SIMULATED:
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
