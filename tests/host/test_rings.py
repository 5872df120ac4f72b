"""Rings of envelopes: order, full rings, numbers that wrap around, two processes."""

import ctypes
import mmap
import os
import random
import threading
import time

import pytest

from numba_symm.mpi.rooms import (
    ARRIVED,
    ENTRIES,
    FIELDS,
    NOTHING,
    THERE,
    Port,
    Ring,
    compiled,
)

TAKE, WAIT = compiled("take"), compiled("wait")
WRITERS = 3
NBYTES = 64 + WRITERS * ctypes.sizeof(Ring)


class Shared:
    """A word and the rings of several writers, in memory of all processes."""

    def __init__(self):
        self._memory = mmap.mmap(-1, NBYTES)
        self.words = (ctypes.c_int64 * (NBYTES // 8)).from_buffer(self._memory)
        self.word = ctypes.addressof(self.words)
        self.rings = [
            Ring.from_buffer(self._memory, 64 + writer * ctypes.sizeof(Ring))
            for writer in range(WRITERS)
        ]
        self.port = Port(rings=self.word + 64, writers=WRITERS)
        self.port.stride = ctypes.sizeof(Ring)
        self.at = ctypes.addressof(self.port)

    def publish(self, writer, *fields):
        """Do as ``send``: store the fields, and then the number."""
        ring = self.rings[writer]
        if ring.sent - ring.taken >= ENTRIES:
            return False
        number = ring.sent + 1
        place = number % ENTRIES * (FIELDS + 1)
        ring.entries[place + 1 : place + 1 + FIELDS] = fields
        ring.sent = ring.entries[place] = number
        return True

    def take(self):
        """Return all envelopes, by writer."""
        found = []
        for ring in self.rings:
            while TAKE(self.at, ctypes.addressof(ring)):
                assert self.port.held
                found.append(tuple(self.port.envelope))
        return found

    def wait(self, value, looks):
        return WAIT(self.at, self.word, value, looks)


@pytest.fixture
def shared():
    return Shared()


def fields(number, writer=0):
    """Return numbers of all sizes that tell of which envelope they are."""
    rest = number * (1 << 40) + writer, number ^ 0x5555, 7 * number, writer, number % 7
    return number, *rest, (1 << 62) - number


def test_envelopes_are_taken_in_order_and_once(shared):
    assert shared.take() == []
    for writer in (2, 0, 1):
        for number in range(3):
            assert shared.publish(writer, *fields(number, writer))
    wanted = [fields(n, writer) for writer in range(WRITERS) for n in range(3)]
    assert shared.take() == wanted
    assert shared.take() == []


def test_numbers_of_entries_wrap_around(shared):
    sent = 0
    for number in (ENTRIES - 3, ENTRIES, 1, ENTRIES):
        for _ in range(number):
            assert shared.publish(1, *fields(sent))
            sent += 1
        full = number == ENTRIES
        assert shared.publish(1, *fields(sent)) == (not full)
        sent += not full
        assert shared.take() == [
            fields(n) for n in range(sent - number - 1 + full, sent)
        ]


def test_waits_find_a_word_first_and_then_an_envelope(shared):
    assert shared.wait(5, 10) == NOTHING
    shared.publish(0, *fields(1))
    assert shared.wait(5, 10) == ARRIVED
    shared.words[0] = 5
    assert shared.wait(5, 10) == THERE
    assert shared.wait(4, 10) == THERE  # a later message has used the word
    assert shared.wait(6, 10) == ARRIVED
    shared.take()
    assert shared.wait(6, 10) == NOTHING


def test_a_wait_lets_other_threads_run(shared):
    """They may be what stores the word."""

    def store():
        time.sleep(0.05)
        shared.words[0] = 5

    thread = threading.Thread(target=store)
    thread.start()
    end = time.monotonic() + 100
    while shared.wait(5, 1 << 20) != THERE:
        assert time.monotonic() < end
    thread.join()


def write(shared, writer, number):
    """Publish so many envelopes, in bursts."""
    draw = random.Random(writer)
    for each in range(number):
        while not shared.publish(writer, *fields(each, writer)):
            os.sched_yield()
        if draw.random() < 0.001:
            time.sleep(1e-4)


def read(shared, writers, number):
    """Check that the envelopes of each writer come in order, and whole."""
    next_one = dict.fromkeys(writers, 0)
    end = time.monotonic() + 60
    while any(each < number for each in next_one.values()):
        found = shared.take()
        if not found:
            assert time.monotonic() < end, next_one
            shared.wait(1, 1000)
            os.sched_yield()
        for envelope in found:
            writer = envelope[4]
            assert envelope == fields(next_one[writer], writer)
            next_one[writer] += 1
    assert not shared.take()


def test_processes_write_and_one_reads(shared):
    number, children = 20_000, []
    for writer in (0, 2):
        child = os.fork()
        if child == 0:
            try:
                write(shared, writer, number)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    read(shared, (0, 2), number)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
