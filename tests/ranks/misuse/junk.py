"""Every public call with every argument wrong, one at a time."""

import contextlib
import functools
import inspect
import os

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED


class Awkward:
    """Like an array, cannot be hashed, compared, counted or be true."""

    __hash__ = None

    def _refuse(self, *_):
        raise ValueError("an awkward object")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = _refuse
    __index__ = __iter__ = __getitem__ = _refuse


class Lying:
    """Has attributes of streams, arrays and communicators, all of them wrong."""

    __cuda_stream__ = cuda_stream = ptr = handle = "x"
    __cuda_array_interface__ = "x"
    shape = dtype = size = rank = allgather = barrier = heap = "x"


class Iterates:
    def __iter__(self):
        return iter([1, "x", None])


BYTES = 64  # of an event's handle
JUNK = [
    *(None, True, -1, 0, 1, 2, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30),
    *(0.5, float("nan"), float("inf"), 1j, np.int64(1), np.float32(1)),
    *("", "x", "éé", b"", b"x", bytes(BYTES), "x" * BYTES, bytearray(BYTES)),
    *("S0", "V0", "O", "(2,)f4", "f4,(2", np.dtype("V0"), [("a", "V0")]),
    *((), [], [1], [-1], [1 << 62], [[]], (1,) * 70, (0, 1 << 62, 4), range(3)),
    *({}, {"a": 1}, {1}, object(), object, int, lambda: None, print, NotImplemented),
    *(np.zeros(2), np.zeros(()), np.array([None]), np.array("x"), np.zeros((2, 2))),
    *(MPI.COMM_NULL, MPI.SUM, MPI.PROC_NULL, Awkward(), Lying(), Lying, Iterates()),
]

NEEDS_PEERS = (
    *("send", "recv", "isend", "irecv"),
    "recv_fd",
    "from_ipc_handle",
)
ANYTHING = ("fact", "host", "prefix", "value", "what")  # names, and what is sent


def valid(comm, world):
    """Return a valid argument for each parameter's name."""
    x, y = comm.zeros(8), comm.zeros(8)
    given = dict.fromkeys(["algorithm", "device", "multiprocessors", "stream"])
    given |= dict.fromkeys(["timeout", "color"])
    given |= dict.fromkeys(["blocking", "debug", "interprocess", "timing"], False)
    given |= dict.fromkeys(["dst", "src", "root", "rank", "local_rank", "channel"], 0)
    given |= dict.fromkeys(["key", "ordinal", "priority", "storage_offset"], 0)
    given |= dict.fromkeys(["counts", "recv_counts", "send_counts"], (8,))
    given |= dict.fromkeys(["displs", "recv_displs", "send_displs"], (0,))
    given |= dict.fromkeys(["size", "local_size"], 1)
    given |= {"sources": (0,), "destinations": None, "requests": False}
    given |= {"shape": 8, "dtype": "f4", "op": "sum", "x": x, "array": x, "out": y}
    given |= {"epilogue": abs_of, "args": (1.0,), "row_sum": None}
    given |= {"exchange": ns.StoreExchange(world, "junk"), "fd": 2}
    given |= {"ptr": comm.rendezvous(x).buffer_ptrs[0], "nbytes": 8, "comm": world}
    return given | {"event": recorded(), "end": recorded(), "opens": 1 << 20}


def abs_of(value, other):
    """Return a result of an epilogue."""
    return abs(value) + other


def recorded():
    """Return an event whose work is done."""
    event = ns.Event(timing=True)
    event.record()
    event.synchronize()
    return event


def methods(name, thing, leave=()):
    """Return the public methods of an object."""
    return {
        f"{name}.{member}": getattr(thing, member)
        for member in dir(type(thing))
        if not member.startswith("_")
        and member not in leave
        and callable(getattr(thing, member, None))
    }


def closing(call):
    """Return what makes a call and closes the descriptors that it returns."""

    @functools.wraps(call)
    def closed(**given):
        found = call(**given)
        for fd in found if isinstance(found, list) else [found]:
            if fd is not None:
                os.close(fd)

    return closed


def signalling(memory):
    """Return what signals this rank itself, and takes the signal.

    Otherwise a second signal would wait for a rank that takes the first one.
    """

    def signal(rank, channel, stream):
        with contextlib.suppress(ns.SymmError):  # wait_signal raises it, too
            memory.put_signal(rank, channel, stream)
        memory.wait_signal(rank, channel, stream)

    return signal


def calls(comm, world):
    """Return every public function, class and method that takes an argument."""
    functions = ("Communicator", "Event", "StoreExchange", "Stream", "World", "share")
    functions += ("device_has_multicast_support", "open_shared")
    found = {name: getattr(ns, name) for name in functions}
    found["Event.from_ipc_handle"] = ns.Event.from_ipc_handle
    found["Plan"] = comm.all_reduce_init(comm.zeros(3))
    ending = "close", "abort", "refuse_in_group"
    found |= methods("Communicator", comm, leave=(*ending, "trace"))  # writes files
    memory, signals = comm.rendezvous(comm.zeros(8)), ("put_signal", "wait_signal")
    found |= methods("SymmetricMemory", memory, leave=signals)
    found["SymmetricMemory.put_signal, wait_signal"] = signalling(memory)
    internal = ("allocate", "memory_of", "release", "free")
    found |= methods("SymmetricMemoryAllocator", comm.allocator, leave=internal)
    found |= methods("Event", recorded(), leave=("from_ipc_handle",))
    found |= methods("Stream", ns.Stream())
    channel = ns.IpcChannel(ns.StoreExchange(world, "junk", 1e-6))
    public = methods("IpcChannel", channel, leave=("beside",))
    found |= {n: closing(call) for n, call in public.items()}
    found["IpcChannel"] = ns.IpcChannel
    return {
        name: call for name, call in found.items() if inspect.signature(call).parameters
    }


def misuses(comm, world):
    """Yield every call with each argument replaced by junk, and first without any.

    Yields:
        Its name, a function that makes the call, and whether its arguments are valid.
    """
    good = valid(comm, world)
    handle = ns.share(good["x"], opens=len(JUNK))
    event = ns.Event(interprocess=True)
    idle = cuda.jit("void()")(lambda: None)
    special = {
        "Communicator.prepare": {
            "calls": "all_reduce",
            "dtypes": ["int8"],
            "ops": ["sum"],
        },
        "Communicator.launch_limit": {"kernel": idle, "threads": 32},
        "Communicator.tag": {"text": "a step"},
        "Communicator.device_workspace": {
            "blocks": 1,
            "threads": 4,
            "bytes": 64,
            "depth": 1,
            "team": None,
            "memory": None,
        },
        "Communicator.experts": {
            "experts": comm.size,
            "top_k": 1,
            "hidden": 8,
            "tokens": 4,
            "capacity": 4,
        },
        "Event.from_ipc_handle": {"handle": event.ipc_handle()},
        "SymmetricMemoryAllocator.rendezvous": {"comm": comm},
        "open_shared": {"handle": handle},
        "StoreExchange": {"timeout": 1},
    }
    for name in ("sum", "dot", "norm"):
        one = {"out": good["out"][:1]} | ({"y": good["x"]} if name == "dot" else {})
        special |= {f"Communicator.{name}{form}": one for form in ("", "_init")}
    for name, call in calls(comm, world).items():
        names = inspect.signature(call).parameters
        given = {each: good.get(each) for each in names} | special.get(name, {})
        if name.rpartition(".")[2] not in NEEDS_PEERS:
            yield name, filled(call, given), True
        for each in names:
            for junk in JUNK:
                if each not in ANYTHING and not (each == "stream" and is_handle(junk)):
                    wrong = filled(call, given | {each: junk})
                    yield f"{name}({each}={junk!r:.60})", wrong, False
    for junk in JUNK:
        wrong = functools.partial(comm.allocator.free, junk)
        yield f"SymmetricMemoryAllocator.free(ptr={junk!r:.60})", wrong, False
    handle.cancel()


def filled(call, given):
    """Return what makes a call; of a parameter ``*names`` there is one argument."""
    several = inspect.Parameter.VAR_POSITIONAL
    found = inspect.signature(call).parameters.values()
    first = [given[each.name] for each in found if each.kind is several]
    rest = {each.name: given[each.name] for each in found if each.kind is not several}
    return functools.partial(call, *first, **rest)


def is_handle(junk):
    """Return whether a GPU's driver would take it for a stream's address."""
    return not SIMULATED and isinstance(junk, int) and 0 < junk < 1 << 64
