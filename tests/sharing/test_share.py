"""Arrays in two and more processes: bytes, order, and what is refused.

The processes are spawned, on GPUs where there are any, else in Numba's simulator. What
runs in them returns facts; the tests judge them.
"""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import numba_symm as ns
from numba_symm import sharing
from numba_symm.environment import SIMULATED
from tests.sharing.work import (
    SIZE,
    are,
    becomes,
    copied,
    error_of,
    fill,
    nothing_is_shared,
    numbers,
    say,
    to_device,
)
from tests.spawned import run_ranks

# Bytes, whatever the layout


def layouts():
    """Return arrays of this process, by name."""
    grid = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    halves = np.arange(300, dtype=np.float32).astype(ml_dtypes.bfloat16)
    device = to_device(grid)
    found = {
        "C order": device,
        "Fortran order": cuda.to_device(np.asfortranarray(grid[0])),
        "slice": device[1:3],
        "strided": device[:, 1:5:2, 3],
        "last element": device[3:, 4:, 5:],
        "complex": to_device(np.arange(7) * (1 + 2j)),
        "no elements": cuda.device_array((3, 0), np.float64),
        "bfloat16": to_device(halves.view(np.uint16)).view(halves.dtype),
        "one byte": to_device(np.array([200], np.uint8)),
    }
    cuda.synchronize()
    return found


def contents(array):
    """Return an array's shape, strides, dtype and elements."""
    steps = zip(array.shape, array.strides, strict=True)
    # Those of axes of length 1 mean nothing.
    strides = [step for n, step in steps if n > 1] if array.size else None
    if array.dtype == np.dtype(ml_dtypes.bfloat16):  # Numba does not copy bfloat16
        host = array.view(np.uint16).copy_to_host().tolist()
    else:
        host = array.copy_to_host().tolist() if array.size else []
    return tuple(array.shape), strides, array.dtype.name, host


def passes_layouts(comm):
    if comm.rank == 0:
        mine = layouts()
        say(comm, {name: ns.share(array) for name, array in mine.items()})
        found = {name: contents(array) for name, array in mine.items()}
    else:
        received = {name: ns.open_shared(h) for name, h in say(comm).items()}
        found = {name: contents(array) for name, array in received.items()}
        del received
    comm.barrier()
    return found, nothing_is_shared(), SIMULATED


def test_bytes_arrive_whatever_the_layout():
    (sent, clean, simulated), (received, also, _) = run_ranks(2, passes_layouts)
    assert clean
    assert also
    for name in sent:
        if simulated:  # private memory is copied, without gaps
            sent[name] = sent[name][0], received[name][1], *sent[name][2:]
        assert received[name] == sent[name], name


def writes_where_others_read(comm):
    with ns.Communicator(comm.among([comm.rank]), timeout=60) as own:
        x = own.zeros(SIZE, np.float32)
        handle = say(comm, ns.share(x[10:20], opens=2) if comm.rank == 0 else None)
        if comm.rank == 0:
            comm.barrier()
            first = x[9:12].copy_to_host().tolist()
            fill(x, 9)
            cuda.synchronize()
            comm.barrier()
            comm.barrier()
            return first, handle.kind, nothing_is_shared()
        y = ns.open_shared(handle)
        if comm.rank == 1:
            fill(y, 5)
            cuda.synchronize()
        comm.barrier()
        comm.barrier()
        second = y.copy_to_host().tolist()
        mappings = sharing.stats().mappings
        y.close()
        comm.barrier()
        return second, mappings, nothing_is_shared()


def test_memory_of_a_communicator_is_shared_in_place():
    producer, *consumers = run_ranks(3, writes_where_others_read)
    first, kind, clean = producer
    assert first == [0, 5, 5]
    assert kind in ("vmm", "host", "ipc")
    assert clean
    assert consumers == [([9] * 10, 1, True)] * 2


def writes_after_sharing(comm):
    """Return what a consumer sees of what the producer wrote after sharing."""
    x = numbers(SIZE)
    if comm.rank == 0:
        say(comm, ns.share(x))
        fill(x, 7)
        cuda.synchronize()
        comm.barrier()
    else:
        handle = say(comm)
        comm.barrier()
        x = ns.open_shared(handle)
        assert not SIMULATED or are(x, SIZE)
    comm.barrier()
    return SIMULATED, x.copy_to_host().tolist() == [7] * SIZE


def test_private_memory_of_the_simulator_is_copied_and_other_is_not():
    (simulated, _), (_, seen) = run_ranks(2, writes_after_sharing)
    assert seen is not simulated


# Order


def opens_what_is_being_written(comm):
    stream = ns.Stream()
    right = []
    for value in range(1, 6):
        if comm.rank == 0:
            x = to_device(np.zeros(SIZE, np.float32))
            fill(x, value, stream, milliseconds=200)
            if SIMULATED:  # the kernel is done, and private memory is copied
                handle = ns.share(x)
            else:
                handle = ns.share(x, stream=stream)
                right.append(not stream.query())  # share did not wait
            say(comm, handle)
            del x
        else:
            x = ns.open_shared(say(comm), stream=stream)
            y = copied(x, stream)
            del x
            stream.synchronize()
            right.append(y.copy_to_host().tolist() == [value] * SIZE)
    comm.barrier()
    return right, becomes(nothing_is_shared)


def test_a_consumer_reads_after_the_producers_slow_kernel():
    for right, clean in run_ranks(2, opens_what_is_being_written):
        assert all(right)
        assert clean


def gives_back_what_it_is_writing(comm, how):
    stream = ns.Stream()
    with ns.Communicator(comm.among([comm.rank]), timeout=60) as own:
        x = own.zeros(SIZE, np.float32)
        handle = say(comm, ns.share(x) if comm.rank == 0 else None)
        if comm.rank == 0:
            comm.barrier()
            gone = becomes(nothing_is_shared)
            found = copied(x).copy_to_host().tolist()
            comm.barrier()
            return gone, found == [3] * SIZE
        y = ns.open_shared(handle, stream=stream)
        fill(y, 3, stream, milliseconds=300)
        comm.barrier()
        if how == "close":
            y.close()
        else:
            del y
        done = stream.query()
        comm.barrier()
        return done, nothing_is_shared()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_an_array_is_given_back_after_the_consumers_work(how):
    assert run_ranks(2, gives_back_what_it_is_writing, how) == [(True, True)] * 2


# Another GPU than the producer's


def opens_on_another_gpu(comm):
    cuda.select_device(comm.rank)
    stream = ns.Stream()
    if comm.rank == 0:
        x = numbers(SIZE)
        fill(x, 4, stream, milliseconds=200)
        say(comm, ns.share(x, stream=stream))
        comm.barrier()
        seen = x.copy_to_host().tolist() == [5] * SIZE
        del x
        return seen, becomes(nothing_is_shared)
    x = ns.open_shared(say(comm), stream=stream)
    y = copied(x, stream)
    stream.synchronize()
    right = y.copy_to_host().tolist() == [4] * SIZE
    fill(x, 5, stream)
    x.close()
    comm.barrier()
    return right, nothing_is_shared()


def visible_gpus():
    from numba_symm.launch import devices

    return len(devices.visible_gpus())


def test_an_array_of_another_gpu():
    if visible_gpus() < 2:
        pytest.skip("fewer than 2 GPUs")
    assert run_ranks(2, opens_on_another_gpu) == [(True, True)] * 2


# Misuse


def misuses(comm):
    x = numbers(SIZE)
    handle = ns.share(x)
    errors = {
        "host array": error_of(ns.share, np.zeros(3)),
        "no array": error_of(ns.share, 3),
        "no opens": error_of(ns.share, x, opens=0),
        "half an open": error_of(ns.share, x, opens=1.5),
        "no handle": error_of(ns.open_shared, x),
    }
    handle.cancel()
    sent = sharing.new_ref_counted_sent_data(x, 0, opens=2)
    values = [sent.counter_value(), sent.file.cancel(sent.offset, sent.serial)]
    return errors, values, nothing_is_shared()


def test_misuse():
    ((errors, values, clean),) = run_ranks(1, misuses)
    assert values == [2, 2]
    assert "share: expected a device array, got ndarray in host" in errors["host array"]
    assert "share: expected a device array, got int" in errors["no array"]
    assert errors["no opens"].startswith(
        "ArgumentError: share: expected opens from 1 to 2**31 - 1, got 0;"
    )
    assert errors["half an open"].startswith(
        "ArgumentError: share: expected opens from 1 to 2**31 - 1, got 1.5;"
    )
    assert errors["no handle"].startswith("ArgumentError: open_shared: expected a han")
    assert clean
