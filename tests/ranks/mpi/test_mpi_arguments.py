"""Arguments of all methods in mpi4py's spelling: how they are read and refused."""

import inspect

import numpy as np
import pytest
from numba import cuda

from numba_symm import mpi as MPI
from numba_symm.arguments import shown
from numba_symm.gpu.arrays import on_device
from tests.ranks.helpers import of_one_island

pytestmark = of_one_island  # of windows


class Broken:
    """Raises another exception when it is read."""

    def __int__(self):
        raise RuntimeError

    __index__ = __iter__ = __len__ = __bool__ = __int__


NONE = [None, "1", b"1", [1], (), 1j, np.nan, np.inf, np.array([1, 2]), Broken()]
RANKS = [*NONE, 10**6, -(10**6), 1e6, np.int64(10**6), 2**70]
INTEGERS = {
    ("dest", "source", "root", "target_rank"): RANKS,
    ("tag", "sendtag", "recvtag"): [*NONE, -(10**6), 2**70],
    ("color", "key", "split_type", "target_disp", "assertion"): [*NONE, 2**70],
    ("local_leader", "remote_leader"): [*NONE, 2**70],
}
WRONG = {
    **{name: given for names, given in INTEGERS.items() for name in names},
    "op": ["zz", 5, None, 1j, Broken(), MPI.OP_NULL],
    "target": [0.5, 2**70, Broken(), [0, -1], [0, 1.0], [0, 1, "zz"], [0, 1, 2, 3]],
    "recvcounts": [5, "x", [0.5] * 9, Broken()],
    "status": [3, "x", [MPI.Status]],
    "statuses": [3, "x", [None], [MPI.Status]],
    "requests": [None, 3, [3], Broken()],
    "group": [None, 3, MPI.COMM_WORLD],
    "info": [3, "x"],
    "comm": [None, 3],
    "size": [None, "x", -1, 0.5, Broken()],
    "disp_unit": [None, "x", -1, 0, 0.5, Broken()],
}
"""By the name of a parameter, arguments that no call takes."""


def buffers(x):
    """Return specifications of an array that no call takes."""
    counts = [-1, 0.5, "zz", 2**70, Broken()]
    made = [[x, each] for each in counts]
    made += [[x, each, MPI.INT] for each in [*counts, [1, 2, 3, 4, 5, 6]]]
    made += [[x, 1, each, MPI.INT] for each in (0.5, "zz", Broken())]
    made += [[x, (0, each), MPI.INT] for each in (0.5, "zz", Broken())]
    made += [[x, 1, each] for each in (7, "zz", Broken())]
    strided = cuda.to_device(np.zeros(4, x.dtype))[::2]
    return [*made, [x], [x, 1, 2, 3, 4], strided]


MPI4PYS = {"dims", "periods", "reorder", "index", "edges", "sources", "degrees"}
MPI4PYS |= {"destinations", "args", "options", "remain_dims", "peer_comm"}
MPI4PYS |= {"arg", "handle", "given", "info", "weights", "sourceweights", "destweights"}
"""Parameters of which the library only passes the arguments to mpi4py."""

HOST = {"Create", "Allocate", "Allocate_shared", "Create_dynamic"}
"""Methods of MPI.Win that make windows of host memory, too."""


def methods(kind):
    """Yield the names and parameters of the library's own methods of a class."""
    for name in dir(kind):
        given = inspect.getattr_static(kind, name)
        function = getattr(given, "__func__", given)
        inner = getattr(function, "__globals__", {}).get("method", function)
        found = getattr(inspect.unwrap(inner), "__module__", None) or ""
        own = callable(function) and found.startswith("numba_symm.")
        of_mpi = name[0] != "_" and hasattr(kind._plain, name)
        if own and of_mpi and not (kind is MPI.Win and name in HOST):
            yield name, {*list(inspect.signature(function).parameters)[1:]}


def test_every_method_refuses_every_wrong_argument(comm):
    """It does nothing then, so no message is lost. One rank reads all arguments."""
    if comm.size > 1:
        pytest.skip("with one rank")
    x, y, one = (cuda.to_device(np.arange(n, dtype="i4")) for n in (24, 24, 1))
    grid = comm.Create_cart([comm.size], [True])
    win = MPI.Win.Allocate_device(64, 4, comm=comm)
    win.Lock_all()
    comm.Send(x, comm.rank, 1)
    message = comm.Mprobe(comm.rank, 1)
    request = comm.Irecv(y, comm.rank, 2)
    prepared = comm.Send_init(x, comm.rank, 2)
    right = {"dest": comm.rank, "source": comm.rank, "target_rank": comm.rank}
    right |= {"root": 0, "tag": 1, "sendtag": 1, "local_leader": 0, "remote_leader": 0}
    right |= {"op": MPI.SUM, "comm": comm, "peer_comm": comm, "group": comm.group}
    right |= {"requests": [request], "size": 8, "split_type": MPI.COMM_TYPE_SHARED}
    arrays = {"sendbuf": x, "recvbuf": y, "buf": x, "inbuf": x, "inoutbuf": y}
    arrays |= {"origin": one, "result": one, "compare": one}
    wrong = WRONG | {name: buffers(array) for name, array in arrays.items()}
    types = [1] * comm.size, [0] * comm.size, [MPI.INT] * comm.size
    of_types = {name: [array, *types] for name, array in arrays.items()}
    calls, faults = 0, []
    for owner in (comm, grid, win, message, request, prepared, MPI.SUM):
        for name, parameters in methods(type(owner)):
            typed = name.lower().partition("_")[0].endswith("alltoallw")
            all_right = right | (of_types if typed else arrays)
            fine = {each: all_right[each] for each in parameters if each in all_right}
            read = parameters - MPI4PYS
            assert read <= wrong.keys(), f"{name}: add wrong arguments of {read}"
            for parameter in read:
                for given in wrong[parameter]:
                    found = fault(owner, name, {**fine, parameter: given}, given)
                    faults += [f"{name}, {parameter}: {found}"] if found else []
                    calls += 1
    assert not faults, "\n".join(faults[:20])
    assert calls > 3000
    message.Recv(y)
    prepared.Start()
    MPI.Request.Waitall([request, prepared])
    comm.Allreduce(MPI.IN_PLACE, x)
    assert x.copy_to_host().tolist() == (np.arange(24) * comm.size).tolist()
    assert y.copy_to_host().tolist() == np.arange(24).tolist()
    assert not comm.Iprobe()
    win.Unlock_all()
    win.Free()
    grid.Free()


def fault(owner, name, arguments, given):
    """Return what is wrong with a refusal: it names call, argument and remedy."""
    try:
        getattr(owner, name)(**arguments)
    except MPI.Exception as error:
        text = str(error)
    except BaseException as error:
        return f"{shown(given)}: {error!r} is foreign"
    else:
        return f"{shown(given)} is accepted"
    call = text.partition(":")[0].rpartition(".")[2].lower().removeprefix("i")
    own = name.lower().removeprefix("i")
    named = call and (call in own or own in call) and "; " in text
    return "" if named and any(each in text for each in pieces(given)) else text


def pieces(given):
    """Yield how an error may show an argument or its wrong part."""
    if on_device(given):
        yield from ("strided", "got an array", "element, got")
        return
    if isinstance(given, list | tuple):
        yield f"got {len(given)}"
        for each in given:
            yield from pieces(each)
    elif isinstance(given, float | np.integer) and np.isfinite(given):
        yield f"{int(given)}"
    yield shown(given)


@pytest.mark.parametrize("kind", [float, np.float32, np.int64, np.array, np.bool_])
def test_ranks_roots_and_tags_of_other_types(comm, kind):
    """As in mpi4py, whose conversion is that of ``int``."""
    last, size = min(comm.size - 1, 1), comm.size
    for on in (np.array, cuda.to_device):
        x, y = on(np.array([comm.rank])), on(np.array([-1]))
        requests = [comm.Irecv(y, kind(last), kind(1))] if comm.rank == 0 else []
        if comm.rank == last:
            comm.Send(x, kind(0), tag=kind(1))
        MPI.Request.Waitall(requests)
        comm.Bcast(y, kind(0))
        assert y[0] == last
        comm.Reduce(x, y, root=kind(last))
        assert y[0] == (sum(range(size)) if comm.rank == last else last)
    win = MPI.Win.Allocate_device(8, kind(1) if comm.rank else 4, comm=comm)
    win.Fence()
    win.Accumulate(cuda.to_device(np.ones(1, "i4")), kind(0), 1)
    win.Fence()
    assert win.array.copy_to_host().view("i4")[1] == (0 if comm.rank else size)
    win.Free()
