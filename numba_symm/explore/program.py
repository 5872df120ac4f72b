"""A user's program, and its executions."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba_symm
from numba_symm import environment, errors
from numba_symm.errors import ArgumentError
from numba_symm.explore import intrinsics
from numba_symm.explore.arrays import unsupported
from numba_symm.explore.communicator import ExploredCommunicator
from numba_symm.explore.faults import CodePlace, Fault, Unsupported
from numba_symm.explore.host import AllRanks, Host
from numba_symm.explore.machine import Chooser, Machine
from numba_symm.explore.modules import Modules, Source
from numba_symm.explore.mpi import make_mpi
from numba_symm.explore.observers import Full, Name, Numbers
from numba_symm.explore.standins import StandIn, make_cuda, make_numba

_REFUSED = ("torch", "cupy", "jax", "multiprocessing", "threading", "concurrent")


class Program:
    """A program on some ranks.

    Attributes:
        path: its file.
        ranks: the number of ranks.
        files: the lines of all its files so far.
        numbers: the numbers of its threads.
    """

    def __init__(self, path: Path, ranks: int, arguments: Sequence[str] = ()):
        self.path, self.ranks, self.arguments = path, ranks, list(arguments)
        self.files: dict[str, list[str]] = {}
        self.numbers = Numbers()
        self._codes: dict[str, Source | None] = {}
        try:
            self._main = self._code(path)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise ArgumentError(
                f"explore: expected a Python program, got {path}: {error}"
            ) from None

    def _code(self, path: Path) -> Any:
        text = path.read_text()
        code = compile(text, str(path), "exec")
        self.files[str(path)] = text.splitlines()
        return code

    def _source(self, name: str) -> Source | None:
        """Return the source of a module beside the program."""
        if name not in self._codes:
            place = self.path.parent.joinpath(*name.split("."))
            package = (place / "__init__.py").is_file()
            path = place / "__init__.py" if package else place.with_suffix(".py")
            found = path.is_file() and path != self.path
            self._codes[name] = (self._code(path), package) if found else None
        return self._codes[name]

    def _find(self, name: str) -> Source | None:
        if name.partition(".")[0] in _REFUSED:
            raise unsupported(f"the module {name}")
        return self._source(name)

    def _modules(self, machine: Machine) -> Modules:
        device = intrinsics.device().known
        symm = device[intrinsics.DEVICE]
        names = {
            name: getattr(errors, name)
            for name in numba_symm.__all__
            if hasattr(errors, name)
        }
        simulated = StandIn("numba_symm.environment", SIMULATED=True)
        package = StandIn(
            "numba_symm", Communicator=ExploredCommunicator, device=symm, errors=errors,
            Context=symm.Context, environment=simulated,
            allow_overlapping_devices=environment.allow_overlapping_devices, **names,
        )  # fmt: skip
        known: dict[str, Any] = {
            "numba_symm": package,
            "numba_symm.environment": simulated,
        }
        known |= {
            name: module
            for name, module in device.items()
            if name.startswith(intrinsics.DEVICE)
        }
        known |= {"numba_symm.errors": errors}
        known |= make_numba(make_cuda()) | make_mpi(device)
        return Modules(known, self._find, {"print": lambda *_, **__: None})

    def execute(self, chooser: Chooser, futile: dict[Any, set[int]]) -> Machine:
        """Return a new execution, which has not begun.

        Raises:
            Full: the program has more threads than the numbers have room for.
        """
        machine = Machine(chooser, self.files, self.numbers, futile)
        prefix = intrinsics.DEVICE + "."
        device = {
            name.removeprefix(prefix): module
            for name, module in intrinsics.device().known.items()
        }
        world = AllRanks(machine, self.ranks, device)
        for rank in range(self.ranks):
            name = Name(rank, None, 0, f"the host of rank {rank}")
            thread = machine.start(name, machine.clock(), lambda: self._run(machine))
            thread.local = Host(world, rank)
        return machine

    def _run(self, machine: Machine) -> None:
        self._modules(machine).execute("__main__", (self._main, False))

    def run(self, machine: Machine) -> None:
        """Run an execution to its end.

        Raises:
            Fault: the program has a fault.
            Unsupported: it uses something that has no stand-in.
        """
        before, sys.argv = sys.argv, [str(self.path), *self.arguments]
        try:
            machine.run()
        except (Fault, Unsupported, Full):
            raise
        except Exception as error:
            raise self._fault(error) from error
        except SystemExit as error:
            raise Fault("error", f"the program exits with {error.code!r}") from error
        finally:
            sys.argv = before

    def _fault(self, error: Exception) -> Fault:
        """Return the fault of an exception that the program has raised."""
        frames = traceback.extract_tb(error.__traceback__)
        sites = [
            ("", CodePlace(frame.filename, frame.lineno or 0))
            for frame in frames
            if frame.filename in self.files
        ]
        if not sites:  # of the explorer itself
            raise error
        kind = "result" if isinstance(error, AssertionError) else "error"
        text = str(error).strip() or "without a text"
        return Fault(kind, f"{type(error).__name__}: {text}", sites=sites[-1:])
