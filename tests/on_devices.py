"""Runs programs of mpi4py in the simulator, with NumPy arrays as device arrays.

    numba-symm run -n 2 --simulate tests/on_devices.py PROGRAM.py...
    numba-symm run -n 2 --simulate tests/on_devices.py -m MODULE ARGUMENT...

Without a GPU, packages have no array library for devices. But the simulator's device
memory is host memory. So here a call of ``numba_symm.mpi`` takes an array of NumPy, or
a scalar of it, for one of the device, as the same program's arrays of CuPy would be.
``numba_symm.mpi`` is in mpi4py's place. Programs run one after another: a rank begins
the next one when all ranks have ended the last one.

mpi4py-fft's module of FFTW is compiled, so it is replaced: arrays are NumPy's, and
transforms are of its backend ``numpy``.
"""

import io
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
from mpi4py import MPI

from numba_symm import mpi
from numba_symm.gpu import arrays


def take_arrays_of_numpy():
    """Let calls read arrays and scalars of NumPy as device arrays."""
    is_simulated, read = arrays.is_simulated, arrays._read_simulated
    kept = {}  # a scalar and its array, by the scalar's id

    def is_on_device(array):
        own = isinstance(array, np.ndarray | np.generic)
        return is_simulated(array) or (own and not array.dtype.hasobject)

    def fields(array, what):
        if isinstance(array, np.generic):
            # A call reads an array several times, at one address.
            _, array = kept.setdefault(id(array), (array, np.asarray(array)))
            while len(kept) > 1000:
                del kept[next(iter(kept))]
        return read(array, what)

    arrays.is_simulated = is_on_device
    arrays._SIMULATED = replace(arrays._SIMULATED, read=fields)


def replace_fftw():
    """Replace mpi4py-fft's module of FFTW, if the package is here."""
    fftw = ModuleType("mpi4py_fft.fftw")
    fftw.aligned, fftw.aligned_like, fftw.fftlib = np.zeros, np.zeros_like, {}
    sys.modules[fftw.__name__] = fftw
    try:
        from mpi4py_fft import libfft
    except ImportError:
        return
    plain = libfft.FFT.__init__

    def init(self, *args, backend, **options):
        backend = "numpy" if backend == "fftw" else backend
        plain(self, *args, backend=backend, **options)

    libfft.FFT.__init__ = init


def main(*program):
    mpi.install(timeout=60)
    take_arrays_of_numpy()
    mpi.Attach_buffer = MPI.Attach_buffer  # whose memory is the host's
    replace_fftw()
    if program[0] == "-m":
        sys.argv[:] = program[1:]
        sys.path.insert(0, "")
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    for path in program:
        sys.argv[:] = [path]
        os.chdir(Path(path).parent)
        sys.path[0] = str(Path(path).parent)
        sys.stdin = io.StringIO("100\n0\n")  # for those that ask how long to compute
        runpy.run_path(path, run_name="__main__")
        sys.stdout.flush()
        # A rank that is still in this program, in a receive from any source, must not
        # get a message of the next one from a rank that is ahead.
        mpi.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
