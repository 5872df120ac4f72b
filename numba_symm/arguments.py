"""Checks of arguments; each raises ArgumentError for a wrong value."""

import argparse
import contextlib
import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from numba_symm.errors import ArgumentError


def shown(value: Any) -> str:
    """Return an argument for an error's text: MPI's constants by name, no address."""
    if type(value).__module__ in ("mpi4py.MPI", "numba_symm.mpi"):
        with contextlib.suppress(Exception):  # a communicator without a name raises
            name = value.__reduce__()
            if isinstance(name, str):
                return f"MPI.{name}"
    return without_addresses(repr(value))


def without_addresses(text: str) -> str:
    """Return a text without addresses, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


_NONE: Mapping[str, str] = MappingProxyType({})


def meant(name: object, known: Iterable[str], others: Mapping[str, str] = _NONE) -> str:
    """Return " (did you mean 'sum'?)", or "" if no known name is near.

    Args:
        name: what was given.
        known: the names that there are.
        others: by the name that another library has, a known one.
    """
    text = str(name)
    found = [others.get(text), *difflib.get_close_matches(text, known, 1)]
    found = list(filter(None, found))
    return f" (did you mean {found[0]!r}?)" if found else ""


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers from ``least`` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected a number of at least {least}, got {text!r}"
            )
        return int(text)

    return number


class Parser(argparse.ArgumentParser):
    """A parser of a command line whose errors name what may have been meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and the error, and exit with the code 2."""
        parts = re.search(r"(.*invalid choice: '(.*?)')(.*choose from (.*)\))", message)
        if parts is not None:
            near = meant(parts[2], re.findall(r"[\w-]+", parts[4]))
            message = f"{parts[1]}{near}{parts[3]}"
        super().error(message)


def is_integer(number: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy; a bool is not one."""
    kind = type(number)
    return kind is int or (isinstance(number, int | np.integer) and kind is not bool)


def index(value: Any) -> int:
    """Return an integer of any type as a Python int, or raise; a bool is not one."""
    if isinstance(value, bool):
        raise TypeError("a bool is no number")
    return operator.index(value)


def integer(value: Any, call: str, what: str, least: int, most: int, do: str) -> int:
    """Return an integer argument as a Python int, or refuse it.

    Args:
        value: the argument.
        call: the operation that received it.
        what: the expected value and its range, in words.
        least: the least value.
        most: the greatest value.
        do: the advice to the caller.
    """
    try:
        number = index(value)
    except Exception:  # an object's own method may raise anything
        number = least - 1
    if not least <= number <= most:
        raise ArgumentError(f"{call}: expected {what}, got {shown(value)}; {do}")
    return number


def address(value: Any, call: str) -> int:
    """Return an address, or refuse a value that cannot be one."""
    do = "pass an address that alloc returned"
    return integer(value, call, "an address, an int", 0, (1 << 64) - 1, do)


def flag(value: Any, call: str, name: str) -> bool:
    """Return whether an argument is true, or refuse one without a truth value."""
    try:
        return bool(value)
    except Exception as error:  # an object's own method may raise anything
        raise ArgumentError(
            f"{call}: expected {name} to be True or False, got {shown(value)} "
            f"({without_addresses(str(error))}); pass True or False"
        ) from error


def refuse_misaligned(address: int, size: int) -> None:
    """Raise: an access in the simulator that would fail on a GPU."""
    raise ArgumentError(
        f"address {address:#x}: expected a multiple of {size}; on a GPU, this access "
        "fails, and the process cannot use the GPU any more"
    )
