"""Small programs of a few accesses, and all outcomes that the memory model permits.

A program is a list of threads, and a thread is a list of steps:

- ``("st", place, value, order)``, ``("ld", place, order)``
- ``("wait", place, comparison, value, order)``: a declared wait
- ``("spin", place, comparison, value, order)``: a loop of loads, whose last counts
- ``("rmw", verb, place, values, order)``
- ``("red", verb, place, values, order)``: the same, whose result is dropped; it
  acquires nothing
- ``("lock", place, order)``: a loop of compare and swap, from 0 to 1
- ``("fence",)``, ``("bar",)``: a barrier of all threads
- ``("wst", place, value)``, ``("wld", place)``: weak

``outcomes`` executes all steps in all orders, with all values, as a search through
states that shares no code with the product: views instead of vector clocks, and no
reduction. An outcome is what all threads have loaded and the last values, or ``race``,
or ``stuck``.
"""

import operator

PLACES = 3
DATA = 1  # the places of weak accesses come after the others
COMPARE = {"eq": operator.eq, "ge": operator.ge, "ne": operator.ne}
UPDATE = {
    "add": lambda old, value: old + value,
    "exch": lambda old, value: value,
    "max": max,
    "cas": lambda old, expected, value: value if old == expected else old,
}


def outcomes(program, most=200_000):
    """Return all outcomes; None if there are too many states."""
    threads = len(program)
    nothing = ((0,) * PLACES, frozenset())
    start = (
        (0,) * threads,  # the next steps
        ((),) * threads,  # what was loaded
        (((0, None, True),),) * PLACES,  # values, with releases and whether changed
        (nothing,) * threads,  # views: of places, and weak accesses
        (None,) * threads,  # at the last fence
        (nothing,) * threads,  # what the next fence acquires
        (0,) * DATA,
        (),  # weak accesses: (number, thread, place, writes)
    )
    found, seen, todo = set(), {start}, [start]
    while todo:
        state = todo.pop()
        if len(seen) > most:
            return None
        following = list(_steps(program, state))
        if "race" in following:
            found.add("race")
            following = [each for each in following if each != "race"]
        if not following:
            if all(at == len(p) for at, p in zip(state[0], program, strict=True)):
                last = tuple(values[-1][0] for values in state[2])
                found.add((state[1], last))
            else:
                found.add("stuck")
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return found


def _join(one, other):
    return tuple(map(max, one[0], other[0])), one[1] | other[1]


def _set(items, at, item):
    return (*items[:at], item, *items[at + 1 :])


def _steps(program, state):
    at, loaded, places, views, fenced, unfenced, data, weak = state
    bars = [t for t, p in enumerate(program) if at[t] < len(p) and p[at[t]][0] == "bar"]
    if bars and len(bars) == len(program):
        view = views[0]
        for other in views[1:]:
            view = _join(view, other)
        yield (
            tuple(a + 1 for a in at), loaded, places, (view,) * len(program), fenced,
            unfenced, data, weak,
        )  # fmt: skip
        return
    for t, steps in enumerate(program):
        if at[t] == len(steps) or steps[at[t]][0] == "bar":
            continue
        step, view = steps[at[t]], views[t]
        on = _set(at, t, at[t] + 1)
        kind = step[0]
        if kind == "fence":
            now = _join(view, unfenced[t])
            yield (
                on, loaded, places, _set(views, t, now), _set(fenced, t, now), unfenced,
                data, weak,
            )  # fmt: skip
        elif kind in ("wst", "wld"):
            yield from _weak(state, t, step, on)
        elif kind == "st":
            yield _store(state, t, step[1], step[2], step[3], None, on, loaded)
        elif kind == "red":
            _, verb, place, values, order = step
            old, release, _ = places[place][-1]
            new = UPDATE[verb](old, *values)
            if new != old or order == "release":
                yield _store(state, t, place, new, order, release, on, loaded)
            else:
                seen = _set(view[0], place, len(places[place]) - 1), view[1]
                yield (on, loaded, places, _set(views, t, seen), *state[4:])
        elif kind in ("rmw", "lock"):
            if kind == "lock":
                step = "rmw", "cas", step[1], (0, 1), step[2]
            _, verb, place, values, order = step
            index = len(places[place]) - 1
            if kind == "lock" and places[place][index][0] != 0:
                continue
            old, release, _ = places[place][index]
            state = _load(state, t, place, index, order)
            got = _set(loaded, t, (*loaded[t], old))
            new = UPDATE[verb](old, *values)
            if new == old and order != "release":
                yield (on, got, *state[2:])
            else:
                yield _store(state, t, place, new, order, release, on, got)
            state = (at, loaded, places, views, fenced, unfenced, data, weak)
        else:
            place, order = step[1], step[-1]
            for index in range(view[0][place], len(places[place])):
                value = places[place][index][0]
                after = _load(state, t, place, index, order)
                good = kind == "ld" or COMPARE[step[2]](value, step[3])
                if good:
                    shown = kind != "wait"
                    got = _set(loaded, t, (*loaded[t], value)) if shown else loaded
                    yield (on, got, *after[2:])
                elif index > view[0][place]:
                    # It has looked, and knows the place, but acquires nothing: to know
                    # less permits more.
                    seen = _set(view[0], place, index), view[1]
                    yield (*state[:3], _set(views, t, seen), *state[4:])


def _weak(state, t, step, on):
    _at, loaded, places, views, fenced, unfenced, data, weak = state
    place, writes = step[1] - PLACES, step[0] == "wst"
    view, number = views[t], len(weak)
    same = writes and data[place] == step[2]
    for n, (_, other, stores) in enumerate(weak):
        conflicts = not (stores and same) if writes else stores
        if other == place and conflicts and n not in view[1]:
            yield "race"
            return
    me = view[0], view[1] | {number}
    got = loaded
    if writes:
        data = _set(data, place, step[2])
    else:
        got = _set(loaded, t, (*loaded[t], data[place]))
    yield (
        on, got, places, _set(views, t, me), fenced, unfenced, data,
        (*weak, (t, place, writes)),
    )  # fmt: skip


def _load(state, t, place, index, order):
    at, loaded, places, views, fenced, unfenced, data, weak = state
    release = places[place][index][1]
    view = views[t]
    view = _set(view[0], place, max(index, view[0][place])), view[1]
    if release is not None:
        if order == "acquire":
            view = _join(view, release)
        else:
            unfenced = _set(unfenced, t, _join(unfenced[t], release))
    return at, loaded, places, _set(views, t, view), fenced, unfenced, data, weak


def _store(state, t, place, value, order, before, on, got):
    _, _, places, views, fenced, unfenced, data, weak = state
    index = len(places[place])
    view = _set(views[t][0], place, index), views[t][1]
    release = fenced[t]
    if release is not None:  # a fence covers what came before it, and this value
        release = _set(release[0], place, index), release[1]
    if order == "release":
        release = view
    if before is not None:
        release = before if release is None else _join(release, before)
    if release is not None:
        release = _set(release[0], place, index), release[1]
    after = _set(places, place, (*places[place], (value, release, True)))
    return on, got, after, _set(views, t, view), fenced, unfenced, data, weak
