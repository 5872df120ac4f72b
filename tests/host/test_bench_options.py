import argparse
import os

import pytest

from numba_symm.bench import options
from numba_symm.bench.bench_operations import OPERATIONS, REDUCTIONS, TYPES
from numba_symm.bench.sweep import rows
from numba_symm.collectives import operations
from numba_symm.command import cli

REDUCING = [name for name, each in operations.OPERATIONS.items() if each.reduces]
REDUCING += ["reduce_scatter_v"]
CODED = ["all_reduce_int8", "all_reduce_fp8", "rms_norm"]
MOVING = sorted(OPERATIONS.keys() - {*REDUCING, *CODED, "barrier"})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", 1), ("512", 512), ("1K", 1024), ("3m", 3 << 20), ("1G", 1 << 30)],
)
def test_sizes_have_binary_suffixes(text, wanted):
    assert options.nbytes(text) == wanted


@pytest.mark.parametrize("text", ["", "K", "0", "-4", "1.5K", "12KB", "1e6"])
def test_a_wrong_size_is_refused_with_examples(text):
    wanted = "expected bytes such as 512, 64K"
    with pytest.raises(argparse.ArgumentTypeError, match=wanted):
        options.nbytes(text)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-b 1K -e 1M", [1 << n for n in range(10, 21, 2)]),
        ("-b 100 -e 999 -f 3", [100, 300, 900]),
        ("-b 7 -e 7 -f 2", [7]),
        ("-b 1K -e 4K -i 1K", [1024, 2048, 3072, 4096]),
        ("-b 100 -e 399 -i 100", [100, 200, 300]),
    ],
)
def test_sizes_grow_by_a_factor_or_a_step_up_to_the_last(line, wanted):
    asked = options.parse(["all_reduce", *line.split()])
    assert list(options.sizes(asked)) == wanted


def test_a_command_with_many_options_is_parsed():
    line = "all_reduce -b 1K -e 1G -f 4 -d float -o sum -n 20 -w 5 -G 20"
    asked = options.parse([*line.split(), "--against", "nccl,nccl-symm,torch,mpi"])
    assert (asked.first, asked.last, asked.factor) == (1 << 10, 1 << 30, 4)
    assert (asked.types, asked.reductions) == (("float",), ("sum",))
    assert (asked.calls, asked.warmups, asked.replays) == (20, 5, 20)
    assert asked.against == ("nccl", "nccl-symm", "torch", "mpi")
    assert asked.algorithms == ()


def test_all_selects_every_name():
    asked = options.parse(["all_reduce", "-d", "all", "-o", "all", "--against", "all"])
    assert asked.types == tuple(TYPES)
    assert asked.reductions == REDUCTIONS
    assert "mpi" in asked.against
    every = options.parse(["all_reduce", "--algorithm", "all"]).algorithms
    assert every == OPERATIONS["all_reduce"].algorithms


def test_a_barrier_has_one_call_without_a_size():
    asked = options.parse(["barrier", "--overlap"])
    (row,) = rows(OPERATIONS["barrier"], asked, ranks=4)
    assert (row.nbytes, row.op) == (0, "none")


def test_the_messages_of_a_window_count_together():
    asked = options.parse(["sendrecv", "-b", "64", "-e", "256", "--window", "5"])
    found = rows(OPERATIONS["sendrecv"], asked, ranks=4)
    kinds = [(row.nbytes, row.counts, row.messages) for row in found]
    assert kinds == [(320, (80, 80), 5), (1280, (320, 320), 5)]


def test_options_that_have_a_value_are_noted():
    line = "--overlap -f 2 -o max -n 9 -G 1 -c 0 --against mpi --algorithm all --plain"
    given = [word for word in line.split() if word[0] == "-"]
    asked = options.parse(["all_reduce", *line.split()])
    assert list(asked.given) == [
        name for name in given if name not in {"--overlap", "--plain"}
    ]


@pytest.mark.parametrize("name", MOVING)
def test_an_operation_that_only_moves_data_has_no_reduction(name, capsys):
    assert options.parse([name]).reductions == ("none",)
    with pytest.raises(SystemExit) as ended:
        options.parse([name, "-o", "max"])
    assert ended.value.code == 2
    assert "unrecognized arguments: -o max" in capsys.readouterr().err


@pytest.mark.parametrize("name", REDUCING)
def test_an_operation_that_reduces_takes_reductions(name):
    assert options.parse([name, "-o", "max,prod"]).reductions == ("max", "prod")


@pytest.mark.parametrize("name", CODED)
def test_a_sum_by_codes_takes_its_types_only(name, capsys):
    assert options.parse([name, "-d", "all"]).types == (
        "half",
        "bfloat16",
        "float",
    )
    with pytest.raises(SystemExit):
        options.parse([name, "-d", "int32"])
    assert "expected some of half, bfloat16, float" in capsys.readouterr().err


def test_a_scan_has_no_average(capsys):
    every = ("sum", "prod", "min", "max")
    assert options.parse(["scan", "-o", "all"]).reductions == every
    with pytest.raises(SystemExit):
        options.parse(["scan", "-o", "avg"])
    assert "expected some of sum, prod, min, max, or all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "arguments are required: OPERATION"),
        ("all_reduced", "invalid choice: 'all_reduced' (did you mean 'all_reduce'?)"),
        ("all_reduce -d flaot", "or all, got 'flaot' (did you mean 'float'?)"),
        ("all_reduce -b 1X", "16M or 1G, got '1X'"),
        ("all_reduce -b 2K -e 1K", "-b of at most -e, got -b 2048 -e 1024"),
        ("all_reduce -f 1", "expected a number of at least 2, got '1'"),
        ("all_reduce -f 2 -i 1K", "argument -i: not allowed with argument -f"),
        ("all_reduce -i 0", "expected bytes such as 512"),
        ("all_reduce -n 0", "expected a number of at least 1, got '0'"),
        ("all_reduce -c 2", "invalid choice: 2"),
        ("all_reduce -d float,complex", "expected some of half, bfloat16, float"),
        ("all_reduce -o median", "expected some of sum, prod, min, max"),
        ("all_reduce --against rccl", "expected some of nccl, nccl-cupy, nccl-symm,"),
        ("all_reduce --algorithm ring", "expected some of"),
        ("all_reduce --json /not/there/r.json", "can write, got /not/there/r.json"),
        ("all_reduce --json /", "that you can write, got /"),
        ("all_reduce --overlap -G 0", "--overlap replays graphs; pass -G 1 or more"),
        ("all_reduce --side 8", "--side needs --overlap"),
        ("all_reduce --overlap --side 0", "expected a number of at least 1, got '0'"),
        ("scan --eager --overlap", "--overlap: not allowed with"),
        ("scan --eager -G 0", "--eager takes samples; pass -G 1 or more"),
        ("barrier --overlap -w 5", "--overlap does not use -w; omit -w"),
        ("barrier -b 4", "unrecognized arguments: -b 4"),
        ("gather --algorithm direct", "unrecognized arguments: --algorithm direct"),
        ("all_reduce --window 4", "unrecognized arguments: --window 4"),
        ("all_reduce -q", "unrecognized arguments: -q"),
    ],
)
def test_wrong_usage_exits_with_code_2_and_the_reason(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(line.split())
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: " in shown
    assert said in shown


def test_only_the_product_of_torch_has_choices(monkeypatch, capsys):
    line = ["all_reduce", "--overlap", "--side", "8"]
    monkeypatch.setattr(options, "torch_multiplies", lambda: True)
    assert options.parse(line).side == 8
    monkeypatch.setattr(options, "torch_multiplies", lambda: False)
    with pytest.raises(SystemExit):
        options.parse(line)
    assert "--side needs torch and a GPU; omit it" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    tmp_path, monkeypatch, capsys
):
    asked = []
    monkeypatch.setattr(os, "access", lambda *given: asked.append(given))
    existing = tmp_path / "r.json"
    existing.touch()
    for file, checked in ((existing, existing), (tmp_path / "new.json", tmp_path)):
        with pytest.raises(SystemExit):
            options.parse(["all_reduce", "--json", str(file)])
        assert f"that you can write, got {file}\n" in capsys.readouterr().err
        assert asked.pop() == (checked, os.W_OK)


@pytest.mark.parametrize("words", [["-h"], ["scan", "-h"]])
def test_numba_symm_bench_passes_its_arguments_on(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *words])
    assert ended.value.code == 0
    name = " ".join(["numba-symm bench", *words]).removesuffix(" -h")
    assert capsys.readouterr().out.startswith(f"usage: {name} [-h]")
