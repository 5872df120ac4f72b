"""Signals whose handlers raise, such as of Ctrl-C, at any moment of a call."""

import signal
import time
from collections.abc import Callable

CALLBACKS = "weakrefset.py", "weakref.py", "gpu/compiled.py"
"""Files with functions that C calls: when Python drops objects, and in the simulator.

They report no exception to C, and those of the simulator are one call on a GPU.
"""


class Interrupt(BaseException):
    """The exception that the signal's handler raises."""


def interrupted(
    call: Callable[[], object],
    check: Callable[[], object],
    turns: int,
) -> int:
    """Call ``call`` repeatedly, each time with a signal; return how many hit it.

    In the main thread only.

    Args:
        call: the call that is interrupted.
        check: called after each call, without signals.
        turns: the number of calls; the signals are spread over their duration.
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
        while frame is not None:
            if frame.f_code.co_filename.endswith(CALLBACKS):  # Python only reports it
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                return
            frame = frame.f_back
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
