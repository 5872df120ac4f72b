"""Steps of several ranks at their boards, while one of them may fail at any step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_symm.errors import CollectiveError
from numba_symm.launch import board
from numba_symm.launch.waiting import Wait
from tests.boards import on_ranks


def taken(made, rank, step, came, n):
    """Make a step with other ranks; return the failure's text, or None."""
    kind, nbytes = step
    came.add(rank)
    if kind == "gate":
        failure = made.gate(Wait("zeros", rank, 600))
        assert failure or len(came) == n, "passed a gate before all had come"
        return failure and failure.text
    try:
        found = made.all_gather(bytes([rank]) * nbytes * rank, Wait("zeros", rank, 600))
    except CollectiveError as error:
        return str(error)
    assert found == [bytes([r]) * nbytes * r for r in range(n)]
    return None


STEPS = st.tuples(st.sampled_from(["gate", "gather"]), st.sampled_from([0, 9, 5000]))


@settings(max_examples=150, deadline=None, database=None)
@given(
    n=st.integers(2, 4),
    steps=st.lists(STEPS, min_size=1, max_size=5),
    failing=st.tuples(st.integers(0, 3), st.integers(0, 4)),
)
def test_all_ranks_make_a_step_or_none_whoever_fails(n, steps, failing):
    came = [set() for _ in steps]

    def play(made, comm):
        for number, step in enumerate(steps):
            if (comm.rank, number) == failing:
                made.abandon("is away")
                return number, "is away"
            text = taken(made, comm.rank, step, came[number], n)
            if text:
                return number, text
        return len(steps), None

    def staying(made, comm):
        try:
            outcome = play(made, comm)
        except Exception as error:
            outcome = None, repr(error)
        comm.barrier()  # the process of who has failed does not end
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "SIMULATED", True)
        found = on_ranks(n, staying)
    first = failing[1] if failing[0] < n and failing[1] < len(steps) else None
    if first is None:
        assert found == [(len(steps), None)] * n
        return
    for passed, text in found:
        assert "is away" in text
        # A rank that fails may not have let others leave the gathering before.
        assert passed == first or (first and steps[first - 1][0] == "gather")
