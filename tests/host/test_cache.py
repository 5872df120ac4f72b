"""The cache of packed launches."""

from numba_symm.collectives.invocation import UNKNOWN, Cache


def test_used_values_stay_and_unused_ones_are_evicted():
    cache = Cache(10)
    cache.put("used", 0)
    cache.put("unused", None)
    for number in range(100):
        cache.put(number, number)
        assert cache.get("used") == 0
        assert len(cache.young) + len(cache._old) <= 21
    assert cache.get("unused") is UNKNOWN
    assert [cache.get(number) for number in range(91, 100)] == list(range(91, 100))


def test_none_is_a_value_and_clear_removes_all():
    cache = Cache(2)
    for number in range(4):
        cache.put(number, None)
        assert cache.get(number) is None
    cache.clear()
    assert not cache.young
    assert not cache._old
    assert cache.get(3) is UNKNOWN
