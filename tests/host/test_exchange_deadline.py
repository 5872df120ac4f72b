"""The deadline of exchanges between islands: when one begins, ends and is late."""

import pytest

from numba_symm.engines.deadline import Deadline, TimedExchange
from numba_symm.launch.waiting import Wait

STREAM, SIDE = 77, 88


@pytest.fixture
def watched(gpu, clock):
    return Deadline(lambda what: Wait(what, 0, 2))


def late(watched):
    """Return the exchange in which the GPU is if it has lasted too long."""
    found = watched.look()
    return found[0] if found and found[1].late else None


def test_the_deadline_counts_from_the_first_look_in_an_exchange(watched, clock):
    exchange = TimedExchange("broadcast", (1, 2))
    assert late(watched) is None
    clock.now += 9
    watched.begin(exchange, STREAM, False)
    for _ in range(3):
        assert late(watched) is None
        clock.now += 0.9
    assert late(watched) == exchange
    assert watched.look()[1].what == "broadcast"
    watched.end(STREAM, False)
    clock.now += 9
    assert late(watched) is watched.running is None


def test_the_deadline_begins_anew_with_every_exchange(watched, clock):
    """Replays of a graph may begin and end exchanges between two looks."""
    exchange = TimedExchange("broadcast", (1,))
    for _ in range(5):
        watched.begin(exchange, STREAM, False)
        assert late(watched) is None
        clock.now += 1.5
        watched.end(STREAM, False)


def test_a_look_after_an_exchange_does_not_count_for_the_next(watched, clock):
    watched.begin(TimedExchange("broadcast", (1,)), STREAM, False)
    watched.end(STREAM, False)
    watched._state[1] = 1  # by a look that had seen the exchange
    clock.now += 9
    watched.begin(TimedExchange("reduce", (1,)), STREAM, False)
    assert late(watched) is None


def test_a_timeout_of_0_is_indefinite(gpu, clock):
    watched = Deadline(lambda what: Wait(what, 0))
    watched.begin(TimedExchange("broadcast", (1,)), STREAM, False)
    late(watched)
    clock.now += 1e6
    assert late(watched) is None


def test_exchanges_that_follow_each_other_in_a_capture(watched, gpu):
    """One mark ends an exchange and begins the next one."""
    exchanges = [
        TimedExchange(name, (1,)) for name in ("reduce", "broadcast", "reduce")
    ]

    def captured(stream, *each):
        for exchange in each:
            watched.begin(exchange, stream, True)
            gpu.add(stream, exchange.operation)
            watched.end(stream, True)

    gpu.captured = {STREAM: 7, SIDE: 8}
    captured(STREAM, *exchanges)
    wanted = [1, "reduce", 2, "broadcast", 1, "reduce", 0]
    assert gpu.nodes == wanted
    gpu.places[SIDE] = gpu.places[STREAM]  # in another graph
    captured(SIDE, exchanges[1])
    assert gpu.nodes == (wanted := [*wanted, 2, "broadcast", 0])
    gpu.add(SIDE, "a kernel")
    captured(SIDE, exchanges[1])
    assert gpu.nodes == (wanted := [*wanted, "a kernel", 2, "broadcast", 0])
    gpu.places[SIDE] |= {4}  # it waits for another stream, too
    captured(SIDE, exchanges[1])
    assert gpu.nodes == [*wanted, 2, "broadcast", 0]


def test_equal_exchanges_share_a_number(watched, gpu):
    for peer in (1, 2, 1):
        watched.begin(TimedExchange("a message", (peer,)), STREAM, False)
        assert watched.running == TimedExchange("a message", (peer,))
    assert [value for _, value in gpu.stored] == [1, 2, 1]
