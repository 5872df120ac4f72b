import pytest

from numba_symm.errors import ArgumentError, DeviceError, ExchangeError, SymmError
from numba_symm.launch.store import StoreExchange
from tests.threads import outcomes, run_ranks


def on_ranks(n, body):
    """Return each rank's outcome of ``body(exchange)``."""
    return outcomes(n, lambda comm: body(StoreExchange(comm, "test")))


def texts(errors, kind):
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    return {str(error) for error in errors}


def test_values_arrive_in_rank_order():
    def body(exchange):
        first = exchange.all_gather(bytes([exchange.rank]), "bytes")
        exchange.barrier("pause")
        return first, exchange.all_gather((exchange.rank, "x"), "pairs")

    expected = [b"\0", b"\1", b"\2"], [(0, "x"), (1, "x"), (2, "x")]
    assert on_ranks(3, body) == [expected] * 3


def test_an_error_names_the_different_calls_of_ranks():
    def body(exchange):
        exchange.barrier("start")
        exchange.all_gather(0, "close" if exchange.rank == 0 else "rendezvous")

    assert texts(on_ranks(3, body), ExchangeError) == {
        "rank 0 is at 'close' (test, step 1), ranks 1, 2 are at 'rendezvous' "
        "(test, step 1): every rank must make the same calls in the same order"
    }


def test_ranks_of_different_stores_raise():
    def play(comm):
        StoreExchange(comm, f"store {comm.rank}").barrier("close")

    (text,) = texts(outcomes(2, play), ExchangeError)
    assert "rank 1 is at 'close' (store 1, step 0)" in text


def test_a_message_of_other_code_raises():
    def play(comm):
        if comm.rank == 1:
            comm.allgather("mine")
        else:
            StoreExchange(comm, "test").barrier("open" if comm.rank else "close")

    error, _, other = outcomes(3, play)
    assert {type(error), type(other)} == {ExchangeError}
    found = "rank 0 is at 'close' (test, step 0), rank 1 is at a call that is not "
    found += "numba_symm's (str), rank 2 is at another call of numba_symm's"
    assert found in str(error)
    assert "rank 2 is at 'open' (test, step 0)" in str(other)


def test_two_stores_count_their_own_steps():
    def play(comm):
        one, two = StoreExchange(comm, "one"), StoreExchange(comm, "two")
        one.barrier("a")
        return two.all_gather(comm.rank, "b"), one.all_gather(-comm.rank, "c")

    assert run_ranks(2, play) == [([0, 1], [0, -1])] * 2


def test_one_failure_is_raised_on_every_rank():
    def body(exchange):
        with exchange.agreed("rendezvous"):
            if exchange.rank == 2:
                raise DeviceError("no room\nfor it")

    errors = on_ranks(4, body)
    assert texts(errors, DeviceError) == {
        "rendezvous failed on 1 of 4 ranks:\n  rank 2: no room\n    for it"
    }
    assert [str(error.__cause__) for error in errors] == [
        *["None"] * 2,
        "no room\nfor it",
        "None",
    ]


def test_an_error_names_all_failed_ranks_and_has_the_lowest_ones_class():
    def body(exchange):
        with exchange.agreed("binding"):
            if exchange.rank == 1:
                raise DeviceError("gone")
            if exchange.rank >= 2:
                raise ArgumentError("wrong")

    assert texts(on_ranks(4, body), DeviceError) == {
        "binding failed on 3 of 4 ranks:\n  rank 1: gone\n  ranks 2, 3: wrong"
    }


def test_an_error_from_elsewhere_is_raised_as_the_librarys():
    def body(exchange):
        with exchange.agreed("opening"):
            if exchange.rank == 0:
                raise FileNotFoundError(2, "No such file", "x")

    errors = on_ranks(2, body)
    assert texts(errors, SymmError) == {
        "opening failed on 1 of 2 ranks:\n"
        "  rank 0: FileNotFoundError: [Errno 2] No such file: 'x'"
    }
    assert isinstance(errors[0].__cause__, FileNotFoundError)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_and_releases_the_others(kind):
    raised = kind()

    def body(exchange):
        with exchange.agreed("opening"):
            if exchange.rank == 0:
                raise raised

    first, *others = on_ranks(3, body)
    assert first is raised
    assert texts(others, SymmError) == {
        f"opening failed on 1 of 3 ranks:\n  rank 0: {kind.__name__}"
    }


def test_an_exchange_inside_an_agreed_block_that_fails_raises():
    def body(exchange):
        with exchange.agreed("opening"):
            if exchange.rank == 0:
                raise DeviceError("gone")
            exchange.barrier("inside")

    errors = on_ranks(2, body)
    (text,) = texts(errors, ExchangeError)
    assert (
        "rank 0 is at 'opening: outcome' (test, step 0), rank 1 is at 'inside'" in text
    )
    assert isinstance(errors[0].__context__, DeviceError)


def test_ranks_that_went_astray_never_wait_for_each_other_again():
    def body(exchange):
        with pytest.raises(ExchangeError, match="close"):
            exchange.barrier("close" if exchange.rank == 0 else "open")
        if exchange.rank == 1:
            exchange.barrier("again")

    nothing, error = on_ranks(2, body)
    assert nothing is None
    assert "rank 0 is at 'close'" in str(error)


def test_usual_values_are_sent_only_if_they_differ():
    sent = []

    def body(exchange):
        gathered = exchange._gathered
        exchange._gathered = lambda *given: sent.append(given[0]) or gathered(*given)
        found = []
        for value in ("x" * 999, "x" * 999 + "y" * (exchange.rank == 1)):
            with exchange.agreed("settings") as each:
                each.mine, each.usual = exchange.rank, value
            found.append([*zip(each.all, map(len, each.usuals), strict=True)])
        return found

    equal, different = [(0, 999), (1, 999)], [(0, 999), (1, 1000)]
    assert on_ranks(2, body) == [[equal, different]] * 2
    assert sum(len(str(each)) > 999 for each in sent) == 2


def test_equal_facts_pass_and_differing_ones_raise_on_all():
    def body(exchange):
        exchange.agree_equal("8 float32", "all_reduce")
        count = 4096 if exchange.rank == 2 else 2048
        exchange.agree_equal(f"{count} float32", "all_reduce")

    assert texts(on_ranks(4, body), ArgumentError) == {
        "all_reduce: ranks 0, 1, 3 have 2048 float32, rank 2 has 4096 float32; "
        "every rank must pass the same"
    }
