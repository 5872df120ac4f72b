"""The class of this package's classes, which stand for mpi4py's of the same names.

A program may have objects of both: windows of host memory, null handles, requests of
host arrays and communicators that nobody wrapped are mpi4py's own. What it asks of a
class here holds for all of them.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from numba_symm.mpi.buffers import of_host

_OURS = __name__.partition(".")[0]


class Kind(type):
    """Makes a class stand for the class of mpi4py that its body names as ``_plain``.

    mpi4py's objects are instances of the class, and mpi4py's classes subclasses. A
    method that is read from the class, such as ``MPI.Comm.Send``, takes objects of
    both. Subclasses that a program makes are ordinary classes.
    """

    _plain: Any

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(
            instance, cls.__dict__.get("_plain", ())
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or issubclass(
            subclass, cls.__dict__.get("_plain", ())
        )

    def __getattribute__(cls, name: str) -> Any:
        """Return an attribute of the class; Python does not call this for objects."""
        found = type.__getattribute__(cls, name)
        if type(found) is FunctionType and name[0] != "_":
            ours = found.__globals__["__name__"].partition(".")[0] == _OURS
            plain = getattr(cls._plain, name, None) if ours else None
            if plain is not None:
                return _either(cls, found, plain)
        return found


@functools.cache
def _either(cls: type, own: Callable[..., Any], plain: Any) -> Callable[..., Any]:
    """Return a method of the class, which takes objects of mpi4py's class, too.

    For these, it is mpi4py's method, which reads host memory only.
    """
    if own.__name__[0].isupper():
        plain = of_host(plain, "call the method of an object of numba_symm.mpi")

    @functools.wraps(own)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        call = own if type.__instancecheck__(cls, self) else plain
        return call(self, *args, **options)

    return method
