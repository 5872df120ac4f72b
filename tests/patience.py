"""Deadlines of what only hangs if there is a fault."""

import os


def patient(seconds):
    """Return ``seconds``, or more if this machine's processors have much to do.

    For deadlines that are not what a test is about.
    """
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)) / 2)
