"""A rank of a soak with two faults, which ``test_soak.py`` expects it to find.

In its first round, the last rank takes right results of int32 for wrong ones. In the
second round, all ranks stop within a call.
"""

import dataclasses
import time

import numpy as np

from numba_symm.bench import soak
from numba_symm.bench.bench_operations import OPERATIONS

right = OPERATIONS["all_reduce"]
draw = soak.Client.draw
drawn = []


def shifted(inputs, op, rank):
    (part,) = right.expected(inputs, op, rank)
    wrong = rank == len(inputs) - 1 and part.pattern.dtype == np.int32
    return [dataclasses.replace(part, start=part.start + wrong)]


def hanging(lane):
    drawn.append(lane)
    if len(drawn) > 4:  # the number of lanes
        lane._note("a call without an end")
        time.sleep(1000)
    draw(lane)


if __name__ == "__main__":
    broken = dataclasses.replace(right, expected=shifted)
    soak.OPERATIONS = {right.name: broken}
    soak.Client.draw = hanging
    soak.main()
