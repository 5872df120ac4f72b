"""Times of a launch: captured in graphs (device time) and eager (host time too)."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.core import Device, EventOptions

from numba_symm.collectives.communicator import Communicator
from numba_symm.launch.exchange import StoreExchange

CALLS_PER_GRAPH = 50
REPLAYS = 7
EAGER_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, of the slowest rank.

    Attributes:
        graph: median over replays of a graph of many calls.
        spread: largest minus smallest of those.
        issue: host time to enqueue an eager call.
        done: time for an eager call, of many enqueued back to back.
    """

    graph: float
    spread: float
    issue: float
    done: float


def time_plan(
    comm: Communicator, exchange: StoreExchange, plan: Callable[..., Any]
) -> Timing:
    """Time a plan of ``comm``. Collective.

    Args:
        comm: its communicator.
        exchange: the same ranks.
        plan: called with ``stream=``; enqueues one collective.
    """
    stream = Device().create_stream()
    graph = _graph_times(exchange, plan, stream)
    issue, done = _eager_times(exchange, plan, stream)
    comm.synchronize(stream)
    mine = (statistics.median(graph), max(graph) - min(graph), issue, done)
    slowest = np.max(exchange.all_gather(mine, "timings"), axis=0)
    return Timing(*(float(value) for value in slowest))


def _graph_times(exchange: StoreExchange, plan: Any, stream: Any) -> list[float]:
    builder = stream.create_graph_builder()
    builder.begin_building()
    for _ in range(CALLS_PER_GRAPH):
        plan(stream=builder.stream)
    graph = builder.end_building().complete()
    timed = EventOptions(timing_enabled=True)
    graph.launch(stream)  # the first replay uploads the graph
    stream.sync()
    times = []
    for _ in range(REPLAYS):
        exchange.barrier("replay")
        start = stream.record(options=timed)
        graph.launch(stream)
        end = stream.record(options=timed)
        end.sync()
        times.append((end - start) * 1e3 / CALLS_PER_GRAPH)
    return times


def _eager_times(
    exchange: StoreExchange, plan: Any, stream: Any
) -> tuple[float, float]:
    for _ in range(20):
        plan(stream=stream)
    stream.sync()
    exchange.barrier("eager calls")
    start = time.perf_counter()
    for _ in range(EAGER_CALLS):
        plan(stream=stream)
    issued = time.perf_counter()
    stream.sync()
    done = time.perf_counter()
    scale = 1e6 / EAGER_CALLS
    return (issued - start) * scale, (done - start) * scale
