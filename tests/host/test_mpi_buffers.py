"""Buffer specifications and datatypes of mpi4py, without ranks.

Host arrays stand for arrays of the device: nothing here looks at their contents.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI as plain

from numba_symm import dtypes, errors
from numba_symm import mpi as MPI
from numba_symm.gpu import arrays
from numba_symm.launch import ranks
from numba_symm.mpi import buffers, datatypes
from numba_symm.mpi.datatypes import translated
from numba_symm.mpi.errors import MPIError, as_mpi


@pytest.fixture(autouse=True)
def host_arrays(monkeypatch):
    def fields(array, what):
        order = "C" if array.flags.c_contiguous else None
        return array.ctypes.data, array.shape, array.dtype, order, False

    monkeypatch.setattr(arrays, "fields", fields)


PAGE = Path(__file__).parents[2] / "docs" / "mpi4py-calls.md"
X = np.arange(12, dtype=np.int32)
VECTOR = MPI.INT.Create_vector(2, 1, 3)
BACKWARDS = MPI.INT.Create_resized(0, -4)


@pytest.mark.parametrize(
    ("spec", "blocks", "first", "number"),
    [
        (X, 0, 0, 12),
        ([X, MPI.INT], 0, 0, 12),
        ((X, "i"), 0, 0, 12),
        ([X, 5], 0, 0, 5),
        ([X, (5, 3)], 0, 12, 5),
        ([X, [5, 3]], 0, 12, 5),
        ([X, (None, 3)], 0, 12, 9),
        ([X, (None, 12)], 0, 0, 0),
        ([X, (0, 12)], 0, 0, 0),
        ([X, 5, MPI.INT], 0, 0, 5),
        ([X, None, MPI.SHORT], 0, 0, 24),
        ([X, (5, 3), MPI.SHORT], 0, 6, 5),
        ([X, 5, 3, MPI.INT], 0, 12, 5),
        ([X, MPI.BYTE], 3, 0, 16),
        (X, 4, 0, 3),
        (X.reshape(3, 4), 4, 0, 3),
        ([X, 3, MPI.INT], 4, 0, 3),
        ([X, 2, VECTOR], 0, 0, 2),
        ([None, MPI.INT], 0, 0, 0),
        ([X[:0], MPI.INT], 3, 0, 0),
    ],
)
def test_items_of_a_specification(spec, blocks, first, number):
    found = buffers.message(spec, blocks)
    assert (found.first, found.number) == (first, number)


def test_arrays_with_gaps_are_refused():
    with pytest.raises(ValueError, match="and a derived datatype"):
        buffers.message(X[::2])


def test_a_specification_is_read_once(monkeypatch):
    """This holds for the same memory and a type that cannot change."""
    kind = SimpleNamespace(always=True, read=arrays.fields)
    monkeypatch.setitem(arrays.KINDS, np.ndarray, kind)
    spec, other = [X, MPI.INT], X[:]
    first = buffers.message(spec)
    for kind, elements in ((MPI.INT, 2), (MPI.DOUBLE, 1)):
        vector = kind.Create_vector(elements, 1, 2).Commit()
        assert buffers.message([X, 1, vector]).size == elements
        vector.Free()  # the next type may get its handle
    monkeypatch.delattr(buffers, "_items")
    found = buffers.message([other, MPI.INT])
    assert found[1:] == first[1:]
    assert found.array is other


@pytest.mark.parametrize(
    ("spec", "counts", "displs"),
    [
        (X, (4, 4, 4), (0, 4, 8)),
        (X[:11], (4, 4, 3), (0, 4, 8)),
        ([X, (1, 2, 3), MPI.INT], None, None),  # a tuple is a pair in this place
        ([X, [1, 2, 3]], (1, 2, 3), (0, 1, 3)),
        ([X, [1, 2, 3], MPI.SHORT], (1, 2, 3), (0, 1, 3)),
        ([X, 2], (2, 2, 2), (0, 2, 4)),
        ([X, ([1, 2, 3], [9, 4, 0])], (1, 2, 3), (9, 4, 0)),
        ([X, ([1, 2, 3], 4), MPI.INT], (1, 2, 3), (0, 4, 8)),
        ([X, [1, 2, 3], [9, 4, 0], MPI.INT], (1, 2, 3), (9, 4, 0)),
        ([X, (1, 2, 3), (9, 4, 0), MPI.INT], (1, 2, 3), (9, 4, 0)),
        ([X, (None, None), MPI.INT], (4, 4, 4), (0, 4, 8)),
    ],
)
def test_items_of_each_rank(spec, counts, displs):
    if counts is None:
        with pytest.raises(ValueError, match="a pair of counts"):
            buffers.vector(spec, 3)
        return
    found = buffers.vector(spec, 3)
    assert (found.counts, found.displs) == (counts, displs)
    assert [part.number for part in found.parts] == list(counts)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([X, 13], "within the array's 48 bytes"),
        ([X, (2, 11)], "within the array's 48 bytes"),
        ([X, (0, 13)], "out of bounds"),
        ([X, 10**30], "within the array's 48 bytes"),
        ([X, (1, 10**30)], "out of bounds"),
        ([X, 1.0], r"an integer as count, got 1\.0;"),
        ([X, (1, "a")], "an integer as displacement, got 'a'"),
        ([X, -1], "negative count"),
        ([X, (1, -1)], "negative displacement"),
        ([X[:5], MPI.DOUBLE], "cannot infer count"),
        ([X, 4, VECTOR], "within the array's 48 bytes"),
        ([X, 3, BACKWARDS], "within the array's 48 bytes"),
        ([MPI.BOTTOM, 1, MPI.INT], "pass the array itself"),
        ([X, 1, 1, 1, 1], "2 to 4 items"),
        ([X, 1, MPI.SUM], r"got MPI\.SUM;"),
        (X[::2], "contiguous"),
    ],
)
def test_refused_specifications(spec, words):
    with pytest.raises(ValueError, match=words):
        buffers.message(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([X, [1.0, 1, 1]], "an integer as counts"),
        ([X, 1.0], "expecting 3 counts, got 1.0"),
        ([X, ([1, 1, 1], 0.5)], "expecting 3 displacements, got 0.5"),
        ([X, ([1, 1, 1], [0, 0, None])], "an integer as displacements, got None"),
    ],
)
def test_counts_of_a_wrong_type_raise_what_mpi4py_does(spec, words):
    """Ours, too, which name the argument."""
    for kind in (TypeError, errors.ArgumentError):
        with pytest.raises(kind, match=words):
            buffers.vector(spec, 3)


def test_constants_of_mpi_are_named_in_texts_and_no_text_has_an_address():
    """Texts of several ranks are equal where their reasons are."""
    own = MPI.Op.Create(lambda *_: None)
    for op, name in (
        (MPI.REPLACE, "MPI.REPLACE"),
        (MPI.OP_NULL, "MPI.OP_NULL"),
        (own, "<numba_symm.mpi.Op object>"),
    ):
        with pytest.raises(errors.ArgumentError, match=f"got op={name}; pass one of"):
            dtypes.reduction(op, "here")
    own.Free()
    with pytest.raises(errors.ArgumentError) as raised:
        dtypes.checked(MPI.INT, "here")
    assert "dtype=MPI.INT" in str(raised.value)
    assert " at 0x" not in str(raised.value)
    for comm, name in ((MPI.COMM_NULL, "MPI.COMM_NULL"), (object(), "<object object>")):
        with pytest.raises(errors.ArgumentError, match=f"communicator, got {name}"):
            ranks.checked(comm)


def offsets(datatype):
    """Return the offset of every element of a datatype, from its layout."""
    found = datatypes.layout(datatype)
    starts = [0] if found.runs is None else found.runs
    each = np.arange(0, found.run, found.base.itemsize)
    return found, np.add.outer(starts, each).ravel().tolist()


@st.composite
def derived(draw, depth=2):
    """Return a datatype of int32, whose elements may be anywhere, in any order."""
    of = draw(derived(depth - 1)) if depth and draw(st.booleans()) else plain.INT
    n, near = draw(st.integers(1, 3)), st.integers(-3, 4)
    lengths = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    places = draw(st.lists(near, min_size=n, max_size=n))
    made = {
        "contiguous": lambda: of.Create_contiguous(n),
        "vector": lambda: of.Create_vector(n, 2, places[0]),
        "indexed": lambda: of.Create_indexed(lengths, places),
        "hindexed": lambda: of.Create_hindexed(lengths, [4 * p for p in places]),
        "subarray": lambda: of.Create_subarray([4, 3], [2, n], [n - 1, 0]),
        "struct": lambda: of.Create_struct([1] * n, [8 * p for p in places], [of] * n),
        "resized": lambda: of.Create_resized(4 * places[0], 4 * places[-1]),
    }
    return made[draw(st.sampled_from([*made]))]().Commit()


@settings(max_examples=300, deadline=None, database=None)
@given(derived(), st.integers(0, 3), st.integers(0, 5), st.integers(0, 40))
def test_items_are_where_mpi_reads_them(made, count, displ, length):
    """In the same order; those are refused that are not in the array, and no others."""
    around, first = 4096, displ * made.Get_extent()[1]
    reach = count * abs(made.Get_extent()[1]) + sum(map(abs, made.Get_true_extent()))
    assume(abs(first) + reach < 4 * (around - 40))  # MPI reads it
    whole = np.arange(-around, around, dtype="i4")
    read = np.empty(count * made.Get_size() // 4, "i4")
    begin = whole[around:].ctypes.data + first
    spec = [plain.memory.fromaddress(begin, 4), count, made]
    plain.COMM_SELF.Sendrecv(spec, 0, recvbuf=read, source=0)
    inside = first <= 4 * length and all(0 <= at < length for at in read)
    try:
        array = whole[around : around + length]
        found = buffers.message([array, (count, displ), made])
    except MPIError:
        assert not inside
        return
    assert inside
    _, at = offsets(made)
    items = found.first + np.arange(found.number) * found.layout.extent
    assert np.add.outer(items, at).ravel().tolist() == (4 * read.astype(int)).tolist()


@pytest.mark.parametrize(
    ("made", "axes"),
    [
        (lambda: MPI.INT.Create_vector(3, 2, 5), ((3, 20),)),
        (lambda: MPI.INT.Create_vector(3, 2, -5), ((3, -20),)),
        (lambda: MPI.INT.Create_vector(1, 1, 4).Create_resized(0, 16), ()),
        (
            lambda: MPI.INT.Create_vector(2, 1, 2).Create_hvector(3, 1, 100),
            ((3, 100), (2, 8)),
        ),
        (
            lambda: MPI.INT.Create_subarray([9, 8, 7, 6], [3, 4, 2, 5], [1, 2, 3, 0]),
            ((3, 8 * 7 * 24), (4, 7 * 24), (2, 24)),
        ),
        (
            lambda: MPI.INT.Create_subarray([4, 5, 6], [4, 2, 3], [0] * 3, MPI.ORDER_F),
            ((3, 80),),
        ),
        (
            lambda: MPI.INT.Create_subarray([4, 5], [2, 3], [1, 1], MPI.ORDER_FORTRAN),
            ((3, 16),),
        ),
        (lambda: MPI.INT.Create_indexed([1, 1, 1], [0, 2, 5]), None),
        (lambda: MPI.INT.Create_indexed([1] * 4, [0, 2, 10, 13]), None),
        (lambda: MPI.INT.Create_indexed([1] * 4, [0, 2, 10, 12]), ((2, 40), (2, 8))),
    ],
)
def test_runs_on_regular_axes_are_known(made, axes):
    assert datatypes.layout(made()).axes == axes


def test_a_datatype_is_read_once():
    """A subarray's elements are not listed in each call, nor those of the whole."""
    made = MPI.BYTE.Create_subarray([1 << 30, 1 << 30], [2, 1 << 20], [5, 7])
    found = datatypes.layout(made)
    assert datatypes.layout(made) is found
    assert found.runs.tolist() == [(5 << 30) + 7, (6 << 30) + 7]
    assert found.run == 1 << 20
    assert datatypes.layout(made.Dup()) is not found
    made.Free()


def test_darrays_and_long_doubles_are_refused():
    made = MPI.INT.Create_darray(
        1, 0, [4], [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [1]
    )
    with pytest.raises(NotImplementedError, match="DARRAY of MPI_INT is not packed"):
        datatypes.layout(made)
    with pytest.raises(NotImplementedError, match=r"use MPI\.DOUBLE"):
        datatypes.layout(MPI.LONG_DOUBLE)
    with pytest.raises(ValueError, match="DATATYPE_NULL"):
        datatypes.layout(MPI.DATATYPE_NULL)


def test_errors_are_mpis_and_keep_their_cause():
    @translated
    def fails(error):
        raise error

    wanted = {
        errors.ArgumentError("a: b"): MPI.ERR_ARG,
        errors.BackendError("a: b"): MPI.ERR_NO_MEM,
        errors.ClosedError("a: b"): MPI.ERR_COMM,
        errors.CollectiveTimeout("a: b"): MPI.ERR_OTHER,
    }
    for error, code in wanted.items():
        with pytest.raises(MPI.Exception, match="a: b") as found:
            fails(error)
        assert found.value.Get_error_class() == code
        assert found.value.__cause__ is error
    own = as_mpi(errors.ArgumentError("x"))
    assert isinstance(own, MPIError)
    with pytest.raises(errors.ArgumentError) as found:
        fails(own)
    assert found.value is own


def test_the_names_of_mpi4py():
    from mpi4py import MPI as plain

    assert MPI.SUM == plain.SUM
    assert MPI.Info is plain.Info
    assert MPI.COMM_WORLD is plain.COMM_WORLD
    assert MPI.Request is not plain.Request
    with pytest.raises(AttributeError):
        _ = MPI.COMM_WORD


def test_the_page_on_porting_names_every_method_that_takes_an_array():
    """Its table has those that mpi4py documents with a buffer, and only what exists."""
    kinds = (MPI.Comm, MPI.Cartcomm, MPI.Prequest, MPI.Win, MPI.Message)
    kinds += (plain.Op, plain.Datatype, plain.Intercomm, plain.Request, plain.Prequest)
    table = PAGE.read_text().partition("## Every method")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line[:3] == "| `"]
    named = {name.rpartition(".")[2] for name in re.findall("`(.+?)`", "".join(cells))}
    groups = {name for name in named if "…" in name}
    for name in named - groups:
        assert any(hasattr(kind, name) for kind in (MPI, *kinds)), name
    patterns = [name.replace("…", ".*") for name in groups - {"I…", "…_init"}]
    buffered = [
        name
        for kind in kinds
        for name in dir(kind)
        if name[0].isupper()
        and "Buf" in str(getattr(kind, name).__doc__).split("\n")[0]
    ]
    assert len(buffered) > 80
    for name in buffered:
        plainly = {name, name.removesuffix("_init"), name[1:].capitalize()}
        found = any(re.fullmatch(pattern, name) for pattern in patterns)
        assert found or named & plainly, name
