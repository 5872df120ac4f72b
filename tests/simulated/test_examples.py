"""The examples in the docstrings of the device functions, run on one rank."""

import doctest

import numpy as np
import pytest
from numba import cuda

from numba_symm import device as symm

EXAMPLES = {
    name: value.__doc__
    for name in symm.__all__
    if ">>>" in ((value := getattr(symm, name)).__doc__ or "")
}


def test_functions_have_examples():
    assert {"atomic_add", "atomic_cas_acquire"} <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_does_what_it_shows(comm, name):
    memory = comm.rendezvous(comm.zeros(64, np.int64))
    names = {"symm": symm, "np": np, "cuda": cuda, "comm": comm, "mem": memory}
    names |= {"ctx": memory.ctx, "old": np.zeros(1, np.int64)}
    example = doctest.DocTestParser().get_doctest(
        EXAMPLES[name], names, name, None, None
    )
    said = []
    failed, tried = doctest.DocTestRunner().run(example, out=said.append)
    assert tried
    assert not failed, "".join(said)
    comm.check()
