"""The examples in the docstrings of the device functions, run on one rank."""

import doctest
import re

import numpy as np
import pytest
from numba import cuda

from numba_symm import device as symm

TEXTS = {name: getattr(symm, name).__doc__ or "" for name in symm.__all__}
COMPARISONS = {"EQ", "NE", "GT", "GE", "LT", "LE"}
EXAMPLES = {
    name: text
    for name, text in TEXTS.items()
    if ">>>" in text and name not in COMPARISONS
}


def test_functions_have_examples():
    """All but one instruction each, and what kernels do not call."""
    others = {"Context", "Guard", "WorkspaceContext", "array_at", "device_function"}
    others |= {"globaltimer"}
    single = re.compile(r"(ld|st|fence)_\w+").fullmatch
    wanted = {name for name in symm.__all__ if not single(name)}
    assert wanted - others - COMPARISONS == set(EXAMPLES)


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
