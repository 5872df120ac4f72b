"""The table of what kernels wait for, and that kernels take their numbers from it."""

import ast
import importlib
import inspect
import pkgutil
import re

import pytest

from numba_symm import device
from numba_symm.collectives import kernels, operations, protocols
from numba_symm.launch import failures

MODULES = [
    found.name
    for package in (device, kernels, protocols)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
"""Modules with code that runs on the device."""


def test_no_two_share_a_number():
    with pytest.raises(ValueError, match=r"1 means .*put_signal.*; take another one"):
        failures._wait(failures.PUT_SIGNAL, "another")
    names = {
        value: name
        for name, value in vars(failures).items()
        if name.isupper() and isinstance(value, int)
    }
    assert set(names) | OF_OPERATIONS == set(failures.TABLE)


def test_an_operation_has_one_number():
    first = failures.of_operation("scan")
    assert first == operations.SCAN.exchange.operation == failures.of_operation("scan")
    assert failures.TABLE[first].words == "scan"
    assert failures.TABLE[first].place == "block"


def test_a_new_operation_takes_an_unused_number(monkeypatch):
    monkeypatch.setattr(failures, "TABLE", dict(failures.TABLE))
    known = set(failures.TABLE)
    first, second = (failures.of_operation(each) for each in ("new", "newer"))
    assert {first, second}.isdisjoint(known)
    assert first != second


def test_a_number_fits_its_bits_of_a_record():
    assert all(0 < number < 128 for number in failures.TABLE)


def test_every_algorithm_waits_for_what_its_caller_called():
    for name, operation in operations.OPERATIONS.items():
        for algorithm in operation.algorithms.values():
            assert algorithm.waits
            for number in algorithm.waits:
                assert name in re.findall(r"\w+", failures.TABLE[number].words)


OF_OPERATIONS = {
    number
    for operation in operations.OPERATIONS.values()
    for algorithm in operation.algorithms.values()
    for number in algorithm.waits
}
"""Numbers of the table of operations, which adds some of them."""


CARRIERS = ("operation", "fallback_for")
"""Parameters for a number of the table; ``fallback_for`` may be 0."""


def carried(module):
    """Yield each expression that a module assigns or passes to a carrier."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in CARRIERS:
            yield node.value
        if isinstance(node, ast.Call):
            called = value_of(node.func, module)
            called = getattr(called, "py_func", called)
            called = inspect.unwrap(called) if callable(called) else None
            if inspect.isfunction(called) or hasattr(called, "_fields"):
                names = inspect.signature(called).parameters
                passed = list(zip(names, spread(node.args), strict=False))
                passed += [(each.arg, each.value) for each in node.keywords]
                yield from (given for name, given in passed if name in CARRIERS)


def spread(arguments):
    """Return positional arguments, with those of a tuple after a star."""
    found = []
    for each in arguments:
        of_tuple = isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple)
        found += each.value.elts if of_tuple else [each]
    return found


def value_of(expression, module):
    """Return the value of a name, an attribute or a literal in a module, or None."""
    try:
        return eval(ast.unparse(expression), dict(vars(module)))
    except (AttributeError, NameError, RuntimeError):  # super() outside a class
        return None


def values_of(expression, module):
    """Yield the possible values of an expression; none if it is a carrier."""
    if isinstance(expression, ast.IfExp):
        yield from values_of(expression.body, module)
        yield from values_of(expression.orelse, module)
    elif isinstance(expression, ast.Subscript):
        yield from value_of(expression.value, module).values()
    elif ast.unparse(expression).rpartition(".")[2] not in CARRIERS:
        yield value_of(expression, module)


def numbers(name):
    """Return the numbers that a module's kernels may store."""
    module = importlib.import_module(name)
    found = [value for each in carried(module) for value in values_of(each, module)]
    return [each for each in found if each != 0 and not isinstance(each, bool)]


@pytest.mark.parametrize("module", MODULES)
def test_kernels_wait_for_what_is_in_the_table(module):
    assert [each for each in numbers(module) if each not in failures.TABLE] == []


def test_every_number_is_some_kernels_or_the_hosts():
    used = {number for module in MODULES for number in numbers(module)}
    host = {failures.AFAR, failures.LATE, failures.ENDED, failures.ABANDONED}
    assert used | host | OF_OPERATIONS == set(failures.TABLE)
