"""Copies within kernels: which bytes of a row they copy how, at every alignment."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from numba_symm.device import packets, puts

VECTOR = 16
BASE = 1 << 20  # of both arrays, which the copies never look at


class Row:
    """Notes what a copy of a row loads and stores."""

    def __init__(self, target, source, nbytes):
        self.target, self.source, self.nbytes = target, source, nbytes
        self.vectors, self.stored = [], []

    def _store(self, target, source, size):
        """Note bytes that are stored from the same place of the source."""
        first = target - self.target
        assert source - self.source == first
        self.stored += range(first, first + size)

    def copy_element(self, target, source, size):
        assert target % size == source % size == 0
        self._store(target, source, size)

    def move(self, target, source, skipped, vectors, lane, lanes):
        loaded = VECTOR if skipped == 0 else 2 * VECTOR
        for k in range(lane, vectors, lanes):
            to, of = target + VECTOR * k, source + VECTOR * k
            assert to % VECTOR == of % VECTOR == 0
            assert self.source <= of
            assert of + loaded <= self.source + self.nbytes
            self.vectors.append(to - self.target)
            self._store(to, of + skipped, VECTOR)

    def whole(self):
        """Return the places of vectors whose loads are within the source."""
        skipped = (self.source - self.target) % VECTOR
        loaded = VECTOR if skipped == 0 else 2 * VECTOR
        places = range(-self.target % VECTOR, self.nbytes, VECTOR)
        starts = [(place, place - skipped) for place in places]
        return [p for p, at in starts if at >= 0 and at + loaded <= self.nbytes]


@settings(deadline=None)
@given(
    size=st.sampled_from([1, 2, 4, 8]),
    number=st.integers(0, 300),
    places=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    lanes=st.integers(1, 5),
)
def test_a_row_is_copied_once_and_by_vectors_where_they_fit(
    size, number, places, lanes
):
    to, of = (BASE + size * place for place in places)
    row = Row(to, of, size * number)
    moves = dict.fromkeys(["_move_aligned", "_move_shifted"], row.move)
    with patch.multiple(puts, copy_element=row.copy_element, **moves):
        for lane in range(lanes):
            puts._copy_row(to, of, row.nbytes, size, lane, lanes)
    assert sorted(row.stored) == list(range(row.nbytes))
    assert sorted(row.vectors) == row.whole()


EPOCHS = st.integers(1, 1 << 40) | st.integers((1 << 32) - 3, (1 << 32) + 3)


@settings(deadline=None)
@given(EPOCHS, st.integers(-(1 << 31), (1 << 31) - 1), st.booleans())
def test_a_packet_of_a_later_epoch_has_been_overwritten(epoch, ahead, empty):
    """Epochs are compared modulo 2**32; 0 is that of an empty mailbox."""
    found = 0 if empty else (epoch + ahead) % (1 << 32)
    packet = patch.object(
        packets, "ld_relaxed_sys_v2_u64", lambda box: (found << 32 | 7, 0)
    )
    with packet:
        overwritten = packets._is_overwritten(0, epoch)
    assert overwritten == (found != 0 and ahead > 0)
