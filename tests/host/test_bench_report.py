import json

import pytest

from numba_symm.bench import plot, report
from numba_symm.bench.bench_operations import OPERATIONS
from numba_symm.bench.report import Report


def timed(median):
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median}


def record(column, microseconds, way="", in_place=False, nbytes=1 << 20, **more):
    return {
        "column": column,
        "way": way,
        "in_place": in_place,
        "bytes": nbytes,
        "count": nbytes // 4,
        "type": "float",
        "op": "sum",
        "wrong": 0,
        "issue": timed(5.0),
        "done": timed(2 * microseconds),
        "graph": timed(microseconds),
    } | more


def row(nbytes=1 << 20, scale=1.0, **more):
    """A message with times in µs: ours 10, NCCL 30 and torch 15 or 40; in place, ours
    20, torch 25."""
    found = [
        record("numba_symm", 10.0 * scale, "plan"),
        record("numba_symm", 1.0, "call"),  # not compared with the plan
        record("numba_symm", 20.0 * scale, "plan", in_place=True),
        record("nccl", 30.0 * scale),
        record("torch", 15.0 * scale, "two_shot"),
        record("torch", 40.0 * scale, "one_shot"),
        record("torch", 25.0 * scale, "two_shot", in_place=True),
    ]
    return [each | {"bytes": nbytes, "count": nbytes // 4} | more for each in found]


RUN = {
    "operation": "all_reduce",
    "facts": {"ranks": 4, "devices": ["NVIDIA H200, PCI 0"] * 4},
    "rows": [row(1 << n, 2.0 ** (n - 20)) for n in (10, 20, 30)],
}


def text(contenders=("nccl", "torch"), algorithms=()):
    return Report(OPERATIONS["all_reduce"], 4, algorithms, contenders)


def test_the_formulas_are_those_of_nccl_tests():
    shown = text().row(row()).split()
    assert shown[:4] == [str(1 << 20), str(1 << 18), "float", "sum"]
    assert shown[4:8] == ["10.00", "104.86", "157.29", "0"]  # 1 MiB / 10 µs, times 1.5
    assert shown[8:13] == ["30.00", "52.43", "15.00", "104.86", "1.50"]
    assert shown[13:17] == ["20.00", "52.43", "78.64", "0"]
    assert shown[17:] == ["-", "-", "25.00", "62.91", "1.25"]


def test_the_header_has_each_name_above_its_column():
    top, names, units = text(algorithms=["one_shot_ll"]).header()
    assert top.startswith("#")
    wanted = ["time", "algbw", "busbw", "#wrong", "one_shot_ll"]
    wanted += ["nccl", "busbw", "torch", "busbw", "ratio"]
    assert names.split() == ["#", "size", "count", "type", "redop", *wanted * 2]
    assert units.count("(us)") == 2 * 4
    assert units.count("(GB/s)") == 2 * 4
    found = [*row(), record("one_shot_ll", 12.5, "one_shot_ll")]
    shown = text(algorithms=["one_shot_ll"]).row(found)
    assert shown.index("12.50") + 5 == names.index("one_shot_ll") + len("one_shot_ll")
    assert len(shown) == len(names)
    assert shown.rindex("25.00") + 5 == names.rindex("torch") + len("torch")


def test_the_ratio_is_the_best_contenders_time_divided_by_ours():
    assert report.ratio(row(), ["nccl"]) == 3.0
    assert report.ratio(row(), ["nccl", "torch"]) == 1.5
    assert report.ratio(row(), []) is None
    assert report.ratio(row(), ["mpi"]) is None
    assert report.ratio(row(), ["nccl", "torch"], in_place=True) == 1.25
    assert report.ratio(row(), ["nccl"], in_place=True) is None


def test_the_footer_counts_and_lists_wrong_elements():
    rows = [row(), row(1 << 24)]
    assert "# Out of bounds values : 0 OK" in text().footer(rows)
    rows[1][2]["wrong"], rows[0][3]["wrong"] = 3, 4
    assert report.wrong_elements(rows) == 7
    shown = "\n".join(text().footer(rows))
    assert "# Out of bounds values : 7 FAILED" in shown
    assert "numba_symm plan, 16777216 bytes of float sum in place: 3 wrong" in shown
    assert "nccl, 1048576 bytes of float sum out of place: 4 wrong" in shown


def test_the_footer_has_geometric_means_of_small_and_of_all_messages():
    small, large = row(1 << 20), row(1 << 24)
    large[3] |= {"graph": timed(10.0 * 3 / 4)}  # NCCL is 3 times slower, then faster
    shown = "\n".join(text(["nccl"]).footer([small, large]))
    assert "geometric mean, all sizes: nccl 1.5" in shown
    assert "geometric mean, up to 4M: nccl 3" in shown
    assert "in place" not in shown
    shown = "\n".join(text(["torch"]).footer([small, large]))
    assert "geometric mean, all sizes, in place: torch 1.25" in shown


def test_the_footer_has_the_spread_and_each_skipped_way_once():
    skipped = {"column": "mpi", "skipped": "MPI has no float16", "in_place": False}
    rows = [[*row(), record("mpi", 1.0) | skipped] for _ in range(3)]
    shown = text(["nccl", "torch", "mpi"]).footer(rows)
    assert any("numba_symm 20 % (at most 20)" in line for line in shown)
    assert sum("MPI has no float16" in line for line in shown) == 1


def test_the_eager_table_has_a_line_for_each_way():
    lines = [line.split() for line in report.EagerReport().row(row()).splitlines()]
    assert len(lines) == len(row())
    message = [str(1 << 20), str(1 << 18), "float", "sum"]
    assert lines[1] == [*message, "numba_symm", "call", "5.00", "2.00", "-", "0"]
    assert lines[2][4:8] == ["numba_symm", "plan,", "in", "place"]


def test_messages_of_a_window_have_a_rate_and_a_size_of_their_own():
    found = [each | {"messages": 64} for each in row()]
    report = Report(OPERATIONS["sendrecv"], 4, [], ["nccl", "mpi"])
    assert report.row(found).split()[:2] == [str(1 << 14), str(1 << 12)]
    title, names, line = report.messages([found])
    assert "millions a second" in title
    assert names.split() == ["#", "size", "window", "numba_symm", "nccl", "mpi"]
    # 64 messages of 16 KiB in 10 and 30 µs
    wanted = f"{1 << 14} 64 6.4 / 209.72 2.133 / 69.91 -"
    assert line.split() == wanted.split()


def test_a_plot_has_a_line_for_each_contender_with_its_best_times():
    found = plot.lines(RUN)
    assert list(found) == ["numba_symm", "nccl", "torch"]
    assert [size for size, _, _ in found["nccl"]] == [1 << 10, 1 << 20, 1 << 30]
    size, time, bandwidth = found["torch"][1]
    assert (size, time) == (1 << 20, 15.0)
    assert bandwidth == pytest.approx((1 << 20) / 15 / 1e3 * 1.5)
    assert plot.title(RUN) == "all_reduce, float sum, 4 x NVIDIA H200"


def test_each_type_has_its_own_line():
    run = RUN | {"rows": [row(op="none"), row(op="none", type="half")]}
    assert {"numba_symm, float", "numba_symm, half"} <= set(plot.lines(run))
    assert plot.title(run) == "all_reduce, several types, 4 x NVIDIA H200"


def test_a_recorded_run_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, image = tmp_path / "r.json", tmp_path / "r.svg"
    file.write_text(json.dumps(RUN))
    plot.main([str(file), str(image)])
    assert "<svg" in image.read_text()
    for name, said in {
        "r.abc": "'abc' is not supported",
        "no/r.png": "No such",
    }.items():
        with pytest.raises(SystemExit):
            plot.main([str(file), str(tmp_path / name)])
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "3", "[]", '{"name": 1}', "{}"])
def test_a_plot_refuses_a_file_without_a_run(content, tmp_path, capsys):
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        plot.main([str(file), "r.png"])
    assert ended.value.code == 2
    assert f"error: {file} contains no run" in capsys.readouterr().err


def test_multicast_is_disabled_for_contenders():
    assert report.NVLS_OFF["NCCL_NVLS_ENABLE"] == "0"
    assert report.NVLS_OFF["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
