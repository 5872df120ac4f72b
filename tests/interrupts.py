"""Signals that come at any moment of a call, such as Ctrl-C, and raise."""

import signal
import time
from collections.abc import Callable


class Interrupt(BaseException):
    """What the signal's handler raises."""


def interrupted(
    call: Callable[[], object],
    check: Callable[[], object],
    turns: int,
) -> int:
    """Call ``call`` again and again, each time with a signal; return how many hit it.

    In the main thread only.

    Args:
        call: what is interrupted.
        check: called after it, without signals.
        turns: how often; the signals come from its start to its end.
    """
    times = []
    for _ in range(20):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
        check()
    span = 1.5 * min(times)
    armed = False

    def handler(number, frame):
        if armed:
            raise Interrupt

    hits = 0
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for turn in range(turns):
            try:
                armed = True
                delay = 1e-6 + span * turn / turns
                signal.setitimer(signal.ITIMER_REAL, delay)
                call()
                armed = False
            except Interrupt:
                armed = False
                hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            check()
    finally:
        signal.signal(signal.SIGALRM, before)
    return hits
