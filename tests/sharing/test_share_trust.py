"""Handles that were altered, consumers that are stopped or write where they should not.

Every error is this library's, and nothing is taken, given back or read by mistake.
"""

import dataclasses
import hashlib
import json
import pickle
import random

import ml_dtypes
import numpy as np
import pytest

import numba_symm as ns
from numba_symm.sharing import counters
from numba_symm.sharing.broker import Address
from numba_symm.sharing.layout import _MAGIC, ArrayLayout, SharedHandle
from numba_symm.sharing.sent import producer
from tests.sharing.work import are, nothing_is_shared, numbers
from tests.spawned import run_ranks

SIZE = 100
OPENS = 1000
FUZZ = 3000

# Handles


def a_handle(dtype="<f4", shape=(3, 5), strides=(20, 4), offset=64):
    return SharedHandle(
        producer=Address(b"\0numba_symm-" + b"0f" * 16, bytes(range(16))),
        file=1,
        slot=2,
        serial=3,
        kind="ipc",
        base=1 << 47,
        base_nbytes=4096,
        base_handle=bytes(range(64)),
        pool=0,
        start=32,
        nbytes=2000,
        layout=ArrayLayout(offset, shape, strides, np.dtype(dtype)),
        event=bytes(64),
        event_sync_required=True,
        device="GPU-1",
    )


STRUCTURED = {
    "plain": [
        ("a", "<i4"),
        ("b", "<f8", (2, 3)),
        ("c", [("d", "S3"), ("e", "<M8[ns]")]),
    ],
    "padded": {"names": ["a", "b"], "formats": ["<i2", "<f8"], "offsets": [0, 16]},
    "overlapping": {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]},
    "aligned": np.dtype([("a", "i1"), ("b", "f8")], align=True),
}
DTYPES = {
    **{name: name for name in ("?", "i1", "<u8", ">f4", "c16", "S5", "U2", "V7")},
    **{name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn")},
    **STRUCTURED,
}


@pytest.mark.parametrize("name", DTYPES)
def test_handles_travel_as_bytes_and_as_pickles(name):
    dtype = np.dtype(DTYPES[name])
    for shape, strides in (
        ((), ()),
        ((2, 0), (0, 9)),
        ((4,), (-40,)),
        ((2, 2), (0, 8)),
    ):
        handle = a_handle(dtype, shape, strides, 500)
        for again in (
            SharedHandle.from_bytes(handle.to_bytes()),
            SharedHandle.from_bytes(memoryview(bytearray(handle.to_bytes()))),
            pickle.loads(pickle.dumps(handle)),
        ):
            assert again == handle
            assert again.dtype == dtype
            assert again.digest == handle.digest


def test_bytes_that_were_damaged_are_refused():
    whole = a_handle().to_bytes()
    chance = random.Random(1)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(whole))] ^= chance.randint(1, 255)
        damaged = damaged[: chance.choice([len(whole), chance.randrange(len(whole))])]
        if damaged != whole:
            with pytest.raises(ns.ArgumentError, match="damaged"):
                SharedHandle.from_bytes(damaged)
    for other in (b"", b"x", _MAGIC, None, "text", 5, [1], bytearray):
        with pytest.raises(ns.ArgumentError, match=r"SharedHandle\.from_bytes: "):
            SharedHandle.from_bytes(other)


class Rude:
    """Raises whatever one does with it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __repr__ = __eq__ = __hash__ = __index__ = __len__ = __iter__ = __getattr__


ODD = [
    *(None, True, -1, 0, 1, 2, 7, 4096, 10_000, 1 << 31, 1 << 63, 1 << 64, 10**5000),
    *(1.5, float("nan"), 1j, "", "x", "ipc", "host", "none", "GPU-2", b"", b"x"),
    *(
        bytes(64),
        bytes(65),
        (),
        (1,),
        [1],
        {},
        {"a": 1},
        set(),
        Rude(),
        Rude,
        np.int64(5),
    ),
    *(Address(b"\0numba_symm-x", bytes(16)), Address("x", None), Address(Rude(), b"")),
    Address(b"\0numba_symm-" + b"00" * 16, bytes(16)),
]
ODD_PARTS = [
    *(
        None,
        Rude(),
        "O",
        "f4",
        np.dtype("O"),
        np.dtype("f8"),
        np.dtype("u1"),
        np.float32,
    ),
    *(np.dtype("V0"), np.dtype("S0"), np.dtype(("f4", (2,))), np.dtype([("a", "O")])),
    *(-4, 0, 1, 3, 4, 8, 64, 4096, 1 << 62, 1 << 64, 10**5000, True, 1.0),
    *((), (0,), (1,), (-1,), (3,), (4, 4), (1 << 62, 1 << 62), (1,) * 65, [1], (1.0,)),
    *((-8,), (1 << 63,), (0, 0), ("x",), (True,), (np.int64(3),)),
]


def altered(handle, others, chance):
    """Return a handle with something changed, or raise ArgumentError."""
    kind = chance.randrange(4)
    if kind == 0:  # a part of the layout
        names = [each.name for each in dataclasses.fields(ArrayLayout)]
        changes = {chance.choice(names): chance.choice(ODD_PARTS) for _ in range(2)}
        layout = dataclasses.replace(handle.layout, **changes)
        return dataclasses.replace(handle, layout=layout)
    names = [each.name for each in dataclasses.fields(SharedHandle)]
    if kind == 1:  # something odd
        return dataclasses.replace(handle, **{chance.choice(names): chance.choice(ODD)})
    if kind == 2:  # fields of another handle
        other = chance.choice(others)
        some = chance.sample(names, chance.randint(1, 4))
        changes = {name: getattr(other, name) for name in some}
        return dataclasses.replace(handle, **changes)
    fields = json.loads(handle.to_bytes()[len(_MAGIC) + counters.DIGEST_BYTES :])
    where, last = fields, chance.choice(list(fields))
    while isinstance(where[last], list) and where[last] and chance.random() < 0.8:
        where, last = where[last], chance.randrange(len(where[last]))
    value = where[last]
    near = [-1, 0, 1, 8, "O", "|V0", "x", None, [], {}, ["f4", [2]], {"names": ["a"]}]
    if type(value) is int:
        near += [value + 1, value - 1, -value, value * 2, value + 4096]
    where[last] = chance.choice(near)
    text = json.dumps(fields).encode()
    digest = hashlib.blake2b(text, digest_size=counters.DIGEST_BYTES).digest()
    return SharedHandle.from_bytes(_MAGIC + digest + text)


def opens_altered_handles(comm, where):
    """Open altered handles, in the producer or elsewhere; return the failures."""
    shared = [numbers(SIZE, 1000 * i) for i in range(3)] if comm.rank == 0 else []
    handles = comm.allgather([ns.share(x, opens=OPENS) for x in shared])[0]
    digests = [handle.digest for handle in handles]
    wrong, opened, raised = [], [0, 0, 0], set()
    chance = random.Random(comm.rank)
    for turn in range(FUZZ if where == comm.rank else 0):
        try:
            found = altered(handles[turn % 3], handles, chance)
            if found in handles:
                continue
            if found.digest not in digests and chance.random() < 0.3:
                if found.cancel() != 0:
                    wrong.append(f"cancelled {found}")
                continue
            y = ns.open_shared(found)
            # Another view of what was shared is allowed, anything else is refused.
            low, high = found.layout.extent
            start = found.layout.offset - found.start
            if (
                found.digest in digests
                and start + low >= 0
                and start + high <= 4 * SIZE
            ):
                opened[digests.index(found.digest)] += 1
            else:
                wrong.append(f"opened {found}")
            y.close()
        except ns.SymmError as error:
            raised.add(type(error).__name__)
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")
    opened = np.sum(comm.allgather(opened), axis=0)
    unharmed = True
    if comm.rank == 0:
        entries = sorted(producer.sent.values(), key=lambda sent: sent.offset)
        values = [sent.counter_value() for sent in entries]
        unharmed = values == [OPENS - count for count in opened]
        unharmed = unharmed and [s.file.unopened(s.offset) for s in entries] == values
        unharmed = unharmed and all(
            are(x, SIZE, 1000 * i) for i, x in enumerate(shared)
        )
        for handle in handles:
            handle.cancel()
        del entries
    comm.barrier()
    return wrong[:5], sorted(raised), unharmed, nothing_is_shared()


@pytest.mark.parametrize("where", [0, 1], ids=["producer", "consumer"])
def test_altered_handles_raise_this_librarys_errors_and_change_nothing(where):
    facts = run_ranks(2, opens_altered_handles, where)
    for wrong, _, unharmed, clean in facts:
        assert not wrong
        assert unharmed
        assert clean
    assert facts[where][1] == ["ArgumentError", "ClosedError"]
