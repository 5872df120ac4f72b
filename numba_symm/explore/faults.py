"""What an exploration stops with, and where in the program something happened."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from numba_symm.errors import SymmError


class Fault(BaseException):
    """A fault of the program, in one execution. No program catches it by accident.

    Attributes:
        kind: ``race``, ``access``, ``deadlock``, ``divergence``, ``livelock``,
            ``result`` or ``error``.
        details: what the report needs beyond the text.
    """

    def __init__(self, kind: str, text: str, **details: Any):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.details = kind, text, details


class Unsupported(SymmError):
    """The program uses something that ``numba_symm.explore`` has no stand-in for."""


class Pruned(BaseException):
    """This execution is equivalent to another one, which is explored, too."""


class Ended(BaseException):
    """Ends a thread of an execution that is over."""


class CodePlace(NamedTuple):
    """A place in the program.

    Attributes:
        file: the program's file.
        line: the line.
        called: the library's function that was called there; "" if none was.
    """

    file: str
    line: int
    called: str = ""


_DEVICE = str(Path(__file__).parents[1] / "device")

NOWHERE = CodePlace("?", 0)

Files = Mapping[str, list[str]]
"""The lines of the program's files, by name."""


def site(files: Files) -> CodePlace:
    """Return where the program is: its innermost frame, and what that called."""
    frame: FrameType | None = sys._getframe(1)
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in files:
            return CodePlace(code.co_filename, frame.f_lineno, called)
        if code.co_filename.startswith(_DEVICE) and code.co_name[0] not in "_<":
            called = code.co_name
        frame = frame.f_back
    return NOWHERE


def frame_of(files: Files) -> FrameType | None:
    """Return the program's innermost frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    return frame
