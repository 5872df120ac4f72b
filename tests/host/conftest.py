"""Fixtures of several files."""

import pytest

from numba_symm import code_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Use an empty cache here and in other processes; return its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(code_cache, "_warned", False)
    code_cache._files.cache_clear()
    yield code_cache.folder()
    code_cache._files.cache_clear()
