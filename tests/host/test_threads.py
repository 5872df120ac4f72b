"""Threads that this process may not start."""

import threading

import pytest

from numba_symm import process
from numba_symm.errors import SymmError


def test_an_error_names_the_limits(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(SymmError, match=r"share: .*can't start .*ulimit -v, ulimit -u"):
        process.start(threading.Thread(), "share")


def test_an_interrupt_within_python_stays_an_interrupt(monkeypatch):
    def interrupted(thread):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.start(threading.Thread(), "share")
