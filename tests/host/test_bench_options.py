import argparse

import pytest

from numba_symm.bench import options
from numba_symm.bench.operations import OPERATIONS, REDUCTIONS, TYPES
from numba_symm.launch import cli

REDUCING = ["all_reduce", "reduce", "reduce_scatter"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", 1), ("512", 512), ("1K", 1024), ("3m", 3 << 20), ("1G", 1 << 30)],
)
def test_sizes_have_binary_suffixes(text, wanted):
    assert options.nbytes(text) == wanted


@pytest.mark.parametrize("text", ["", "K", "0", "-4", "1.5K", "12KB", "1e6"])
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give bytes such as 512, 64K"):
        options.nbytes(text)


def test_sizes_grow_by_the_factor_up_to_the_last():
    assert list(options.sizes(1024, 1 << 20, 4)) == [1 << n for n in range(10, 21, 2)]
    assert list(options.sizes(100, 999, 3)) == [100, 300, 900]
    assert list(options.sizes(7, 7, 2)) == [7]


def test_the_command_of_the_readme_is_understood():
    line = "all_reduce -b 1K -e 1G -f 4 -d float -o sum -n 20 -w 5 -G 20"
    asked = options.parse([*line.split(), "--against", "nccl,nccl-symm,torch,mpi"])
    assert (asked.first, asked.last, asked.factor) == (1 << 10, 1 << 30, 4)
    assert (asked.types, asked.reductions) == (("float",), ("sum",))
    assert (asked.calls, asked.warmups, asked.replays) == (20, 5, 20)
    assert asked.against == ("nccl", "nccl-symm", "torch", "mpi")
    assert asked.algorithms == ()


def test_all_means_all():
    asked = options.parse(["all_reduce", "-d", "all", "-o", "all", "--against", "all"])
    assert asked.types == tuple(TYPES)
    assert asked.reductions == REDUCTIONS
    assert "mpi" in asked.against
    every = options.parse(["all_reduce", "--algorithm", "all"]).algorithms
    assert every == OPERATIONS["all_reduce"].algorithms


def test_shuffling_takes_every_type_and_reduction_unless_told():
    asked = options.parse(["all_reduce", "--shuffle", "9"])
    assert (asked.types, asked.reductions) == (tuple(TYPES), REDUCTIONS)
    asked = options.parse(
        ["all_reduce", "--shuffle", "9", "-d", "half", "-o", "min,max"]
    )
    assert (asked.types, asked.reductions) == (("half",), ("min", "max"))


@pytest.mark.parametrize("more", [[], ["--shuffle", "9"]])
@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - REDUCING))
def test_an_operation_that_only_moves_data_has_no_reduction(name, more, capsys):
    assert options.parse([name, *more]).reductions == ("none",)
    with pytest.raises(SystemExit) as ended:
        options.parse([name, *more, "-o", "max"])
    assert ended.value.code == 2
    assert "unrecognized arguments: -o max" in capsys.readouterr().err


@pytest.mark.parametrize("name", REDUCING)
def test_an_operation_that_reduces_has_a_choice(name):
    assert options.parse([name, "-o", "max,avg"]).reductions == ("max", "avg")


def test_each_run_has_a_seed_of_its_own_unless_told():
    seeds = {options.parse(["all_reduce"]).seed for _ in range(4)}
    assert len(seeds) > 1
    assert options.parse(["all_reduce", "--seed", "5"]).seed == 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "arguments are required: command"),
        ("all_reduced", "invalid choice: 'all_reduced'"),
        ("all_reduce -b 1X", "'1X' is no size"),
        ("all_reduce -b 2K -e 1K", "-b 2048 is more than -e 1024"),
        ("all_reduce -f 1", "'1': give at least 2"),
        ("all_reduce -n 0", "'0': give at least 1"),
        ("all_reduce -c 2", "invalid choice: 2"),
        ("all_reduce -d float,complex", "give some of half, bfloat16, float"),
        ("all_reduce -o median", "give some of sum, prod, min, max"),
        ("all_reduce --against nccl,rccl", "give some of nccl, nccl-symm, torch, mpi"),
        ("all_reduce --algorithm ring", "give some of"),
        ("all_reduce --json /not/there/r.json", "there is no folder /not/there"),
        ("all_reduce --shuffle 5 --plot r.png", "--shuffle measures nothing"),
        ("all_reduce -q", "unrecognized arguments: -q"),
        ("plot r.json", "arguments are required: image"),
        ("plot /not/there.json r.png", "/not/there.json: No such file or directory"),
        ("plot / r.png", "/: Is a directory"),
    ],
)
def test_wrong_usage_ends_with_code_2_and_says_why(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(line.split())
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: " in shown
    assert said in shown


def test_help_names_letters_and_choices(capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(["all_reduce", "-h"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for words in ("-b SIZE", "-G N", "--against", "nccl-symm", "bfloat16", "--shuffle"):
        assert words in shown


def test_plotting_without_matplotlib_is_refused_before_the_run(monkeypatch, capsys):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        options.parse(["all_reduce", "--plot", "r.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-h"], ["plot", "-h"]])
def test_the_numba_symm_command_hands_all_words_on(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *words])
    assert ended.value.code == 0
    assert "python -m numba_symm.bench" in capsys.readouterr().out
