"""What exploration finds is what all orders of small programs give."""

import random

import pytest

from numba_symm.explore.exploration import Search
from numba_symm.explore.machine import Machine, Name, Numbers
from numba_symm.explore.memory import LOAD, STORE, UPDATE, Fault, Pruned, Strong
from tests import litmus


class Explored:
    """All executions of a small program by the product's search."""

    def __init__(self, program, search=None, most=100_000):
        self.program, self.numbers = program, Numbers()
        self.outcomes, self.runs, self.pruned = set(), 0, 0
        search = search or Search()
        while True:
            search.begin()
            self.runs += 1
            assert self.runs < most
            try:
                self.outcomes.add(self.execute(search))
            except Pruned:
                self.pruned += 1
            except Fault as fault:
                names = {"race": "race", "deadlock": "stuck", "divergence": "stuck"}
                self.outcomes.add(names[fault.kind])
            if not search.next(self.machine):
                break

    def execute(self, search):
        self.machine = machine = Machine(search, {}, self.numbers, search.futile)
        places = [machine.memory.allocate(f"place {i}", 8, 8) for i in range(4)]
        self.loaded = [() for _ in self.program]
        for t, steps in enumerate(self.program):
            name = Name(t, 0, 0, f"thread {t}")

            def body(t=t, steps=steps):
                for number, step in enumerate(steps):
                    self.step(t, number, step, places)

            machine.start(name, machine.clock(), body)
        machine.run()
        last = tuple(place.bits(0, 8) for place in places[: litmus.PLACES])
        return tuple(self.loaded), last

    def load(self, t, value):
        self.loaded[t] = (*self.loaded[t], value)

    def op(self, kind, place, order):
        return Strong(kind, place, 0, 8, order, self.machine.site())

    def step(self, t, number, step, places):
        machine, kind = self.machine, step[0]
        if kind == "fence":
            machine.fence()
        elif kind == "bar":
            machine.meet("bar", len(self.program), None, "a barrier")
        elif kind == "st":
            op = self.op(STORE, places[step[1]], step[3])
            op.bits = step[2]
            machine.access(op, None)
        elif kind == "ld":
            self.load(t, machine.access(self.op(LOAD, places[step[1]], step[2]), None))
        elif kind in ("rmw", "red"):
            op = self.op(UPDATE, places[step[2]], step[4])
            op.change = lambda old: litmus.UPDATE[step[1]](old, *step[3])
            op.silent = step[1] if kind == "red" else ""
            old = machine.access(op, None)
            if kind == "rmw":
                self.load(t, old)
        elif kind == "lock":
            self.lock(t, number, step, places)
        elif kind == "wst":
            stored = step[2].to_bytes(8, "little")
            machine.weak(places[step[1]], 0, 8, lambda: stored)
            places[step[1]].put_bits(0, 8, step[2])
        elif kind == "wld":
            machine.weak(places[step[1]], 0, 8, None)
            self.load(t, places[step[1]].bits(0, 8))
        else:
            self.wait(t, number, step, places)

    def lock(self, t, number, step, places):
        while True:
            op = self.op(UPDATE, places[step[1]], step[2])
            op.change = lambda old: old or 1
            old = self.machine.access(op, (t, number))
            if old == 0:
                return self.load(t, old)

    def wait(self, t, number, step, places):
        kind, place, comparison, value, order = step

        def holds(found):
            return litmus.COMPARE[comparison](found, value)

        def looks():
            thread = self.machine.me()
            if thread.peek is None:
                raise AssertionError
            thread.probed = places[place], 0, 8, order
            return holds(thread.peek)

        if kind == "wait":
            self.machine.wait(looks)
            return
        while True:
            op = self.op(LOAD, places[place], order)
            found = self.machine.access(op, (t, number))
            if holds(found):
                self.load(t, found)
                return


def drawn(lot):
    """Return a random program."""
    threads = lot.choice((2, 2, 3))
    most = 4 if threads == 2 else 3
    bars = lot.random() < 0.25
    program = []
    for _ in range(threads):
        steps = [step(lot) for _ in range(lot.randint(1, most))]
        if bars:
            steps.insert(lot.randint(0, len(steps)), ("bar",))
        program.append(steps)
    return program


def drawn_message(lot):
    """Return a random program in which a flag may publish data."""
    flag, data = lot.randrange(2), 3
    change, load = ("relaxed", "release"), ("relaxed", "acquire")
    writers = []
    for value in range(1, lot.choice((2, 3))):
        steps = [("wst", data, 1)] if value == 1 or lot.random() < 0.2 else []
        if lot.random() < 0.3:
            steps.append(("fence",))
        if lot.random() < 0.5:
            steps.append(("st", flag, value, lot.choice(change)))
        else:
            verb = lot.choice(("add", "max"))
            by = lot.choice((1, value))
            steps.append(("rmw", verb, flag, (by,), lot.choice(change + load)))
        if lot.random() < 0.3:
            steps.append(("st", flag, lot.randrange(3), lot.choice(change)))
        writers.append(steps)
    wanted = lot.choice(("ge", "ne")), lot.choice((1, 1, 2))
    reader = [(lot.choice(("wait", "wait", "spin")), flag, *wanted, lot.choice(load))]
    if lot.random() < 0.3:
        reader.append(("fence",))
    program = [*writers, [*reader, ("wld", data)]]
    lot.shuffle(program)
    return program


def drawn_locks(lot):
    """Return a random program of threads that take locks."""
    program = []
    for _ in range(lot.choice((2, 3))):
        place, steps = lot.randrange(2), []
        steps.append(("lock", place, lot.choice(("relaxed", "acquire", "acquire"))))
        steps.append(
            lot.choice([("wst", 3, 1), ("wld", 3), ("ld", 1 - place, "relaxed")])
        )
        if lot.random() < 0.9:
            order = lot.choice(("relaxed", "release", "release"))
            steps.append(("st", place, 0, order))
        program.append(steps)
    return program


def drawn_counters(lot):
    """Return a random program of threads that update words and drop the results."""
    program = []
    for _ in range(lot.choice((2, 2, 2, 3))):
        steps = []
        for _ in range(lot.randint(1, 2)):
            verb = "add" if lot.random() < 0.9 else "max"
            order, value = lot.choice(("relaxed", "release")), lot.randint(1, 2)
            steps.append(("red", verb, lot.randrange(2), (value,), order))
        if lot.random() < 0.6:
            steps.insert(lot.randint(0, len(steps)), step(lot))
        program.append(steps)
    return program


def step(lot):
    place, value = lot.randrange(2), lot.randint(1, 2)
    order = lot.choice(("relaxed", "acquire"))
    draw = lot.random()
    if draw < 0.28:
        return "st", place, value, lot.choice(("relaxed", "release"))
    if draw < 0.48:
        return "ld", place, order
    if draw < 0.58:
        return "wait", place, lot.choice(("eq", "ge", "ne")), value, order
    if draw < 0.66:
        return "spin", place, lot.choice(("eq", "ge", "ne")), value, order
    if draw < 0.82:
        verb = lot.choice(("add", "exch", "max", "cas"))
        values = (lot.randrange(2), value) if verb == "cas" else (value,)
        return "rmw", verb, place, values, lot.choice(("relaxed", "acquire", "release"))
    if draw < 0.88:
        return ("fence",)
    if draw < 0.94:
        return "wst", 3, value
    return "wld", 3


def differing(program):
    """Return the outcomes that only exploration, and that only the oracle has."""
    wanted = litmus.outcomes(program)
    found = Explored(program).outcomes
    faults = wanted & {"race", "stuck"}
    locks = any(step[0] == "lock" for steps in program for step in steps)
    if faults and locks:
        # A thread that waits for a lock for ever is a fault, which ends explorations.
        return set(), set() if faults & found else faults
    if "race" in faults:  # all else is undefined
        return set(), {"race"} - found
    return found - wanted, wanted - found


@pytest.mark.parametrize("part", range(10))
def test_random_programs_have_the_outcomes_of_all_orders(part):
    draws = drawn, drawn_counters, drawn, drawn_message, drawn_locks
    for seed in range(100 * part, 100 * part + 100):
        program = draws[seed % 5](random.Random(seed))
        assert differing(program) == (set(), set()), (seed, program)


OVERWRITTEN = [
    [("wait", 0, "ge", 1, "acquire"), ("wld", 3)],
    [("wst", 3, 1), ("st", 0, 1, "release")],
    [("wait", 0, "ge", 1, "relaxed"), ("st", 0, 2, "relaxed")],
]
RESET = [
    [("wait", 0, "eq", 1, "acquire")],
    [("st", 0, 1, "release"), ("st", 0, 0, "relaxed")],
]
STORE_BUFFERS = [
    [("st", 0, 1, "release"), ("ld", 1, "acquire")],
    [("st", 1, 1, "release"), ("ld", 0, "acquire")],
]
READERS_OF_TWO_WRITERS = [
    [("st", 0, 1, "release")],
    [("st", 1, 1, "release")],
    [("ld", 0, "acquire"), ("ld", 1, "acquire")],
    [("ld", 1, "acquire"), ("ld", 0, "acquire")],
]


def test_a_later_value_that_teaches_less_ends_a_wait():
    assert "race" in Explored(OVERWRITTEN).outcomes
    assert differing(OVERWRITTEN) == (set(), set())


def test_a_wait_may_look_too_late():
    assert "stuck" in Explored(RESET).outcomes
    assert differing(RESET) == (set(), set())


def test_both_loads_may_be_old():
    loaded = {loads for loads, _ in Explored(STORE_BUFFERS).outcomes}
    assert ((0,), (0,)) in loaded
    loaded = {loads[2:] for loads, _ in Explored(READERS_OF_TWO_WRITERS).outcomes}
    assert ((1, 0), (1, 0)) in loaded


def test_no_order_is_explored_twice():
    assert (Explored(STORE_BUFFERS).runs, Explored(STORE_BUFFERS).pruned) == (4, 0)
    readers = Explored(READERS_OF_TWO_WRITERS)
    assert (readers.runs, readers.pruned) == (16, 0)
    adds = [[("rmw", "add", 0, (1,), "relaxed")] for _ in range(4)]
    assert (Explored(adds).runs, Explored(adds).pruned) == (24, 0)
    dropped = [[("red", "add", 0, (1,), "release"), ("wld", 3)] for _ in range(6)]
    assert (Explored(dropped).runs, Explored(dropped).pruned) == (1, 0)


def test_equal_stores_are_no_race_but_what_they_replace_is():
    equal = [[("wst", 3, 1)], [("wst", 3, 1)]]
    assert "race" not in Explored(equal).outcomes
    for program in (
        [[("wld", 3), ("wst", 3, 1)], [("wst", 3, 1)]],
        [[("wst", 3, 2), ("wst", 3, 1)], [("wst", 3, 1)]],
        [[("wst", 3, 1), ("wst", 3, 2), ("wst", 3, 2)], [("wst", 3, 2)]],
    ):
        assert "race" in Explored(program).outcomes
        assert differing(program) == (set(), set())
