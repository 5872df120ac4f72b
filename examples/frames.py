"""Share frames: one process draws them on the GPU, two other processes read them.

    python examples/frames.py

The producer sends handles, not pixels. ``share`` returns a handle for each frame.
``open_shared`` maps the frame's memory in a consumer and orders the consumer's kernel
after the producer's. The memory of a frame is freed when both consumers have closed it,
although the producer has dropped its own reference before.

No frame is copied. Only in Numba's simulator, without a GPU, ``share`` copies each
frame into shared memory.
"""

import multiprocessing
import os
import queue
import sys
import time

import numpy as np
from numba import config, cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED
from numba_symm.launch.devices import visible_gpus

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # the frames are small on purpose

FRAMES = 24
ROWS, COLUMNS = 32, 48
THREADS = 32  # one for each row
IN_FLIGHT = 4  # the most frames that wait for a consumer
BRIGHT = 128
DEADLINE = 120  # seconds


@cuda.jit
def draw(frame, number):
    """Draw stripes that move from one frame to the next."""
    row = cuda.grid(1)
    if row < frame.shape[0]:
        for column in range(frame.shape[1]):
            frame[row, column] = (7 * row + 3 * column + 11 * number) % 256


@cuda.jit
def add_up(frame, sums):
    """Add up the brightness of each row."""
    row = cuda.grid(1)
    if row < frame.shape[0]:
        total = 0
        for column in range(frame.shape[1]):
            total += frame[row, column]
        sums[row] = total


@cuda.jit
def count_bright(frame, counts):
    """Count the bright pixels of each row."""
    row = cuda.grid(1)
    if row < frame.shape[0]:
        found = 0
        for column in range(frame.shape[1]):
            if frame[row, column] >= BRIGHT:
                found += 1
        counts[row] = found


READERS = {"brightness": add_up, "bright pixels": count_bright}


def expected(reader, number):
    """Return a reader's result for a frame, computed by NumPy."""
    row, column = np.mgrid[:ROWS, :COLUMNS]
    frame = (7 * row + 3 * column + 11 * number) % 256
    return int((frame if reader == "brightness" else frame >= BRIGHT).sum())


def produce(feeds, facts):
    """Draw frames and send their handles to every feed; wait until all are read."""
    stream = ns.Stream()
    most = 0
    for number in range(FRAMES):
        frame = cuda.device_array((ROWS, COLUMNS), np.int32)
        draw[1, THREADS, stream.core](frame, number)
        handle = ns.share(frame, opens=len(feeds), stream=stream)
        for feed in feeds:
            feed.put(handle)  # blocks while IN_FLIGHT frames wait for the consumer
        most = max(most, ns.sharing.stats().counters)
    for feed in feeds:
        feed.put(None)
    del frame
    while ns.sharing.stats().counters:  # the memory is freed when the process ends
        time.sleep(0.001)
        ns.sharing.collect()
    facts.put(("producer", most))


def consume(reader, feed, facts):
    """Read every frame of a feed and send the results."""
    stream = ns.Stream()
    found = []
    while (handle := feed.get(timeout=DEADLINE)) is not None:
        frame = ns.open_shared(handle, stream=stream)
        result = cuda.device_array(ROWS, np.int64)
        READERS[reader][1, THREADS, stream.core](frame, result)
        frame.close()  # after the kernel; `del frame` does the same
        found.append(int(result.copy_to_host().sum()))
    facts.put((reader, found))


def main():
    """Run one producer and two consumers; return the exit code."""
    simulate = SIMULATED or not visible_gpus()
    if simulate:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # the new processes inherit it
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    facts = context.Queue()
    feeds = [context.Queue(IN_FLIGHT) for _ in READERS]
    processes = [context.Process(target=produce, args=(feeds, facts))]
    for reader, feed in zip(READERS, feeds, strict=True):
        processes.append(context.Process(target=consume, args=(reader, feed, facts)))
    for process in processes:
        process.start()
    try:
        found = dict(facts.get(timeout=DEADLINE) for _ in processes)
        for process in processes:
            process.join(DEADLINE)
    except queue.Empty:
        found = {}
    finally:
        for process in processes:
            process.kill()
    return show(found, simulate)


def show(found, simulated):
    """Print the results; return 0 if all are right, otherwise 1."""
    good = True
    for reader in READERS:
        wanted = [expected(reader, number) for number in range(FRAMES)]
        right = found.get(reader) == wanted
        print(f"{reader}: {FRAMES} frames {'read right' if right else 'NOT right'}")
        good = good and right
    most = found.get("producer")
    print(f"most frames in memory: {most} of {FRAMES}")
    good = good and most is not None and most < FRAMES
    if simulated:
        print("This ran in Numba's CUDA simulator, without a GPU.")
    print("All good." if good else "Something is wrong.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
