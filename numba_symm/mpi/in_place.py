"""Replaces ``mpi4py.MPI`` with this package, for programs that cannot be edited.

Extension modules in C get mpi4py's own objects, because they read the handles in them,
and may make calls of MPI without this library. So while such a module is loaded,
``mpi4py.MPI`` is mpi4py's, and a line on rank 0's standard error names the package.
"""

import sys
import types
import warnings
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from typing import Any

import mpi4py
from mpi4py import MPI

from numba_symm.errors import ArgumentError
from numba_symm.mpi import wraps
from numba_symm.mpi.comm import close_all
from numba_symm.mpi.communicators import Comm, adopt_strays

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
    own = wraps.find(MPI.COMM_SELF) or world._wrapped(MPI.COMM_SELF, owned=False)
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
