"""The protocols under thousands of interleavings and a weak memory.

Each protocol has negative controls in ``test_broken_*.py``: variants of the code with
one fault, which the same search must find. Without the report of races, a fault must
have a consequence: wrong or unwritten words, or ranks that wait indefinitely.
"""

import pytest

from explore.scenarios import (
    all_reduces,
    all_reduces_at_the_wrap,
    calls_at_the_wrap,
    calls_of,
    calls_on_own_arrays,
    each_transport,
    exchanges_between_barriers,
    holds,
    mailed_calls,
    messages,
    messages_with_gaps,
    plain_stores_between_barriers,
    requests,
    words_by_signals,
    words_by_signals_of_the_host,
    worlds,
)
from explore.source import device_code
from explore.world import ALGORITHMS, World

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@worlds
@each_algorithm
def test_calls_of_one_algorithm(algorithm, ranks):
    holds(all_reduces(device_code(), algorithm), ranks, 200)


@worlds
@each_algorithm
def test_calls_as_the_epochs_wrap_around(algorithm, ranks):
    holds(all_reduces_at_the_wrap(device_code(), algorithm), ranks, 60)


@worlds
def test_calls_of_all_algorithms_mixed(ranks):
    holds(all_reduces(device_code(), *ALGORITHMS), ranks, 200)


@worlds
def test_reductions_to_any_root(ranks):
    holds(calls_of(device_code(), "reduce"), ranks, 300)


@worlds
def test_exchanges(ranks):
    holds(calls_of(device_code(), "gather", "scan"), ranks, 150)


@worlds
@each_transport
def test_calls_in_which_few_threads_exchange(transport, ranks):
    holds(mailed_calls(device_code(), transport), ranks, 100)


@worlds
def test_calls_on_shared_slots(ranks):
    names = "reduce", "scan", "gather", "broadcast", "chunked"
    holds(calls_of(device_code(), *names), ranks, 300)


@worlds
def test_calls_on_shared_slots_as_the_epochs_wrap_around(ranks):
    names = "reduce", "scan", "gather", "broadcast", "chunked"
    holds(calls_at_the_wrap(device_code(), *names), ranks, 60)


@worlds
def test_broadcasts(ranks):
    holds(calls_of(device_code(), "broadcast"), ranks, 300)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_on_the_ranks_own_arrays(ranks):
    holds(calls_on_own_arrays(device_code()), ranks, 600 // ranks)


def test_calls_on_the_ranks_own_arrays_as_the_epochs_wrap_around():
    for epochs in range(2**32 - 4, 2**32):
        holds(calls_on_own_arrays(device_code(), epochs), 3, 20)
        holds(calls_on_own_arrays(device_code(), epochs), 2, 10)
    holds(calls_on_own_arrays(device_code(), 2**31, 2**31 - 1), 3, 60)


@worlds
def test_messages_between_any_ranks(ranks):
    holds(messages(device_code()), ranks, 300)


@worlds
def test_requests_between_any_ranks(ranks):
    holds(requests(device_code()), ranks, 100)


@worlds
def test_messages_between_arrays_with_gaps(ranks):
    holds(messages_with_gaps(device_code()), ranks, 60)


@worlds
def test_the_barrier_on_a_stream(ranks):
    holds(plain_stores_between_barriers(device_code()), ranks, 300)


@worlds
def test_the_barrier_in_a_kernel(ranks):
    holds(exchanges_between_barriers(device_code()), ranks, 300)


@worlds
def test_signals(ranks):
    holds(words_by_signals(device_code()), ranks, 300)


@worlds
def test_signals_of_the_host(ranks):
    holds(words_by_signals_of_the_host(device_code()), ranks, 300)


@worlds
def test_the_barrier_of_symmetric_memory(ranks):
    scenario = plain_stores_between_barriers(device_code(), World.pad_barrier)
    holds(scenario, ranks, 300)
