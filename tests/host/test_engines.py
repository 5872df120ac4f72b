"""The choice of the engine, and its trial, without ranks."""

import contextlib
import types

import pytest

import numba_symm as ns
from numba_symm import engines
from numba_symm.engines.nccl import CURE, Installation
from numba_symm.gpu import streams

OLD, NEW = Installation("NCCL 2.21.5", ""), Installation("NCCL 2.28.9", "")
NONE = Installation("", f"nccl4py cannot be imported: {CURE}")


@pytest.mark.parametrize(
    ("asked", "founds", "shared", "wanted"),
    [
        (None, [NEW, NEW], False, True),
        (None, [NEW, NEW], True, False),
        ("nccl", [NEW, NEW], True, True),
        (None, [NONE, NONE], False, False),
        (None, [NEW, NONE, NEW], False, "ranks 0, 2 have NCCL 2.28.9, rank 1 has no"),
        (None, [NEW, OLD], False, "has NCCL 2.21.5; install the same version every"),
        ("nccl", [OLD, NEW], False, "of one version, because of NUMBA_SYMM_ENGINE=n"),
        ("nccl", [NONE, NONE], False, "pip install nccl4py nvidia-nccl"),
    ],
)
def test_the_engine_is_what_all_ranks_have(asked, founds, shared, wanted):
    if isinstance(wanted, bool):
        assert engines.uses_nccl(asked, founds, shared) == wanted
        return
    with pytest.raises(ns.BackendError) as error:
        engines.uses_nccl(asked, founds, shared)
    assert wanted in str(error.value)


def trial(monkeypatch, exchange, parts=((0,), (1,))):
    """Let rank 0 try an engine; return what it freed and kept."""
    monkeypatch.setattr(streams, "synchronize", lambda stream: None)
    freed, kept = [], []
    peer = parts[1][0]
    backend = types.SimpleNamespace(
        allocate=lambda nbytes: types.SimpleNamespace(address=800),
        write=lambda address, data: None,
        read=lambda address, nbytes: engines._pattern(peer),
        free=freed.append,
    )
    joined = types.SimpleNamespace(
        **{"backend": backend, "parts": parts, "index": 0, "local": 0},
        exchange=types.SimpleNamespace(rank=0, agreed=contextlib.nullcontext),
        look=lambda: None,
    )
    engine = types.SimpleNamespace(
        name="nccl",
        exchange=exchange,
        keep=kept.append,
    )
    with contextlib.suppress(ns.CollectiveTimeout):
        engines.prove(joined, engine)
    return freed, kept


@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_that_fails_frees_nothing_that_the_engine_may_use(monkeypatch, fails):
    def exchange(*given):
        if fails:
            raise ns.CollectiveTimeout("rank 1 is late")

    freed, kept = trial(monkeypatch, exchange)
    assert (len(freed), len(kept)) == ((0, 1) if fails else (1, 0))
