"""The compiled function of calls against a model of it in Python."""

import ctypes
import random
import threading

import pytest

from numba_symm.gpu import compiled, entry
from tests.gates import Table, answered, gate

CALLS = 20_000
FAILED = 700  # a status of the driver
EVENT = 9
HANDLES = [0, 1, 4096, 8192, 12288]
NAMES = {name: index << 16 for index, name in enumerate(compiled.WHERE)}
CALLED = sorted({*NAMES} - {"cuStreamQuery"})  # which only messages call


class World:
    """A driver that notes its calls, and a record: what the function reads."""

    def __init__(self, monkeypatch):
        self.log, self.failing, self.captured, self.identities = [], {}, set(), {}
        functions = {name: self.function(name) for name in NAMES}
        self.gate = gate(monkeypatch, **functions)
        self.rings = [(ctypes.c_int64 * 4096)() for _ in range(2)]
        calls, others = map(ctypes.addressof, self.rings)
        self.book = entry.Book(calls=calls, others=others)
        self.gate.gate.book = ctypes.addressof(self.book)
        self.gate.gate.event = EVENT
        self.about = ctypes.c_int64(3)
        for handle in HANDLES[:-1]:
            at = entry.place_of(handle)
            self.book.streams[at : at + 2] = [handle, handle // 4096 + 1]

    def function(self, name):
        def call(*args):
            if name == "cuLaunchKernelEx":
                stream = compiled.Config.from_address(args[0]).stream or 0
                args = args[1:3], stream
            failed = self.note(name, args)
            if not failed and name == "cuStreamIsCapturing":
                answered(args[1], args[0] in self.captured, ctypes.c_int)
            if not failed and name == "cuStreamGetId":
                answered(args[1], self.identity(args[0]))
            return FAILED * failed

        return call

    def identity(self, handle):
        return self.identities.setdefault(handle, 100 + handle)

    def note(self, name, args):
        """Note a call of the driver; return whether it fails."""
        asks = name in ("cuStreamIsCapturing", "cuStreamGetId")
        self.log.append((name, *(args[:1] if asks else args)))
        left = self.failing.get(name)
        if left is not None:
            self.failing[name] = left - 1
        return left == 0


class Model:
    """What the function does, and the words that it changes."""

    def __init__(self, world, me):
        self.world, self.me = world, me
        self.latest, self.number, self.other, self.chain = entry.NO_CALL, 0, 0, 0
        self.countdown, self.graph = {}, {}

    def call(self, steps, digest, stream, mode):
        world, gate = self.world, self.world.gate.gate
        failed = world.gate.board.failed.value
        if mode == entry.PLAIN and (gate.slow or failed or gate.ready != self.me):
            return entry.SLOW
        if gate.thread not in (0, self.me):
            return entry.BUSY
        first = mode < entry.FIRST
        status = self.begin(steps, digest, stream, mode) if first else entry.DONE
        if status < entry.DONE:
            return status
        if status == entry.DONE and first and self.graph.get(id(steps)):
            status = self.do("cuGraphLaunch", self.graph[id(steps)], stream)
        elif status == entry.DONE:
            status = self.enqueue(steps[max(0, mode - entry.FIRST) :], steps, stream)
        if first and status >= entry.DONE:
            ended = self.do("cuEventRecord", EVENT, stream)
            status = status or ended
        return status

    def begin(self, steps, digest, stream, mode):
        world, call = self.world, id(steps)
        place = entry.place_of(stream)
        if not world.about.value or world.book.streams[place] != stream:
            return entry.UNKNOWN
        status, here = entry.DONE, entry.LEGACY
        if stream > 1:
            status = self.do("cuStreamIsCapturing", stream)
            if not status and stream in world.captured:
                return entry.CAPTURED
            status = status or self.do("cuStreamGetId", stream)
            here = world.identity(stream)
        if not status and not self.graph.get(call) and self.countdown.get(call):
            self.countdown[call] -= 1
            if not self.countdown[call]:
                return entry.GRAPH
        python = (entry.PYTHON,) in steps and not self.graph.get(call)
        if not status and python and mode == entry.PLAIN:
            return entry.STEPS
        if not status and here != self.latest:
            if self.latest != entry.NO_CALL:
                status = self.do("cuStreamWaitEvent", stream, EVENT, 0)
            self.latest = here
        if not status and digest:
            self.number += 1
            self.chain = (self.chain * 31 + digest) % 2**64
        elif not status:
            self.other += 1
        return status

    def enqueue(self, steps, whole, stream):
        for kind, *words in steps:
            if kind == entry.PYTHON:
                return entry.RESUME - (len(whole) - len(steps))
            name, args = {
                entry.LAUNCH: ("cuLaunchKernelEx", (tuple(words[1:]), stream)),
                entry.COPY: ("cuMemcpyDtoDAsync", (*words, stream)),
                entry.FILL: ("cuMemsetD32Async", (*words, 1, stream)),
            }[kind]
            status = self.do(name, *args)
            if status:
                return status
            steps = steps[1:]
        return entry.DONE

    def do(self, name, *args):
        return FAILED + NAMES[name] if self.world.note(name, args) else entry.DONE


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_are_those_of_the_model(monkeypatch, seed):
    """Streams end, captures begin, words change, and the driver fails at times."""
    draw, world = random.Random(seed), World(monkeypatch)
    gate, ready = world.gate.gate, world.gate.gate.ready
    model, config = Model(world, ready), compiled.Config()
    kinds = [
        (entry.LAUNCH, ctypes.addressof(config), 77, 78),
        (entry.COPY, 1, 2, 3),
        (entry.FILL, 5, 6),
        (entry.PYTHON,),
    ]
    calls, met = [], set()
    for number in range(12):
        steps = [draw.choice(kinds) for _ in range(draw.randint(0, 4))]
        digest, countdown = number % 3 * 5, number % 4
        address = ctypes.addressof(world.about)
        block = entry.block_of(gate, address, digest, steps, countdown)
        model.countdown[id(steps)] = countdown
        calls.append((steps, digest, block, entry.function_of(block, config)))
    for _ in range(CALLS):
        event = draw.random()
        if event < 0.02:
            gate.slow ^= draw.choice([entry.CLOSED, entry.GROUPED, entry.DEBUG])
        elif event < 0.04:
            world.gate.board.failed.value ^= 1
        elif event < 0.06:
            world.captured ^= {draw.choice(HANDLES[2:])}
        elif event < 0.10:  # another stream gets the handle
            world.identities[draw.choice(HANDLES[2:])] = draw.randint(200, 10**7)
        elif event < 0.12:
            world.about.value ^= 3
        elif event < 0.14:
            gate.thread = draw.choice([0, 10**9])
        elif event < 0.15:
            gate.ready = draw.choice([ready, ready + 10**9])
        steps, digest, block, enqueue = draw.choice(calls)
        if event > 0.98:
            graph = draw.choice([0, 1234])
            entry.Head.from_buffer(block).graph = model.graph[id(steps)] = graph
        failing = {}
        if draw.random() < 0.1:
            failing[draw.choice(CALLED)] = draw.randint(0, 2)
        stream, mode = draw.choice(HANDLES), draw.choice([0, 0, 0, 1, 2, 3])
        if mode == entry.FIRST + 1 and not steps:
            mode = entry.FIRST
        held = gate.thread
        world.log, world.failing = [], dict(failing)
        expected = model.call(steps, digest, stream, mode), world.log
        world.log, world.failing = [], dict(failing)
        found = enqueue(stream, mode) if mode else enqueue(stream)
        assert (found, world.log) == expected
        # Python goes on with an admitted call. A plain call is within no other one.
        left = 0 if mode == entry.PLAIN and found >= entry.DONE else held
        assert gate.thread == (ready if found < entry.BUSY else left)
        gate.thread = held
        words = world.book.number, world.book.other, world.book.chain % 2**64
        assert words == (model.number, model.other, model.chain)
        assert gate.latest == model.latest
        met.add(max(min(found, 1), entry.RESUME))
    assert met == {1, *range(entry.STEPS, 1), entry.RESUME}


def test_what_is_recorded_can_be_read(monkeypatch):
    world = World(monkeypatch)
    call = entry.block_of(world.gate.gate, ctypes.addressof(world.about), 7, [], 0)
    enqueue = entry.function_of(call, world)
    for _ in range(1025):
        assert enqueue(4096) == entry.DONE
    place = 1025 % 1024 * 4
    number, _, chain, rest = world.rings[0][place : place + 4]
    assert (number, chain) == (1025, world.book.chain)
    assert (rest & 0xFFFFFFFF, rest >> 32 & 0xFFFF, rest >> 48) == (3, 2, 1025)


def test_a_thread_is_refused_while_another_one_is_in_the_driver(monkeypatch):
    """Meanwhile, it runs: the driver is called without the interpreter's lock."""
    inside, leave = threading.Event(), threading.Event()

    def launch(*args):
        inside.set()
        return not leave.wait(30)

    found, config = [], compiled.Config()
    made = gate(monkeypatch, cuLaunchKernelEx=launch)
    about, step = ctypes.c_int64(0), (entry.LAUNCH, ctypes.addressof(config), 1, 2)
    block = entry.block_of(made.gate, ctypes.addressof(about), 0, [step], 0)
    enqueue = entry.function_of(block, config)
    thread = threading.Thread(target=lambda: found.append(enqueue(0, entry.CHECKED)))
    thread.start()
    assert inside.wait(30)
    assert enqueue(0, entry.CHECKED) == entry.BUSY
    assert entry.compiled("claim")(ctypes.addressof(made.gate), 0) == entry.BUSY
    leave.set()
    thread.join()
    assert found == [entry.DONE]
    assert enqueue(0) == entry.DONE


def test_a_thread_whose_identifier_recurs_is_new(monkeypatch):
    made, found = gate(monkeypatch), []
    address = ctypes.addressof(made.gate)

    def claim():
        found.append(entry.compiled("claim")(address, 0))
        entry.compiled("ready")(address)
        made.gate.thread = 0

    for _ in range(3):
        thread = threading.Thread(target=claim)
        thread.start()
        thread.join()
    assert found == [entry.SLOW] * 3


def test_python_calls_the_driver_without_its_lock(monkeypatch):
    found, inside, leave = [], threading.Event(), threading.Event()

    def record(event, stream):
        found.append((event, stream))
        inside.set()
        return 7 if leave.wait(30) else 8

    table = Table(cuEventRecord=record)
    place = table.addresses[compiled.WHERE.index("cuEventRecord")]
    monkeypatch.setattr(entry, "address", lambda name: place)
    function = entry.driver_function.__wrapped__("cuEventRecord")
    thread = threading.Thread(
        target=lambda: found.append(function((1 << 63) - 1, 5, 0))
    )
    thread.start()
    assert inside.wait(30)
    leave.set()
    thread.join()
    assert found == [((1 << 63) - 1, 5), 7]
    for wrong in (-1, 1 << 64, "0", None):
        with pytest.raises((TypeError, OverflowError)):
            function(wrong, 5, 0)
    assert len(found) == 2


@pytest.mark.parametrize("stream", [-1, 1 << 64, "0", None])
def test_what_is_no_handle_raises(monkeypatch, stream):
    made, about = gate(monkeypatch), ctypes.c_int64(0)
    block = entry.block_of(made.gate, ctypes.addressof(about), 0, [], 0)
    with pytest.raises((TypeError, OverflowError)):
        entry.function_of(block, about)(stream)
    assert made.gate.thread == 0


def test_a_call_with_steps_of_python_that_is_interrupted_has_done_nothing(monkeypatch):
    """The interrupt comes between the compiled function and the first step."""
    log = []
    made = gate(monkeypatch, cuMemsetD32Async=lambda *args: log.append(args))
    about = ctypes.c_int64(0)
    steps = [(entry.FILL, 1, 2), (entry.PYTHON,)]
    block = entry.block_of(made.gate, ctypes.addressof(about), 0, steps, 0)
    enqueue = entry.function_of(block, about)
    assert enqueue(0) == entry.STEPS
    assert not log
    assert enqueue(0, entry.CHECKED) == entry.RESUME - 1
    assert len(log) == 1
