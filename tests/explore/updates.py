"""Atomic updates in the model of memory: they load and store as one access.

An update loads the last value in memory, and no other store may come between that
value and its own. Its store reaches memory immediately: a later one is a schedule in
which the update is later. The value of an update continues a release: an acquire that
loads it also acquires what the updates before it have released.
"""

from explore.memory import ACQUIRE, RELEASE, Finding, Store, latest


def update(memory, thread, address, nbytes, change, order):
    """Store the change of the last value at an address; return the value before.

    A change to None stores nothing.
    """
    place = memory._place(address, nbytes)
    time = thread.tick()
    if order is RELEASE:
        memory._send_known(thread)
    for store in list(place.waiting):
        if thread.knows(store):
            memory.send(store)
        elif store.weak:
            memory._race(thread, "updates", place, store.writer)
    found = place.values[-1]
    if found.value is None:
        raise Finding("access", f"{thread.name} updates {memory._name(place)}, unset")
    for store in place.values:
        if store.weak and store.time > thread.known[store.writer]:
            memory._race(thread, "updates", place, store.writer)
    for (other, weakly), (when, _) in place.loads.items():
        if weakly and when > thread.known[other]:
            memory._race(thread, "updates", place, other)
    if found.release is not None:
        if order is ACQUIRE:
            thread.learn(found.release)
        else:
            thread.unfenced.append(found.release)
    value = change(found.value)
    if value is None:  # a comparison that failed
        place.loads[thread.number, False] = time, found.order
        return found.value
    known = list(thread.known)
    release = known if order is RELEASE else thread.fenced
    released = [each for each in (release, found.release) if each is not None]
    new = Store(place, 0, thread.number, time, known=known, over=memory._over)
    new.release = latest(*released) if released else None
    new.value = value & (1 << 8 * nbytes) - 1
    new.updates = True
    place.put(new, late=True)
    place.loads[thread.number, False] = time, new.order
    memory.changes += 1
    del place.values[:-8]
    if memory.log:
        memory._log(thread.name, f"updates ({order})", place, new.value)
    return found.value
