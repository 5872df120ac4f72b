"""Kernels of a user, written with the device functions."""

from typing import Any

from numba import cuda

from numba_symm.collectives.protocols.workspace import MAX_BLOCKS, THREADS
from numba_symm.device.barriers import (
    barrier,
    barrier_arrive,
    barrier_wait,
    grid_barrier,
    grid_barrier_arrive,
    grid_barrier_wait,
)
from numba_symm.device.intrinsics import (
    array_at,
    atomic_add,
    atomic_cas,
    atomic_exch,
    device_function,
    fence_acq_rel_sys,
    globaltimer,
    ld_acquire_sys_u64,
    ld_u64,
    poll_pause,
    st_release_sys_u64,
    st_u64,
    syncthreads,
    syncthreads_or,
)
from numba_symm.device.packets import get_packets_block, put_packets_block
from numba_symm.device.puts import get_block, put_block
from numba_symm.device.signals import (
    GE,
    peer_address,
    put_signal,
    put_with_signal,
    signal_add,
    signal_set,
    wait_signal,
    wait_signal_block,
    wait_until_at,
    wait_until_block,
    word_offset,
)

DEPTH, DATA, READ = 2, 0, 1  # of a pipeline, and its channels


@device_function
def exchange(ctx: Any, inputs: int, outputs: int, rounds: int) -> None:
    """In each step, store a word for each thread of each peer, between barriers."""
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    worker = THREADS * block + thread
    for i in range(rounds):
        word = ld_u64(inputs + 8 * (rounds * worker + i))
        for r in range(ctx.size):
            place = ctx.rank * MAX_BLOCKS * THREADS + worker
            st_u64(peer_address(ctx, r) + 8 * place, word)
        if not barrier(ctx, block):
            break
        # A word of the peers' other thread, ordered by two threads' synchronization.
        for r in range(ctx.size):
            place = r * MAX_BLOCKS * THREADS + worker + 1 - 2 * thread
            word = ld_u64(peer_address(ctx, ctx.rank) + 8 * place)
            st_u64(outputs + 8 * ((rounds * worker + i) * ctx.size + r), word)
        if not barrier(ctx, block):
            break


@device_function
def see(address: int, word: int) -> None:
    """Wait until memory has a word, as a host does that then launches a kernel."""
    if cuda.threadIdx.x == 0:
        while ld_acquire_sys_u64(address) != word:
            poll_pause()


@device_function
def tell(address: int, word: int) -> None:
    """Store a word after all that this rank has done, as a host does."""
    if cuda.threadIdx.x == 0:
        st_release_sys_u64(address, word)


@device_function
def see_late(ready: int, word: int) -> None:
    """Wait for a message's copy, or if that is late, for what it has looked for."""
    if cuda.threadIdx.x == 0:
        read, late = ready + 8, ready + 16
        while ld_acquire_sys_u64(read) != word and ld_acquire_sys_u64(late) != word:
            poll_pause()
        while ld_acquire_sys_u64(ready) < word:
            poll_pause()


@device_function
def send(ctx: Any, dst: int, inputs: int, first: int, count: int) -> None:
    """Write words into a peer's buffer, and signal after each."""
    if cuda.threadIdx.x == 0:
        for i in range(first, first + count):
            st_u64(peer_address(ctx, dst) + 8 * i, ld_u64(inputs + 8 * i))
            if not put_signal(ctx, dst, 0):
                break


@device_function
def receive(ctx: Any, src: int, outputs: int, first: int, count: int) -> None:
    """Take a signal a word, which the block's other thread reads."""
    for i in range(first, first + count):
        if not wait_signal_block(ctx, src, 0):
            break
        if cuda.threadIdx.x == 1:
            word = ld_u64(peer_address(ctx, ctx.rank) + 8 * i)
            st_u64(outputs + 8 * i, word)


@device_function
def put_one_signal(ctx: Any, dst: int) -> None:
    """Signal to a peer."""
    if cuda.threadIdx.x == 0:
        put_signal(ctx, dst, 0)


@device_function
def wait_for_signal(ctx: Any, src: int) -> None:
    """Wait for a peer's signal."""
    if cuda.threadIdx.x == 0:
        wait_signal(ctx, src, 0)


@device_function
def come_late(timeout: int) -> None:
    """Wait about as long as the peers do before they give up."""
    started = globaltimer()
    while globaltimer() - started < timeout:
        poll_pause(0)


@device_function
def write(target: int, inputs: int, words: int) -> None:
    """Copy words, with plain stores."""
    for i in range(cuda.threadIdx.x, words, THREADS):
        st_u64(target + 8 * i, ld_u64(inputs + 8 * i))


@device_function
def copy(refused: Any, place: int, target: int, source: int, words: int) -> None:
    """Copy words as a copy engine does.

    After a refusal at ``place``, unless that is 0, the data is undefined: zeros here.
    """
    void = place != 0 and refused(place)
    for i in range(cuda.threadIdx.x, words, THREADS):
        word = 0
        if not void:
            word = ld_u64(source + 8 * i)
        st_u64(target + 8 * i, word)


@device_function
def read(sources: Any, outputs: int, words: int) -> None:
    """Copy the words of every rank, with plain loads."""
    for r in range(len(sources)):
        for i in range(cuda.threadIdx.x, words, THREADS):
            word = ld_u64(sources[r] + 8 * i)
            st_u64(outputs + 8 * (r * words + i), word)


@device_function
def count_under_a_lock(lock: int, word: int, times: int) -> None:
    """Increment a word by plain accesses, under a lock that is an atomic word."""
    locks = array_at(lock, 1, None)
    if cuda.threadIdx.x == 0:
        for _ in range(times):
            while atomic_cas(locks, 0, 0, 1, order="acquire") != 0:  # explore: lock
                poll_pause(0)
            st_u64(word, ld_u64(word) + 1)
            atomic_exch(locks, 0, 0, order="release")  # explore: unlock


@device_function
def last_one_reads(count: int, words: Any, rank: int, given: int, out: int) -> None:
    """Store a word and count it; the rank that counts last reads the words of all."""
    counts = array_at(count, 1, None)
    if cuda.threadIdx.x == 0:
        st_u64(words[rank], ld_u64(given))
        arrived = atomic_add(counts, 0, 1, order="release")  # explore: count
        if arrived == len(words) - 1:
            # It acquires what the counts before this one have released.
            fence_acq_rel_sys()  # explore: acquire-counts
            total = 0
            for r in range(len(words)):
                total += ld_u64(words[r])
            st_u64(out, total)


@device_function
def pipeline(
    ctx: Any, inputs: int, outputs: int, chunks: int, by_element: bool
) -> None:
    """Send chunks to the next rank, ``DEPTH`` ahead of what it has read.

    If ``by_element``, wait for data by the word's address.
    """
    thread = cuda.threadIdx.x
    right = (ctx.rank + 1) % ctx.size
    left = (ctx.rank - 1 + ctx.size) % ctx.size
    failed = False
    for step in range(chunks + DEPTH - 1):
        if step < chunks:
            free = step - DEPTH + 1
            # explore: await-credit
            if not wait_until_block(ctx, right, READ, GE, free):
                break
            slot = peer_address(ctx, right) + 8 * THREADS * (step % DEPTH)
            there = array_at(slot, THREADS, None)
            given = array_at(inputs + 8 * THREADS * step, THREADS, None)
            put_with_signal(ctx, right, DATA, there, given, 1)
        if step >= DEPTH - 1:
            chunk = step - DEPTH + 1
            if thread == 0 and by_element:
                place = ctx.pads[ctx.rank] + word_offset(ctx.size, DATA, 0)
                words = array_at(place, ctx.size, None)
                failed = not wait_until_at(ctx, words, left, GE, chunk + 1)
            if by_element:
                failed = syncthreads_or(failed)
            else:
                failed = not wait_until_block(ctx, left, DATA, GE, chunk + 1)
            if failed:
                break
            other = 1 - thread
            here = peer_address(ctx, ctx.rank) + 8 * THREADS * (chunk % DEPTH)
            word = ld_u64(here + 8 * other)
            st_u64(outputs + 8 * (THREADS * chunk + other), word)
            # Both threads have read the chunk before its credit.
            syncthreads()  # explore: all-read
            if thread == 0:
                signal_set(ctx, left, READ, chunk + 1)


@device_function
def gather_words(
    ctx: Any, sources: Any, mask: int, inputs: int, outputs: int, rounds: int
) -> None:
    """Store a word for each thread at the ranks of a mask, and wait for theirs.

    The sources are those ranks, in one of the forms that waits take.
    """
    thread, size = cuda.threadIdx.x, ctx.size
    for i in range(rounds):
        half = peer_address(ctx, ctx.rank) + 8 * THREADS * size * (i % 2)
        word = ld_u64(inputs + 8 * (rounds * thread + i))
        for r in range(size):
            if mask >> r & 1 != 0 and r != ctx.rank:
                there = peer_address(ctx, r) + 8 * THREADS * size * (i % 2)
                st_u64(there + 8 * (THREADS * ctx.rank + thread), word)
        # All threads have stored before the signals of one.
        syncthreads()  # explore: all-stored
        if thread == 0:
            for r in range(size):
                if mask >> r & 1 != 0 and r != ctx.rank:
                    signal_add(ctx, r, DATA, 1)
        if not wait_until_block(ctx, sources, DATA, GE, i + 1, mask):
            break
        for r in range(size):
            if mask >> r & 1 != 0 and r != ctx.rank:
                word = ld_u64(half + 8 * (THREADS * r + 1 - thread))
                st_u64(outputs + 8 * ((rounds * thread + i) * size + r), word)


@device_function
def exchange_between_grids(
    ctx: Any, team: Any, inputs: int, outputs: int, rounds: int
) -> None:
    """In each step, store at each rank of a team; load what other blocks stored."""
    thread, block, grid = cuda.threadIdx.x, cuda.blockIdx.x, cuda.gridDim.x
    worker = THREADS * block + thread
    other = THREADS * ((block + 1) % grid) + 1 - thread
    for i in range(rounds):
        word = ld_u64(inputs + 8 * (rounds * worker + i))
        for k in range(team.size):
            place = team.place * MAX_BLOCKS * THREADS + worker
            st_u64(peer_address(ctx, team.ranks[k]) + 8 * place, word)
        token = grid_barrier_arrive(ctx, 0, team)
        if not grid_barrier_wait(ctx, 0, token, team):
            break
        for k in range(team.size):
            place = k * MAX_BLOCKS * THREADS + other
            word = ld_u64(peer_address(ctx, ctx.rank) + 8 * place)
            st_u64(outputs + 8 * ((rounds * worker + i) * team.size + k), word)
        if not grid_barrier(ctx, 0, team):
            break


@device_function
def meet(ctx: Any, rounds: int) -> None:
    """Meet the grids of all ranks, and do nothing else."""
    for _ in range(rounds):
        if not grid_barrier(ctx, 0):
            break


@device_function
def exchange_in_teams(
    ctx: Any, team: Any, inputs: int, outputs: int, rounds: int
) -> None:
    """As ``exchange``, within a team, with an arrival apart from its wait."""
    thread = cuda.threadIdx.x
    for i in range(rounds):
        word = ld_u64(inputs + 8 * (rounds * thread + i))
        for k in range(team.size):
            place = team.place * THREADS + thread
            st_u64(peer_address(ctx, team.ranks[k]) + 8 * place, word)
        arrived = barrier_arrive(ctx, 1, team)
        if not barrier_wait(ctx, 1, arrived, team):
            break
        for k in range(team.size):
            place = k * THREADS + 1 - thread
            word = ld_u64(peer_address(ctx, ctx.rank) + 8 * place)
            st_u64(outputs + 8 * ((rounds * thread + i) * team.size + k), word)
        if not barrier(ctx, 1, team):
            break


@device_function
def put_and_get(ctx: Any, inputs: int, outputs: int, words: int) -> None:
    """Put words at the next rank; get from the one before what is there."""
    size, rank = ctx.size, ctx.rank
    there = peer_address(ctx, (rank + 1) % size) + 8 * (rank & 1)
    put_block(ctx, array_at(there, words, None), array_at(inputs, words, None))
    # All ranks' puts come before any get.
    barrier(ctx, 0)  # explore: between-copies
    before, writer = (rank - 1 + size) % size, (rank - 2 + size) % size
    there = peer_address(ctx, before) + 8 * (writer & 1)
    get_block(ctx, array_at(outputs, words, None), array_at(there, words, None))


@device_function
def pipeline_of_packets(
    ctx: Any, base: int, inputs: int, outputs: int, counts: Any, most: int
) -> None:
    """Send chunks to the next rank by packets, ``DEPTH`` ahead of what it has read.

    Each chunk has its own number of words; each mailbox has room for ``most``.
    """
    chunks = len(counts)
    thread, size, rank = cuda.threadIdx.x, ctx.size, ctx.rank
    right, left = (rank + 1) % size, (rank - 1 + size) % size
    for step in range(chunks + DEPTH - 1):
        if step < chunks:
            epoch = base + step + 1
            # What one thread acquires comes before the stores of all.
            # explore: await-packets
            if not wait_until_block(ctx, right, READ, GE, epoch - DEPTH):
                break
            box = peer_address(ctx, right) + 16 * most * (epoch % DEPTH)
            given = array_at(inputs + 8 * most * step, counts[step], None)
            put_packets_block(ctx, array_at(box, 2 * most, None), given, epoch)
        if step >= DEPTH - 1:
            chunk = step - DEPTH + 1
            epoch = base + chunk + 1
            box = peer_address(ctx, rank) + 16 * most * (epoch % DEPTH)
            out = array_at(outputs + 8 * most * chunk, counts[chunk], None)
            mailbox = array_at(box, 2 * most, None)
            if not get_packets_block(ctx, left, out, mailbox, epoch):
                break
            if thread == 0:
                signal_set(ctx, left, READ, epoch)


@device_function
def collectives_of_blocks(ws: Any, arrays: Any, blocks: Any, ahead: int) -> None:
    """Make collectives one after another, on arrays that a block uses again.

    A thread stores the elements that other threads send, and reads their results. It
    starts ``ahead`` collectives before it waits for one. After a failure, it goes on,
    but has no results.
    """
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    steps = blocks[block]
    for i in range(len(steps) + ahead):
        if i < len(steps):
            x, _ = arrays[block][i % (ahead + 1)]
            exchange, given, _, _, root, _, counts = steps[i]
            for k in range(given[1]):
                if (k // 2 + 1) % THREADS == thread:
                    st_u64(x + 8 * k, ld_u64(given[0] + 8 * k))
            exchange.start(ws, array_at(x, given[1], None), root, counts)
        if i >= ahead:
            x, out = arrays[block][(i - ahead) % (ahead + 1)]
            exchange, given, taken, in_place, root, result, counts = steps[i - ahead]
            there = x if in_place else out
            xs, outs = array_at(x, given[1], None), array_at(there, taken, None)
            if exchange.wait(ws, xs, outs, root, counts):
                for k in range(taken):
                    if (k // 2 + 1) % THREADS == thread:
                        st_u64(result + 8 * k, ld_u64(there + 8 * k))


@device_function
def collectives_of_items(ws: Any, steps: Any, ahead: int) -> None:
    """Make collectives of what each thread holds in registers."""
    worker = THREADS * cuda.blockIdx.x + cuda.threadIdx.x
    held = []
    for i in range(len(steps) + ahead):
        if i < len(steps):
            exchange, given, _, _, root, _, counts = steps[i]
            xs = cuda.local.array(given[1], None)
            for k in range(given[1]):
                xs[k] = ld_u64(given[0] + 8 * (given[1] * worker + k))
            exchange.start(ws, xs, root, counts)
            held.append(xs)
        if i >= ahead:
            exchange, given, taken, in_place, root, result, counts = steps[i - ahead]
            xs = held[i - ahead]
            outs = xs if in_place else cuda.local.array(taken, None)
            if exchange.wait(ws, xs, outs, root, counts):
                for k in range(taken):
                    st_u64(result + 8 * (taken * worker + k), outs[k])
