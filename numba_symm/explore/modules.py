"""Imports of an explored program: stand-ins, and modules that only it sees.

The program's own modules and those of ``numba_symm.device`` are executed for it, with
an ``__import__`` of their own. So this process keeps the modules that it has, and no
state of one execution reaches the next one.
"""

import builtins
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[1]

Source = tuple[CodeType, bool]
"""A module's code, and whether it is a package."""


class Modules:
    """What one program, or the library within it, can import.

    Attributes:
        known: the modules so far, by name.
        find: returns the source of a module, or None: it is imported as usual.
        names: more names that modules have as built-in ones.
        prepare: is called with each executed module.
    """

    def __init__(
        self,
        known: Mapping[str, Any],
        find: Callable[[str], Source | None],
        names: Mapping[str, Any],
    ):
        self.known, self._find = dict(known), find
        self._builtins = {
            **vars(builtins),
            "__import__": self._import,
            **names,
        }
        self.prepare: Callable[[ModuleType], None] | None = None

    def execute(self, name: str, source: Source, run_as: str | None = None) -> Any:
        """Execute a module, and return it."""
        code, package = source
        module = ModuleType(run_as or name)
        module.__dict__["__builtins__"] = self._builtins
        module.__file__ = code.co_filename
        module.__package__ = name if package else name.rpartition(".")[0]
        self.known[name] = module
        exec(code, module.__dict__)
        if self.prepare is not None:
            self.prepare(module)
        return module

    def load(self, name: str) -> Any:
        """Return a module that is known or has a source; None: there is none."""
        if name in self.known:
            return self.known[name]
        parent, _, last = name.rpartition(".")
        if parent and parent.partition(".")[0] in self.known:
            self.load(parent)
        source = self._find(name)
        if source is None:
            return None
        module = self.execute(name, source)
        if parent in self.known and isinstance(self.known[parent], ModuleType):
            setattr(self.known[parent], last, module)
        return module

    def _import(
        self,
        name: str,
        given: Any = None,
        local: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if level:
            name = importlib.util.resolve_name("." * level + name, given["__package__"])
        module = self.load(name)
        if module is None:
            return builtins.__import__(name, given, local, fromlist, 0)
        if not fromlist:
            return self.load(name.partition(".")[0])
        for each in fromlist:
            if each not in vars(module):
                self.load(f"{name}.{each}")
        return module
