"""The compiled steps of messages: what they match, reuse, and order."""

import ctypes
from functools import partial

import pytest

from numba_symm.gpu import compiled, streams
from numba_symm.gpu.compiled import WHERE, WORD, Config
from numba_symm.gpu.streams import PER_THREAD
from numba_symm.mpi import rooms
from numba_symm.mpi.rooms import (
    ANY,
    ARRIVED,
    BEGUN,
    BLOCK,
    BLOCKS,
    ENDED,
    FAILED,
    FIELDS,
    FOUND,
    FULL,
    LATE,
    LINE,
    MATCHED,
    NO_ORDER,
    NO_SLOT,
    NOTHING,
    POSTED,
    READ,
    READY,
    REFUSED,
    ROOMS,
    SLOTS_OF_ALL,
    THERE,
    Order,
    Parcel,
    Port,
    Ring,
    Stack,
)
from tests.executing import ExecutingDriver

CONTEXT, SOURCE, BYTES, STREAM, COPIES, LOOKS = 5, 1, 64, 0xA0, 0xB0, 3
DATA, ROOM, OUT, KERNEL = 0x1000, 0x2000, 0x3000, 7


class Memory:
    """The memory of a rank that receives from two others, and sends to itself."""

    def __init__(self):
        self.driver = ExecutingDriver()
        for stream in (STREAM, COPIES):
            self.driver.create(stream)
        self.driver.kernels[KERNEL] = self._launched
        self._keeps = {}
        self.port = port = Port(kernel=KERNEL, looks=rooms.MOST)
        for name, function in (
            *(("launch", "cuLaunchKernelEx"), ("capturing", "cuStreamIsCapturing")),
            *(("record", "cuEventRecord"), ("wait", "cuStreamWaitEvent")),
            ("query", "cuStreamQuery"),
        ):
            arguments = compiled.ARGUMENTS[WHERE.index(function)]
            call = ctypes.CFUNCTYPE(ctypes.c_int, *[WORD] * arguments)(
                partial(self.driver._in_c, function)
            )
            setattr(port, name, compiled.address_of(call))
            self._keeps[name] = call
        self.words = (WORD * (LINE * ROOMS))()
        self.rings, self.config = (Ring * 2)(), Config()
        self.opened = (WORD * (2 * BLOCKS))(*2 * BLOCKS * [-2])
        self.opened[0], self.opened[1] = 0, ROOM
        address = ctypes.addressof
        port.host, port.config = address(self.words), address(self.config)
        port.rings, port.writers = address(self.rings), 2
        port.stride, port.opened = ctypes.sizeof(Ring), address(self.opened)
        self.unread, self.stack = WORD(), Stack()
        self.at = address(port)
        self.order = bytearray(
            Order(port=self.at, ring=self.ring(1), context=CONTEXT, source=SOURCE)
        )
        self.set(address=OUT, room=BYTES, wanted=ANY)
        self.take = rooms.compiled("take")

    def _launched(self, params):
        values = self.port.values
        copies = [values[n : n + 3] for n in (0, 8) if values[n + 4]]
        loads = [(source, nbytes) for _, source, nbytes in copies if nbytes]
        return "copy", loads, [(target, nbytes) for target, _, nbytes in copies]

    def ring(self, writer):
        return ctypes.addressof(self.rings[writer])

    def set(self, **fields):
        view = Order.from_buffer(self.order)
        for name, value in fields.items():
            setattr(view, name, value)

    def publish(self, writer=1, context=CONTEXT, tag=3, nbytes=8, slot=2, asks=0):
        ring = self.rings[writer]
        ring.sent += 1
        entry = (FIELDS + 1) * (ring.sent % rooms.ENTRIES)
        fields = ring.sent, context, writer, tag, nbytes, slot, 9, asks
        ring.entries[entry : entry + FIELDS + 1] = fields

    def receive(self, stage=ENDED, alone=1):
        return rooms.compiled("receive")(self.order, stage, LOOKS, alone)

    def store(self, word, slot=2, number=9):
        self.words[LINE * slot + word] = number

    def room(self, n, offset, stack):
        """Let a slot have a room, whose place the peers know."""
        self.stack.rooms[n] = n
        self.port.rooms[5 * n : 5 * n + 2] = ROOM + offset, ctypes.addressof(stack)

    def left(self):
        found = 0
        for writer in range(2):
            while self.take(self.at, self.ring(writer)):
                assert self.port.held
                assert self.port.envelope[1] == writer
                self.port.held = 0
                found += 1
        return found


@pytest.fixture
def memory():
    return Memory()


def test_a_receive_comes_from_stage_to_stage(memory):
    assert memory.receive() == POSTED
    memory.publish(asks=1)
    assert memory.receive(FOUND) == FOUND
    assert memory.words[LINE * 2 + MATCHED] == 9  # a synchronous send ends
    memory.store(BLOCK, number=0)
    assert memory.receive() == FOUND  # its data is not there
    memory.store(READY)
    assert memory.receive(BEGUN) == BEGUN
    assert memory.receive() == BEGUN
    memory.store(READ)
    assert memory.receive() == ENDED
    assert len(memory.driver.works) == 1
    assert memory.port.values[8:11] == [OUT, ROOM, 8]
    assert not memory.left()


def sending(memory, tag=3):
    """Return what sends a message to this rank, and begins a receive then."""
    address = ctypes.addressof
    memory.room(4, 256, memory.stack)
    memory.stack.free, memory.stack.rooms[0] = 1, 4
    envelope = memory.ring(0), CONTEXT, 0, address(memory.unread)
    memory.parcel = Parcel(memory.at, address(memory.stack), DATA, 8, *envelope)
    given = memory.order, address(memory.parcel), STREAM, tag, 0
    return partial(rooms.compiled("send"), *given)


def test_a_send_begins_the_first_receive_in_its_launch(memory):
    send = sending(memory)
    memory.set(stream=STREAM, on=STREAM, wanted=3)
    memory.store(BLOCK, number=0)
    memory.store(LATE)
    memory.publish()
    assert send() == SLOTS_OF_ALL + 4
    assert memory.order[0] == BEGUN
    assert len(memory.driver.works) == 1
    assert memory.config.grid[0] == 2
    copies = [memory.port.values[n : n + 3] for n in (0, 8)]
    assert copies == [[ROOM + 256, DATA, 8], [OUT, ROOM, 8]]
    counts = [memory.port.values[n] // 8 for n in (5, 13)]
    assert counts == [2 * 4 + READY, 2 * 2 + READ]
    assert memory.receive() == BEGUN
    memory.store(LATE)
    assert memory.receive() == FOUND  # its kernel has copied nothing
    for launched in (False, True):
        assert memory.receive() == (BEGUN if launched else FOUND)
        memory.store(READY)
    assert len(memory.driver.works) == 2
    values = memory.port.values
    assert (values[4], values[8:11], values[16]) == (0, [OUT, ROOM, 8], 0)
    memory.store(READ)
    assert memory.receive() == ENDED


def test_an_irecv_begins_with_a_send_only_if_its_stream_is_idle(memory):
    """The program may have enqueued work there that waits for the peer."""
    send = sending(memory)
    memory.set(stream=STREAM, on=COPIES)
    memory.store(BLOCK, number=0)
    memory.publish()
    for busy in (True, False):
        memory.driver.unready = {STREAM} if busy else set()
        memory.stack.free = 1
        assert send() > 0
        assert memory.order[0] == (POSTED if busy else BEGUN)


@pytest.mark.parametrize(("stream", "least"), [(PER_THREAD, 0), (0, 1)])
def test_a_stream_of_each_thread_joins_no_copies(memory, stream, least):
    send = sending(memory)
    memory.driver.create(stream)
    memory.port.legacy = least
    memory.set(stream=stream, on=stream)
    memory.store(BLOCK, number=0)
    memory.publish()
    assert send.func(*send.args[:2], stream, *send.args[3:]) > 0
    assert memory.order[0] == POSTED


@pytest.mark.parametrize(
    "wrong",
    [
        *({"stage": FOUND}, {"ring": 0}, {"stream": COPIES}, {"address": DATA}),
        *({"wanted": 4}, {"room": 4}, {"address": 0}),
    ],
)
def test_other_receives_begin_later(memory, wrong):
    send = sending(memory)
    memory.set(**{"stream": STREAM, **wrong})
    memory.store(BLOCK, number=0)
    memory.publish()
    assert send() > 0
    assert memory.order[0] == (
        FOUND if {"stage": FOUND, "address": 0}.items() & wrong.items() else POSTED
    )
    assert memory.config.grid[0] == 1


def test_a_send_whose_launch_fails_begins_no_receive(memory):
    send = sending(memory)
    memory.set(stream=STREAM)
    memory.store(BLOCK, number=0)
    memory.publish()
    memory.driver.failing = {"cuLaunchKernelEx"}
    assert send() < 0
    assert memory.order[0] == FOUND
    number = memory.port.number
    assert memory.words[LINE * 4 + FAILED] == memory.words[LINE * 4 + READY] == number


def test_sends_look_rarely_for_messages_that_come_late(memory):
    send = sending(memory)
    memory.set(stream=STREAM)
    assert send() > 0
    assert memory.parcel.rests == rooms.MOST - 1
    memory.store(BLOCK, number=0)
    memory.publish()
    memory.stack.free = 1
    assert send() > 0
    assert (memory.order[0], memory.parcel.rests) == (BEGUN, 0)


@pytest.mark.parametrize(
    "sent",
    [
        *({"context": 6}, {"tag": 4}, {"nbytes": BYTES + 1}),
        *({"writer": 0}, {"alone": 0}, {"held": 1}),
    ],
)
def test_other_messages_are_left_to_python(memory, sent):
    memory.set(wanted=3)
    memory.port.held = sent.pop("held", 0)
    alone = sent.pop("alone", 1)
    memory.publish(**sent)
    assert memory.receive(alone=alone) == POSTED
    assert memory.left() == 1


def test_a_wait_ends_for_an_envelope_of_any_rank(memory):
    wait, word = rooms.compiled("wait"), ctypes.addressof(memory.words)
    for writer in (0, 1):
        assert wait(memory.at, word, 1, LOOKS) == NOTHING
        memory.publish(writer)
        assert wait(memory.at, word, 1, LOOKS) == ARRIVED
        assert wait(memory.at, word, 0, LOOKS) == THERE
        assert memory.left() == 1


@pytest.mark.parametrize(
    "wrong", [{"address": 0}, {"room": 4}, {"slot": NO_SLOT}, {}], ids=str
)
def test_copies_of_other_kinds_are_left_to_python(memory, wrong):
    memory.publish()
    assert memory.receive(FOUND) == FOUND
    memory.store(READY)
    if not wrong:  # its sender could not copy it
        memory.store(FAILED)
    memory.set(**wrong)
    assert memory.receive() == FOUND
    assert not memory.driver.works


def test_a_copy_follows_what_was_enqueued_before_its_receive(memory):
    """And it is refused in a capture."""
    driver = memory.driver
    _, event = driver.cuEventCreate(2)
    expect = rooms.compiled("expect")
    for ordered in (True, False):
        memory.set(stage=POSTED)
        driver.launch("work", STREAM, (), OUT)
        given = memory.order, ANY, STREAM, COPIES
        assert expect(*given, event if ordered else 0) == 0
        memory.publish()
        memory.store(READY)
        assert (memory.receive(BEGUN) == BEGUN) == ordered
        driver.cuStreamSynchronize(COPIES)
    assert "copy" in str(driver.unordered)
    driver.capture(STREAM)
    assert expect(*given, 0) == REFUSED
    assert memory.receive() == REFUSED


def test_a_sender_reuses_the_memory_of_messages_that_were_read(memory):
    """Only then are there fewer bytes that its receiver has not read."""
    send, port, used = rooms.compiled("send"), memory.port, Stack()
    address = ctypes.addressof
    for n in range(2):
        memory.room(n, 256 * n, used if n else memory.stack)
    memory.stack.free = 2
    envelope = memory.ring(0), CONTEXT, 0, address(memory.unread)
    parcel = Parcel(memory.at, address(memory.stack), DATA, 8, *envelope)
    given = NO_ORDER, address(parcel), STREAM, 3, 0
    slots = [send(*given) % SLOTS_OF_ALL for _ in range(2)]
    assert slots == [1, 0]
    assert send(*given) == FULL
    assert memory.unread.value == 16
    memory.store(READ, slot=0, number=2)
    assert send(*given) == FULL  # the copy to its room has not ended
    memory.store(READY, slot=0, number=2)
    assert send(*given) == 3 * SLOTS_OF_ALL
    assert memory.unread.value == 16
    assert memory.left() == 3
    for slot, number in ((0, 3), (1, 1)):
        for word in (READY, READ):
            memory.store(word, slot, number)
    rooms.compiled("reclaim")(memory.at)
    counts = memory.stack.free, used.free, port.lent, memory.unread.value
    assert counts == (1, 1, 0, 0)  # a room for one message is not used again
    memory.driver.failing = {"cuLaunchKernelEx"}
    assert send(*given) < 0
    assert memory.left() == 1  # a message that has failed, which its receiver refuses
    slot, number = port.unread[0], port.number
    assert memory.words[LINE * slot + FAILED] == number
    assert memory.words[LINE * slot + READY] == number
    for read in (False, True):
        if read:
            memory.store(READ, slot, number)
        rooms.compiled("reclaim")(memory.at)
        counts = memory.stack.free, port.lent, memory.unread.value
        assert counts == ((1, 0, 0) if read else (0, 1, 8))


def test_what_lacks_is_told_before_a_message_is_announced(memory):
    send, port, address = rooms.compiled("send"), memory.port, ctypes.addressof
    memory.room(0, 0, memory.stack)
    memory.stack.free = 1
    envelope = memory.ring(0), CONTEXT, 0, address(memory.unread)
    parcel = Parcel(memory.at, address(memory.stack), DATA, 8, *envelope)
    given = NO_ORDER, address(parcel), STREAM, 3, 1
    memory.rings[0].sent = rooms.ENTRIES
    assert send(*given) == FULL
    memory.rings[0].sent = 0
    assert send(*given) == SLOTS_OF_ALL
    assert send(*given) == FULL
    memory.driver.capture(STREAM)
    memory.port.legacy = 1
    assert send(*given) == REFUSED
    assert (memory.left(), memory.unread.value, port.lent) == (1, 8, 1)
    assert len(memory.driver.works) == 1


def test_a_closed_stream_of_copies_is_not_settled_again(monkeypatch):
    """At the end of a program, also those of communicators that have failed are."""
    settled = []

    class Side:
        stream = 77

        def close(self):
            self.stream = streams.LEGACY_DEFAULT

    monkeypatch.setattr(rooms, "SideStream", lambda _: Side())
    monkeypatch.setattr(streams, "synchronize", settled.append)
    copies = rooms.CopyStream()
    copies.close()
    copies.settle()
    assert settled == [77, streams.LEGACY_DEFAULT]
