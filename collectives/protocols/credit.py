"""Flags, credit and lengths of the chunks that messages consist of.

See ``kernels/transfer.py`` for their meaning and for the accesses that they order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba_symm.collectives.protocols.workspace import (
    DEPTH,
    THREADS,
    sync_block,
    sync_block_or,
)
from numba_symm.device.intrinsics import (
    device_function,
    fence_acq_rel_sys,
    ld_acquire_sys_u64,
    ld_relaxed_sys_u64,
    ld_u64,
    st_relaxed_sys_u32,
    st_relaxed_sys_u64,
    st_u64,
    thread_index_x,
    word_of,
)
from numba_symm.device.polling import fail, make_wait, wait_for_epoch, wait_record
from numba_symm.launch.failures import (
    COUNT_TOO_LARGE,
    TRANSFER,
    TRANSFER_MISMATCH,
    TRANSFER_TOO_LONG,
)

ABSENT = -1
"""Replaces the bytes of a message that does not exist, or that failed."""

LOW_HALF = 0xFFFFFFFF

# A flag has the lowest bits of the chunk's number, which is at most DEPTH ahead of the
# receiver's. The other 48 bits have the bytes of any message.
NUMBER_BITS = 16
NUMBER = (1 << NUMBER_BITS) - 1


MOST_SHOWN = (1 << 24) - 1
"""The largest count that a record can show; it stands for more, and for less than 0."""


class Span(NamedTuple):
    """Where elements begin, of which a sender has the count on its GPU.

    Attributes:
        before: how many counts, those before the message's own in memory, are added up
            to the index of the first element.
        displ_at: the address of an int64 that has this index; 0: they are added up.
        limit: the elements of the array; the message ends within it.
    """

    before: int = 0
    displ_at: int = 0
    limit: int = 0


class Message(NamedTuple):
    """What one rank sends to, or receives from, another.

    Attributes:
        peer: the other rank.
        address: where it is loaded, or stored.
        nbytes: how much, equal at both ends; with ``count_at``, the most that may
            arrive.
        count_at: on the receiver, the address of an int64 that gets the number of
            elements that arrived; 0: ``nbytes`` arrive. On the sender, the address of
            an int64 that has the number when the kernel runs; 0: ``nbytes`` are sent.
        itemsize: the bytes of an element, if there is a count.
        span: on the sender, if there is a count: where the elements begin.
    """

    peer: int
    address: int
    nbytes: int
    count_at: int = 0
    itemsize: int = 1
    span: Span = Span()


@device_function
def read_span(
    guard: Any, peer: int, capacity: int, count_at: int, span: Any, failed: bool
) -> Any:
    """Read how many elements to send, and where they begin; all threads call it.

    Returns:
        The count and the index of the first element; ABSENT and 0 if there are more
        than the capacity, or beyond the array, or if the thread has failed.
    """
    before, displ_at, limit = span
    if failed:
        return ABSENT, 0
    count = word_of(ld_u64(count_at))
    first, other, number = 0, peer, count  # the rank whose count is reported
    fits = 0 <= count <= capacity
    if displ_at != 0:
        first = word_of(ld_u64(displ_at))
    else:
        for i in range(before):
            earlier = word_of(ld_u64(count_at - 8 * (i + 1)))
            first += earlier
            if not 0 <= earlier <= capacity:
                fits, other, number = False, peer - i - 1, earlier
    fits = fits and 0 <= first <= limit - count
    if not fits:  # explore: capacity
        # Also of a count before this one: its own block may find the rank's mark first,
        # which this block leaves, and then it reports nothing.
        if thread_index_x() == 0:  # explore: report
            shown = number if 0 <= number < MOST_SHOWN else MOST_SHOWN
            at_most = min(capacity, 0xFFFF)
            record = wait_record(COUNT_TOO_LARGE, guard.rank, other, at_most, shown)
            fail(guard, record)
        return ABSENT, 0
    return count, first


@device_function
def find_span(guard: Any, peer: int, message: Any, failed: bool) -> Any:
    """Return where a block's message begins, and its bytes; ABSENT after a failure.

    ``message`` is its array, its capacity, the address of its count, what a receiver
    has, its ``Span`` and the bytes of an element.
    """
    address, capacity, count_at, _, span, itemsize = message
    count, first = read_span(guard, peer, capacity, count_at, span, failed)
    # A thread may have failed before, and others of its block not.
    if sync_block_or(count == ABSENT):
        return address, ABSENT
    return address + first * itemsize, count * itemsize


@device_function
def end_of(place: int, rank: int, others: int) -> Any:
    """Return whether a block sends, and its peer, from its place in its channel.

    The blocks of a channel are in the order of (source, target) on all ranks. So they
    could even run one after another, as the simulator's do, if each rank's messages are
    in one launch. If they are in several, large messages between three ranks may wait
    for each other in the simulator, but not on a GPU.
    """
    sending = rank <= place < rank + others
    peer = place if place < rank else place - others + 1
    if sending:
        peer = place - rank if place - rank < rank else place - rank + 1
    return sending, peer


def make_task(size: int, alone: bool) -> Callable[..., Any]:
    """Return a device function for what a block does.

    ``(block, grid, direction, rank)`` returns the number of the block in the workspace,
    its channel, the number of channels of the launch, whether it sends, and the peer.
    """
    others, pairs = size - 1, 2 * (size - 1)

    @device_function
    def task(block: int, grid: int, direction: int, rank: int) -> Any:
        channel, place, launched = block // pairs, block % pairs, grid // pairs
        if alone:
            channel, place, launched = block, direction, grid
            block = pairs * channel + place
        sending, peer = end_of(place, rank, others)
        return block, channel, launched, sending, peer

    return task


@device_function
def _raise_flag(address: int, word: int) -> None:
    # What the whole block has stored of the chunk precedes its flag.
    sync_block()  # explore: flag-synchronize
    if thread_index_x() == 0:
        fence_acq_rel_sys()  # explore: flag-fence
        st_relaxed_sys_u64(address, word)


@device_function
def _give_credit(address: int, epoch: int) -> None:
    # What the whole block has read of the chunk precedes its credit.
    sync_block()  # explore: credit-synchronize
    if thread_index_x() == 0:
        fence_acq_rel_sys()  # explore: credit-fence
        st_relaxed_sys_u32(address, epoch)


@device_function
def hand_over(sending: bool, flag: int, word: int, credit: int, epoch: int) -> None:
    """Raise the flag of a chunk that was sent, or give credit for one that was read."""
    if sending:
        _raise_flag(flag, word)
    else:
        _give_credit(credit, epoch)


@device_function
def _has_number(flag: int, epoch: int) -> bool:
    # explore: await
    return (ld_acquire_sys_u64(flag) ^ epoch) & NUMBER == 0


_await_chunk = make_wait(_has_number)


@device_function
def _has_length(address: int, _: int) -> bool:
    return ld_relaxed_sys_u64(address) != 0  # publishes nothing else


_await_length = make_wait(_has_length)


@device_function
def await_turn(
    guard: Any,
    peer: int,
    channel: int,
    sending: bool,
    credit: int,
    flag: int,
    epoch: int,
    word: int,
) -> bool:
    """Wait until a chunk may be sent or received; return whether the thread gave up.

    It waits for the credit of the chunk that was in the slot before, or for the flag of
    this chunk, which must be ``word``.
    """
    failed = False
    record = wait_record(TRANSFER, guard.rank, peer, channel, epoch)
    if sending:
        due = (epoch - DEPTH) & LOW_HALF  # explore: due
        # explore: wait
        failed = not wait_for_epoch(guard, credit, due, record)
    else:
        failed = not _await_chunk(guard, flag, epoch, record)
        # explore: word
        if not failed and ld_relaxed_sys_u64(flag) != word:
            failed = True
            record = wait_record(TRANSFER_MISMATCH, guard.rank, peer, 0, 0)
            fail(guard, record)
    return failed


@device_function
def _learn_bytes(
    guard: Any,
    channel: int,
    flag: int,
    epoch: int,
    length: int,
    record: int,
    failed: bool,
) -> int:
    # Every thread waits for itself, because all of them need the word. Returns
    # ABSENT in all threads of the block if one of them has failed.
    nbytes = 0
    if channel == 0:
        if not failed:
            failed = not _await_chunk(guard, flag, epoch, record)
        nbytes = word_of(ld_relaxed_sys_u64(flag)) >> NUMBER_BITS
    else:
        if not failed:
            failed = not _await_length(guard, length, 0, record)
        nbytes = word_of(ld_relaxed_sys_u64(length)) - 1
    # All threads have read the word before it is cleared for the next launch.
    if sync_block_or(failed):  # explore: agree-length
        return ABSENT
    if channel > 0 and thread_index_x() == 0:
        st_relaxed_sys_u64(length, 0)  # explore: clear
    return nbytes


@device_function
def _fits_not(nbytes: int, room: int, shift: int, elements: int) -> bool:
    # A number of bytes that is not a multiple of an element has lower bits, or makes
    # ``elements`` negative or larger than any room (see transfer._divisor).
    whole = nbytes >> shift << shift == nbytes and 0 <= elements <= nbytes
    return nbytes > room or not whole  # explore: room


def make_learn(most: int) -> Callable[..., int]:
    """Return a device function by which a block learns the bytes of a message.

    ``(guard, end, epoch, flags, lengths, expected, failed)`` returns them; ABSENT if
    the block has failed.

    - ``end`` is ``(peer, channel, launched)``, with the number of channels of the
      launch.
    - ``epoch`` is the number of the channel's last chunk.
    - ``flags`` is where the channel's flags begin.
    - ``expected`` is ``(room, count_at, (shift, inverse))``.

    Args:
        most: how many words for lengths a channel has; ``lengths`` is the address of
            the message's word in channel 0.
    """

    @device_function
    def pass_on(lengths: int, launched: int, nbytes: int) -> None:
        # To the blocks of the pair's other channels, each of which has a word.
        channel = 1 + thread_index_x()
        while channel < launched:
            st_relaxed_sys_u64(lengths + 8 * most * channel, nbytes + 1)
            channel += THREADS

    @device_function
    def learn(
        guard: Any,
        end: Any,
        epoch: int,
        flags: int,
        lengths: int,
        expected: Any,
        failed: bool,
    ) -> int:
        peer, channel, launched = end
        room, count_at, (shift, inverse) = expected
        epoch = (epoch + 1) & LOW_HALF
        flag = flags + 8 * (epoch % DEPTH)
        record = wait_record(TRANSFER, guard.rank, peer, channel, epoch)
        length = lengths + 8 * most * channel
        nbytes = _learn_bytes(guard, channel, flag, epoch, length, record, failed)
        elements = word_of((nbytes >> shift) * inverse)
        if nbytes == ABSENT:
            return ABSENT
        if _fits_not(nbytes, room, shift, elements):
            if thread_index_x() == 0:
                record = wait_record(TRANSFER_TOO_LONG, guard.rank, peer, 0, 0)
                fail(guard, record)
            return ABSENT
        if channel == 0:
            pass_on(lengths, launched, nbytes)  # explore: pass-on
            if thread_index_x() == 0:
                st_u64(count_at, elements)
        return nbytes

    return learn
