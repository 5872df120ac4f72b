"""Ranks played by threads, for tests without MPI."""

import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

LEFT = object()
"""The value of a rank that has returned or raised, for ranks that still wait."""


class RankLeft(Exception):
    """A rank waits in a collective that another rank does not call."""


class ThreadComm:
    """What the library asks of a communicator, between threads of one process."""

    def __init__(self, rank: int, boxes: list[list[queue.Queue]], timeout: float):
        self.rank = rank
        self.size = len(boxes)
        self._boxes = boxes  # boxes[dst][src]
        self._timeout = timeout

    def allgather(self, obj: object) -> list[Any]:
        packed = pickle.dumps(obj)  # ranks share no objects
        for box in self._boxes:
            box[self.rank].put(packed)
        return [self._take(src) for src in range(self.size)]

    def barrier(self) -> None:
        self.allgather(None)

    def leave(self) -> None:
        for box in self._boxes:
            box[self.rank].put(LEFT)

    def _take(self, src: int) -> Any:
        try:
            packed = self._boxes[self.rank][src].get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(f"rank {self.rank} waited for rank {src}") from None
        if packed is LEFT:
            raise RankLeft(f"rank {self.rank} waits for rank {src}, which has left")
        return pickle.loads(packed)


def outcomes(
    n: int, fn: Callable[[ThreadComm], Any], timeout: float = 300
) -> list[Any]:
    """Run ``fn(comm)`` on ``n`` ranks; return each one's result or exception."""
    boxes = [[queue.Queue() for _ in range(n)] for _ in range(n)]
    results: list[Any] = [TimeoutError(f"not done in {timeout} s") for _ in range(n)]

    def play(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = fn(comm)
        except BaseException as error:
            results[comm.rank] = error
        finally:
            comm.leave()

    ranks = [
        threading.Thread(target=play, args=[ThreadComm(r, boxes, timeout)], daemon=True)
        for r in range(n)
    ]
    deadline = time.monotonic() + timeout
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    return results


def run_ranks(n: int, fn: Callable[[ThreadComm], Any], timeout: float = 300) -> list:
    """Run ``fn(comm)`` on ``n`` ranks; return the results or raise all errors."""
    results = outcomes(n, fn, timeout)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {n} ranks failed", errors)
    return results
