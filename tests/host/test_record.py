"""The record of calls: what is stored, compared and shown, by ranks of one process."""

import contextlib
import ctypes
import struct
import sys
from types import SimpleNamespace

import pytest

from numba_symm.collectives import enqueueing
from numba_symm.collectives.enqueueing import Enqueuer
from numba_symm.launch import call_records
from numba_symm.launch.call_records import CALLS, Description, Record, place
from tests.gates import answered, gate


def described(words):
    return Description("all_reduce", words, words)


@pytest.fixture
def about():
    return Description("all_reduce", "4 float32, op 'sum'", "4 float32, op 'sum'")


@pytest.fixture
def memory():
    start, end = place(100, 3)
    return bytearray(end - start)


@pytest.fixture
def ranks(memory):
    view = memoryview(memory)
    return [Record(view[:], rank, rank + 10, f"n{rank}", 3) for rank in range(3)]


def each(ranks, *texts, stream=0):
    for one in ranks:
        for text in texts:
            one.note(described(text), stream)


def test_ranks_that_make_the_same_calls_do_not_differ(ranks, monkeypatch):
    monkeypatch.setattr(
        call_records.time, "sleep", lambda _: pytest.fail("a difference")
    )
    for number in range(2 * CALLS + 7):
        each(ranks[:2], f"call {number % 5}")
        if number % 100 == 0:  # rank 2 is behind, and later catches up
            assert [one.difference() for one in ranks] == [None] * 3
    for number in range(2 * CALLS + 7):
        each(ranks[2:], f"call {number % 5}")
    assert [one.difference() for one in ranks] == [None] * 3
    assert ranks[0]._equal == [0, 2 * CALLS + 7, 2 * CALLS + 7]
    assert len(ranks[0].calls(2)) == CALLS


@pytest.mark.parametrize("before", [0, 1, 5, CALLS + 20])
@pytest.mark.parametrize("after", [0, 3, CALLS - 1])
@pytest.mark.parametrize("ahead", [0, 4])
def test_the_first_difference_is_found(ranks, before, after, ahead):
    each(ranks, *["a"] * before)
    assert ranks[0].difference() is None
    each([ranks[0], ranks[2]], "b")
    each([ranks[1]], "c")
    each(ranks, *["d"] * after)
    each([ranks[1]], *["e"] * ahead)  # which rank 0 has not made yet
    # Chains still differ where the rank that is ahead has overwritten the difference.
    found = before + 1 + max(0, after + ahead - CALLS + 1)
    assert ranks[0].difference() == ranks[2].difference() == (1, found)
    assert ranks[1].difference() == (0, found)


def test_an_order_that_differs_is_found(ranks):
    each(ranks[:1], "a", "b", "c")
    each(ranks[1:], "b", "a", "c")
    assert ranks[0].difference() == (1, 1)
    assert ranks[1].difference() == (0, 1)


def test_what_is_far_ahead_is_not_compared(ranks):
    each(ranks[:1], "a")
    each(ranks[1:], *["b"] * (CALLS + 1))
    assert ranks[0].difference() is None
    assert ranks[1].difference() is None


def test_messages_have_no_number(ranks):
    send = Description("send", "8 bytes to rank 1")
    each(ranks, "a")
    for _ in range(3):
        ranks[0].note(send, 5)
    each(ranks, "b")
    assert [one.difference() for one in ranks] == [None] * 3
    found = ranks[1].others(0)
    assert [(one.number, one.chain, one.stream) for one in found] == [
        (1, 1, 2),
        (2, 1, 2),
        (3, 1, 2),
    ]
    assert ranks[1].words(0, found[0]) == "send of 8 bytes to rank 1"
    made = call_records.steps(ranks[1].calls(0), found)
    assert [numbered for _, numbered in made] == [True, False, False, False, True]


def test_calls_after_a_capture_are_not_compared(ranks, about):
    each(ranks, "a")
    ranks[0].note_captured(about, 3)
    ranks[0].note(described("b"), 0)
    ranks[1].note(described("c"), 0)
    assert [one.difference() for one in ranks[:2]] == [None, None]
    ranks[2].note(described("b"), 0)
    assert ranks[2].difference() == (1, 2)  # neither of them has captured anything
    text = call_records.table(ranks[0])
    assert f"after 1  rank 10: captured: {about}" in text
    assert "rank 10 has captured 1 call, whose replays the record does not" in text


def test_an_earlier_difference_is_found_after_a_capture(ranks, about):
    ranks[0].note(described("a"), 0)
    ranks[1].note(described("b"), 0)
    ranks[0].note_captured(about, 3)
    each(ranks[:2], "c")
    assert ranks[0].difference() == (1, 1)


def test_an_entry_that_is_being_stored_is_not_read(ranks, memory):
    each(ranks, "a")
    at = ranks[0]._at(1, call_records._CALLS_AT) + call_records._ENTRY.size
    for first in (0, 1 + CALLS):  # the first word was stored, and the last one was not
        struct.pack_into("<Q", memory, at, first)
        assert ranks[0].call(1, 1) is None
        assert ranks[0].call(1, 1 + CALLS) is None
        assert ranks[0].calls(1) == []
        assert ranks[0].difference() is None


def test_a_difference_that_is_gone_after_a_moment_is_none(ranks, memory, monkeypatch):
    ranks[0].note(described("a"), 0)
    ranks[1].note(described("b"), 0)
    mine = ranks[0]._at(0, call_records._CALLS_AT) + call_records._ENTRY.size
    theirs = ranks[0]._at(1, call_records._CALLS_AT) + call_records._ENTRY.size

    def arrives(_):
        memory[theirs : theirs + 32] = memory[mine : mine + 32]

    monkeypatch.setattr(call_records.time, "sleep", arrives)
    assert ranks[0].difference() is None


def test_a_description_is_stored_again_when_it_was_overwritten(ranks, about):
    one = ranks[0]
    one.note(about, 0)
    for number in range(CALLS):
        one.note(described(str(number)), 0)
    assert about.number == 0
    first = ranks[1].calls(0)[0]
    assert first.number == 2
    assert ranks[1].words(0, first) == "all_reduce of 0"
    one.note(about, 0)
    entries = ranks[1].calls(0)
    assert ranks[1].words(0, entries[-1]) == str(about)
    assert ranks[1].words(0, first).startswith("a call whose description")


def test_a_long_description_is_cut(ranks):
    ranks[0].note(described("ü" * 200), 0)
    text = ranks[1].words(0, ranks[1].call(0, 1))
    assert text.startswith("all_reduce of üü")
    assert len(text.encode()) <= call_records._WORDS


def test_the_table_groups_ranks_and_marks_the_first_difference(ranks):
    each(ranks, "a", "b", "c")
    each(ranks[:2], "d")
    each(ranks[2:], "e")
    each(ranks[:1], "f")
    last = max(one.calls(rank)[-1].time for rank, one in enumerate(ranks))
    lines = call_records.table(ranks[0], now=lambda: last + 8_000_000_000).splitlines()
    assert lines == [
        "The calls of the ranks:",
        "  2  ranks 10, 11, 12: all_reduce of b",
        "  3  ranks 10, 11, 12: all_reduce of c",
        "> 4  ranks 10, 11: all_reduce of d",
        "     rank 12: all_reduce of e",
        "  5  rank 10: all_reduce of f",
        "     ranks 11, 12: not made yet",
        "rank 11 is 1 call behind: its last call is 4, all_reduce of d; it has made no "
        "other call for 8 s",
        "rank 12 is 1 call behind: its last call is 4, all_reduce of e; it has made no "
        "other call for 8 s",
    ]


def test_ranks_show_one_table(ranks):
    each(ranks, "a")
    none, first = call_records.agreed(ranks[1])
    each(ranks, "b")
    late = call_records.Cause(False, [11], "rank 11 has ended")  # after the failure
    assert call_records.agreed(ranks[0], late) == (none, first)
    assert call_records.agreed(ranks[2]) == (none, first) == (None, first)
    assert "all_reduce of a" in first
    assert "all_reduce of b" not in first


def test_ranks_show_one_cause(ranks):
    each(ranks, "a")
    each(ranks[:2], "b")
    each(ranks[2:], "c")
    ended = call_records.Cause(False, [11], "rank 11 has ended")
    why, _ = call_records.agreed(ranks[1], ended)
    text = (
        "rank 10's call 2 differs from rank 12's: all_reduce of b, and all_reduce of c"
    )
    assert why == (True, [10, 12], text)
    assert call_records.agreed(ranks[0])[0] == why


def test_calls_after_a_capture_are_no_cause(ranks):
    each(ranks, "a")
    ranks[2].note_captured(described("b"), 0)
    each(ranks[:2], "b")
    each(ranks[2:], "c")
    ended = call_records.Cause(False, [11], "rank 11 has ended")
    why, table = call_records.agreed(ranks[1], ended)
    assert why == ended
    assert "> " not in table


def test_no_call_makes_no_table(ranks):
    assert call_records.agreed(ranks[0]) == (None, "")


def enqueuer_of(monkeypatch, record, **functions):
    """Return what enqueues calls that a rank records, with a driver of functions."""
    made = gate(monkeypatch, **functions)
    made.board.record = record
    nothing = lambda stream: contextlib.nullcontext()  # noqa: E731
    order = SimpleNamespace(gate=made.gate, eager=nothing, captured=nothing)
    members = SimpleNamespace(
        board=made.board,
        engine=object(),  # without graphs
        gpu=SimpleNamespace(ordinal=0),
    )
    return Enqueuer(members, order, None)


@pytest.mark.parametrize("captured", [False, True])
def test_a_call_is_recorded_before_its_launch(ranks, about, monkeypatch, captured):
    stream, seen = 0xA0, []

    def asked(stream, answer):
        answered(answer, captured, ctypes.c_int)

    enqueuer = enqueuer_of(monkeypatch, ranks[0], cuStreamIsCapturing=asked)
    call = enqueuer.pack(about, lambda _: seen.append(ranks[0].number))
    enqueuer.run(call, stream)
    assert seen == [0 if captured else 1]
    assert ranks[0].own.captures == captured


def test_a_tag_is_in_the_record_while_its_block_lasts(ranks):
    one = ranks[0]
    with one.tagged("step 3"):
        assert one.own.tag == b"step 3"
        one.note(described("a"), 0)
        with one.tagged("inner"):
            one.note(described("b"), 7)
            assert "rank 10 is at the last call within 'inner'" in call_records.table(
                one
            )
    assert one.own.tag == b""
    names = [one.words(0, entry) for entry in one.others(0)]
    assert names == ["tag: step 3", "tag: inner", "end of a tag", "end of a tag"]
    found = [each for each in call_records.events(one) if each["pid"] == 10]
    assert found[0]["args"] == {"name": "rank 10 on n0"}
    slices = {each["name"]: each for each in found[1:]}
    assert set(slices) == {"step 3", "inner", "all_reduce of a", "all_reduce of b"}
    assert slices["all_reduce of b"]["args"] == {"stream": 2, "number": 2}
    start = {name: each["ts"] for name, each in slices.items()}
    end = {name: each["ts"] + each["dur"] for name, each in slices.items()}
    assert start["step 3"] <= start["all_reduce of a"] <= start["inner"]
    assert end["all_reduce of a"] <= start["inner"] + 1
    assert end["all_reduce of b"] <= end["inner"] + 1 <= end["step 3"] + 2
    assert slices["step 3"]["tid"] == 0


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("installed", [False, True])
def test_calls_are_ranges_of_a_profiler(ranks, about, monkeypatch, attached, installed):
    seen = []
    fake = SimpleNamespace(
        push_range=lambda text, domain: seen.append((domain, text)),
        pop_range=lambda domain: seen.append((domain, "end")),
    )
    monkeypatch.delenv(enqueueing.ATTACHED, raising=False)
    if attached:
        monkeypatch.setenv(enqueueing.ATTACHED, "x.so")
    find = {"nvtx": object() if installed else None}.get
    monkeypatch.setattr(enqueueing.importlib.util, "find_spec", find)
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    enqueuer = enqueuer_of(monkeypatch, ranks[0])
    with enqueuer.tagged("step 3"):
        call = enqueuer.pack(about, lambda _: seen.append("launch"))
        enqueuer.run(call, 0)
    texts = ["step 3", str(about), "launch", "end", "end"]
    if not (attached and installed):
        texts = ["launch"]
    expected = [t if t == "launch" else ("numba_symm", t) for t in texts]
    assert seen == expected


def test_calls_of_other_islands_in_the_table():
    mine = call_records.Sent(0, 9, {n: (n, f"call of kind {n}") for n in range(4, 9)})
    same = mine._replace(name=2)
    assert call_records._across(mine, same) == []
    (late,) = call_records._across(mine, call_records.Sent(2, 9, {7: (7, "x")}))
    assert late == (
        "rank 2 is 1 call behind rank 0 of another island: its last call is 7, x"
    )
    (late,) = call_records._across(call_records.Sent(2, 9, {}), mine)
    assert late.startswith("rank 2 is 8 calls behind rank 0 of another island: ")
    other = same._replace(calls=mine.calls | {6: (1, "y"), 7: (2, "z")})
    assert call_records._across(mine, other) == [
        "Calls differ between islands, from call 6 on:",
        "  rank 0: call of kind 6",
        "  rank 2: y",
    ]
    assert call_records._across(mine, other._replace(compared=5)) == []  # a capture
    other = same._replace(calls={n: (0, "y") for n in range(4, 9)})
    first = call_records._across(mine, other)[0]
    assert first.endswith("from call 4 on, or from an earlier one:")
