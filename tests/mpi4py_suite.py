"""Runs mpi4py's own tests against ``numba_symm.mpi``, on each rank of a job.

    python tests/mpi4py_suite.py FOLDER RESULTS [MODULE...]

FOLDER has the tests of mpi4py's source distribution. Their arrays are replaced by
device arrays, and their communicators by ``numba_symm.mpi.Comm``. Rank 0 writes the
outcome of every test to RESULTS.
"""

import functools
import importlib
import json
import os
import sys
import types
import unittest
from pathlib import Path

import mpi4py
import numpy as np
from numba import cuda

from numba_symm import mpi
from numba_symm.gpu.arrays import Memory

TYPES = os.environ.get("NUMBA_SYMM_TEST_TYPES", "i")
"""NumPy's letters of the types of the tests' arrays; each costs as much again."""


LEFT_OUT = {"testNeighborAlltoallwBottom": "MPI.BOTTOM has no array on the device"}
"""Tests that are skipped: their calls go to mpi4py, with addresses of the device."""


class Names(types.ModuleType):
    """``mpi4py.MPI`` for the tests: the names of ``numba_symm.mpi``."""

    def __getattr__(self, name):
        return getattr(mpi, name)


class Flat:
    """The elements of a device array, which may be written."""

    def __init__(self, array):
        self.array = array

    def __iter__(self):
        return iter(self.array.copy_to_host().ravel())

    def __getitem__(self, index):
        return self.array.copy_to_host().ravel()[index]

    def __setitem__(self, index, value):
        self.array.reshape(self.array.size)[index] = value


def replace_arrays(arrayimpl):
    """Let the tests of mpi4py make arrays of the device."""

    known = arrayimpl.ArrayNumPy.TypeMap
    chosen = {letter: known[letter] for letter in TYPES}

    class DeviceArray(arrayimpl.BaseArray):
        backend = "numba_symm"  # of "numba" mpi4py leaves out what MPI lacks
        TypeMap = chosen

        def __init__(self, arg, typecode, shape=None, readonly=False):
            host = arrayimpl.ArrayNumPy(arg, typecode, shape).array
            self.array = cuda.to_device(host)

        address = property(lambda self: self.array.ctypes.data)
        typecode = property(lambda self: self.array.dtype.char)
        itemsize = property(lambda self: self.array.dtype.itemsize)
        flat = property(lambda self: Flat(self.array))
        size = property(lambda self: self.array.size)

        def __iter__(self):
            return iter(self.array.copy_to_host())

    arrayimpl.ArrayBackends[:] = [DeviceArray]


def alloc_mem(allocator, nbytes):
    """Return device memory for ``MPI.Alloc_mem``, so that windows are over such."""
    block = allocator.allocate(max(nbytes, 1))
    return Memory(block.address, nbytes, block).array(nbytes, np.uint8)


class Outcomes(unittest.TestResult):
    """Notes the worst outcome of each test on any rank."""

    ORDER = ("passed", "skipped", "failed")

    def __init__(self, comm):
        super().__init__()
        self.comm, self.noted, self.own = comm, {}, ("passed", "")

    def note(self, outcome, text):
        if self.ORDER.index(outcome) > self.ORDER.index(self.own[0]):
            self.own = outcome, text

    def startTest(self, test):
        super().startTest(test)
        self.own = "passed", ""
        print("start", test.id(), flush=True)

    def addError(self, test, err):
        self.note("failed", self._exc_info_to_string(err, test))

    addFailure = addError

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test, reason):
        self.note("skipped", reason)

    def stopTest(self, test):
        super().stopTest(test)
        everyone = self.comm.allgather(self.own)
        worst = max(everyone, key=lambda each: self.ORDER.index(each[0]))
        self.noted[test.id()] = worst
        print(worst[0], test.id(), worst[1], flush=True)


def is_class(kind):
    return isinstance(kind, type)


def main(folder, results, *modules):
    sys.path.insert(0, folder)
    plain = mpi.COMM_WORLD.Dup()
    names = Names("mpi4py.MPI")
    names.COMM_WORLD = mpi.Comm(mpi.COMM_WORLD, timeout=20)
    names.COMM_SELF = mpi.Comm(mpi.COMM_SELF, timeout=20)
    allocator = names.COMM_WORLD.post.words.allocator
    names.Alloc_mem = functools.partial(alloc_mem, allocator)
    names.Free_mem = lambda memory: None
    real, mpi4py.MPI = mpi4py.MPI, names
    outcomes = Outcomes(plain)
    replace_arrays(importlib.import_module("arrayimpl"))
    for module in modules:
        loaded = importlib.import_module(module)
        for kind in vars(loaded).values():
            for name in LEFT_OUT.keys() & vars(kind).keys() if is_class(kind) else ():
                setattr(kind, name, unittest.skip(LEFT_OUT[name])(getattr(kind, name)))
        tests = unittest.defaultTestLoader.loadTestsFromModule(loaded)
        tests.run(outcomes)
    mpi4py.MPI = real
    if plain.rank == 0:
        Path(results).write_text(json.dumps(outcomes.noted, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
