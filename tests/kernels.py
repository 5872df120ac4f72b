"""The names of all kernels, from the package's source, and of all algorithms."""

import ast
import functools
from contextlib import contextmanager

import numpy as np

from numba_symm import dtypes
from numba_symm.collectives.kernel_set import endpoint
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.binding import Call
from numba_symm.gpu.kernels import PACKAGE, _device_files, bound

MAKERS = {"Kernel", "make_kernel", "kernels_of"}  # their first argument is a factory


def named(factory):
    """Return the name of a factory, or of the one that has made a kernel's function."""
    return f"{factory.__module__}.{factory.__qualname__.partition('.')[0]}"


def named_call(operation, algorithm):
    """Return the name of an operation by an algorithm."""
    return f"{operation} by {algorithm}"


def every_call():
    """Return the names of all operations by each of their algorithms."""
    return {
        named_call(name, algorithm)
        for name, operation in OPERATIONS.items()
        for algorithm in operation.algorithms
    }


@functools.cache
def every_kernel(*makers):
    """Return the names of all factories that kernels are made of, by any of ``MAKERS``.

    Args:
        makers: names of those of interest; none: all.
    """
    found = set()
    for path in _device_files():
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and maker_of(node) in (makers or MAKERS):
                factory = ast.unparse(node.args[0])
                if (
                    factory != "factory"
                ):  # the parameter of a function that passes it on
                    found.add(f"{module}.{factory}")
    return found


@contextmanager
def listed():
    """Yield a dict of the kernels that are bound within the block, after it."""
    found = {}
    with bound() as launches:
        yield found
    found |= dict.fromkeys(each.kernel for each in launches)


@functools.cache
def bound_kernels(size):
    """Return the kernels of all operations by each of their algorithms, by factory."""
    with listed() as kernels:
        for operation in OPERATIONS.values():
            for algorithm, made in operation.algorithms.items():
                kind = "float64" if made.floats else "int64"
                element = dtypes.element(np.dtype(kind), "test")
                target = 0 if operation.in_place else 1 << 20
                call = Call(0, target, 256 * size, element, "sum")
                operation.bind(algorithm, endpoint(size), call)
    found = {}
    for kernel in kernels:
        found.setdefault(named(kernel.factory), kernel)
    return found


def maker_of(call):
    """Return the last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))
