"""Rings of envelopes: order, full rings, numbers that wrap around, two processes."""

import ctypes
import mmap
import os
import random
import threading
import time
from struct import Struct

import pytest

from numba_symm.mpi import rooms
from numba_symm.mpi.rooms import ENTRIES, NOTHING, RINGS, THERE, Port, Ring, compiled

PUBLISH, TAKE, WAIT, SILENCE = map(compiled, ("publish", "take", "wait", "silence"))
ENVELOPE = Struct(f"<{rooms.FIELDS}q")
WRITERS = 3
NBYTES = 64 + WRITERS * ctypes.sizeof(Ring)


class Shared:
    """A bell, a word and the rings of several writers, in memory of all processes."""

    def __init__(self):
        self._memory = mmap.mmap(-1, NBYTES)
        self.words = (ctypes.c_int64 * (NBYTES // 8)).from_buffer(self._memory)
        self.bell = ctypes.addressof(self.words)
        self.word = self.bell + 8
        self.ring = self.bell + 64
        self.port = Port(bell=self.bell, rings=self.ring, writers=WRITERS)
        self.port.stride = ctypes.sizeof(Ring)

    def publish(self, writer, *fields):
        return PUBLISH(self.at(writer), self.bell, *fields)

    def at(self, writer):
        return self.ring + writer * ctypes.sizeof(Ring)

    def take(self, found):
        number = 0
        for writer in range(WRITERS):
            while TAKE(self.at(writer), found):
                number += 1
        SILENCE(ctypes.addressof(self.port))
        return number

    def wait(self, value, looks):
        return WAIT(self.bell, self.word, value, looks)


@pytest.fixture
def shared():
    return Shared()


def fields(number, writer=0):
    """Return numbers of all sizes that tell of which envelope they are."""
    rest = number * (1 << 40) + writer, number ^ 0x5555, 7 * number, writer, number % 7
    return number, *rest, (1 << 62) - number


def unpacked(found):
    return [ENVELOPE.unpack(each) for each in found]


def test_envelopes_are_taken_in_order_and_once(shared):
    found = []
    assert shared.take(found) == 0
    for writer in (2, 0, 1):
        for number in range(3):
            assert shared.publish(writer, *fields(number, writer)) == 1
    assert shared.words[0]
    assert shared.take(found) == 9
    assert shared.words[0] == 0
    wanted = [fields(n, writer) for writer in range(WRITERS) for n in range(3)]
    assert unpacked(found) == wanted
    assert shared.take(found) == 0
    assert len(found) == 9  # they are appended to what the list has


def test_a_full_ring_refuses_envelopes_until_some_are_taken(shared):
    """The numbers of its entries have wrapped around before."""
    found, sent = [], 0
    for number in (ENTRIES - 3, ENTRIES, 1, ENTRIES):
        for _ in range(number):
            assert shared.publish(1, *fields(sent)) == 1
            sent += 1
        if number == ENTRIES:
            for _ in range(2):
                assert shared.publish(1, *fields(sent)) == 0
            assert shared.publish(0, *fields(7)) == 1  # another ring has room
        del found[:]
        full = number == ENTRIES
        assert shared.take(found) == number + full
        mine = unpacked(found)[full:]
        assert mine == [fields(each) for each in range(sent - number, sent)]


def test_waits_find_a_word_first_and_then_the_bell(shared):
    assert shared.wait(5, 10) == NOTHING
    shared.publish(0, *fields(1))
    assert shared.wait(5, 10) == RINGS
    shared.words[1] = 5
    assert shared.wait(5, 10) == THERE
    assert shared.wait(4, 10) == THERE  # a later message has used the word
    assert shared.wait(6, 10) == RINGS
    shared.take([])
    assert shared.wait(6, 10) == NOTHING


def test_a_wait_lets_other_threads_run(shared):
    """They may be what stores the word."""

    def store():
        time.sleep(0.05)
        shared.words[1] = 5

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
    next_one, found = dict.fromkeys(writers, 0), []
    end = time.monotonic() + 60
    while any(each < number for each in next_one.values()):
        if not shared.take(found):
            assert time.monotonic() < end, next_one
            shared.wait(1, 1000)
            os.sched_yield()
        for envelope in unpacked(found):
            writer = envelope[4]
            assert envelope == fields(next_one[writer], writer)
            next_one[writer] += 1
        found.clear()
    assert not shared.take(found)


def test_processes_write_and_one_reads(shared):
    number, children = 50_000, []
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
