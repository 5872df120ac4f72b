"""What a program and the packages that it imports get in the place of mpi4py.MPI.

The job's ranks run under ``numba-symm run --as-mpi4py``.
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import types

import mpi4py
import numpy as np
import pytest
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm import mpi
from numba_symm.errors import ArgumentError
from numba_symm.mpi import host_only


def ones(count=4, dtype=np.float64):
    return cuda.to_device(np.ones(count, dtype))


def test_both_imports_are_the_library():
    import mpi4py.MPI as imported

    assert MPI is mpi is imported is mpi4py.MPI is sys.modules["mpi4py.MPI"]
    assert MPI.Info is host_only.MPI.Info
    assert host_only.MPI is not MPI
    namespace = {}
    exec("from mpi4py.MPI import COMM_WORLD, DOUBLE", namespace)
    assert namespace["COMM_WORLD"] is MPI.COMM_WORLD


def test_named_communicators_and_what_is_made_of_them_take_device_arrays():
    comm = MPI.COMM_WORLD
    made = [comm, MPI.COMM_SELF, comm.Dup(), comm.Split(comm.rank % 2)]
    made += [comm.Create_cart([comm.size]), MPI.COMM_SELF.Dup()]
    for each in made:
        x = ones()
        each.Allreduce(MPI.IN_PLACE, x)
        assert x.copy_to_host().tolist() == [each.size] * 4
        request = each.Isend(x, each.rank)
        y = ones()
        each.Recv(y, each.rank)
        request.Wait()
        assert y.copy_to_host().tolist() == [each.size] * 4
    for each in made[2:]:
        each.Free()


def test_the_librarys_own_communicator_is_made_of_it():
    with ns.Communicator(MPI.COMM_WORLD, timeout=20) as comm:
        assert comm.all_reduce(ones()).copy_to_host()[0] == MPI.COMM_WORLD.size
    ported = mpi.Comm(MPI.COMM_WORLD)
    assert ported == MPI.COMM_WORLD
    ported.Free()  # as often as Comm
    MPI.COMM_WORLD.Barrier()


def test_a_second_install_must_have_the_same_options():
    mpi.install()
    with pytest.raises(ArgumentError, match="expected the options of the first call"):
        mpi.install(timeout=3)


def test_modules_that_have_mpi4pys_own_are_named(monkeypatch):
    early = types.ModuleType("early_package.part")
    early.MPI = host_only.MPI
    monkeypatch.setitem(sys.modules, early.__name__, early)
    monkeypatch.setattr(host_only, "_options", None)
    monkeypatch.setattr(host_only, "_make_communicators", lambda options: None)
    monkeypatch.setattr(host_only, "_let_c_have", lambda for_c: None)
    text = r"but early_package\.part.* imported it earlier, and keep"
    with pytest.warns(RuntimeWarning, match=text):
        mpi.install()


C = """
#include <Python.h>
static PyObject *found(const char *name)
{
    PyObject *module = PyImport_ImportModule("mpi4py.MPI");
    PyObject *result = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return result;
}
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "of_c", NULL, -1};
PyMODINIT_FUNC PyInit_of_c(void)
{
    PyObject *made = PyModule_Create(&definition);
    PyModule_AddObject(made, "Comm", found("Comm"));
    PyModule_AddObject(made, "capi", found("__pyx_capi__"));
    PyModule_AddObject(made, "python", PyImport_ImportModule("of_python"));
    return made;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_modules_of_c_get_mpi4pys_own_objects(tmp_path, monkeypatch, capfd):
    (tmp_path / "of_c.c").write_text(C)
    (tmp_path / "of_python.py").write_text("from mpi4py import MPI\n")
    headers = sysconfig.get_paths()["include"]
    made = tmp_path / f"of_c{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    command = ["cc", "-shared", "-fPIC", f"-I{headers}", "-o", made, "of_c.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    of_c = importlib.import_module("of_c")
    assert of_c.Comm is host_only.MPI.Comm
    assert of_c.capi is host_only.MPI.__pyx_capi__
    assert of_c.python.MPI is MPI  # what Python imports within it
    assert sys.modules["mpi4py.MPI"] is MPI is mpi4py.MPI
    said = "numba_symm: of_c has C code that calls MPI, so its calls stay with "
    assert (said in capfd.readouterr().err) == (MPI.COMM_WORLD.rank == 0)
