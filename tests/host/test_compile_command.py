"""``numba-symm compile``, without a GPU."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from numba_symm.collectives import tuned
from numba_symm.collectives.kernel_set import NAMES
from numba_symm.command import cli, compiling
from numba_symm.errors import SymmError
from numba_symm.gpu import loads
from numba_symm.gpu.kernels import Kernel
from numba_symm.memory import pads
from tests.host.test_cli import gpu, start

HERE = ("--ranks", "2", "--cc", "9.0")


@pytest.fixture
def printed():
    """Return a console that keeps what it prints."""
    return Console(width=200, record=True, file=io.StringIO())


def parsed(*arguments):
    return compiling.parser().parse_args(arguments)


def refuse(kernel, cc):
    raise AssertionError(f"{kernel.factory.__qualname__} is compiled again")


def test_kernels_are_compiled_by_several_processes_and_then_found(cache, monkeypatch):
    command = ("compile", "barrier", "--ranks", "2", "4", *HERE[2:], "--jobs", "2")
    done = start(*command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 kernels, 0 of them in .*program-cache", done.stdout)
    assert "2 compiled in" in done.stdout
    monkeypatch.setattr(Kernel, "cubin", refuse)
    for kernel, capability in compiling.wanted(parsed(*command[1:])).jobs():
        assert kernel.code(capability)
    again = start(*command)
    assert again.returncode == 0
    assert "2 kernels, 2 of them" in again.stdout
    assert "compiled in" not in again.stdout


def test_a_dry_run_counts_and_estimates_and_compiles_nothing(
    cache, printed, monkeypatch
):
    monkeypatch.setattr(compiling, "_compile_all", refuse)
    compiling.run(parsed("all_reduce", *HERE, "--dry-run", "--jobs", "3"), printed)
    text = printed.export_text()
    (number,) = re.findall(r"^(\d+) kernels, 0 of them", text, re.MULTILINE)
    jobs = compiling.wanted(parsed("all_reduce", *HERE)).jobs()
    assert int(number) == len(jobs) > 20
    seconds = compiling.START + compiling.SECONDS * len(jobs) / 3
    assert f"{number} to compile: about {seconds:.0f} s in 3 processes" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "expected --ranks and --cc, because this node has no GPU"),
        (("--ranks", "4"), "expected --ranks and --cc"),
        (("allreduce", *HERE), "got 'allreduce' (did you mean 'all_reduce'?)"),
        (("--dtypes", "float31", *HERE), "expected a dtype"),
        (("--ops", "plus", *HERE), "pass one of 'sum', 'prod'"),
        (("all_reduce", "--ops", "band", *HERE), "of float32, got op='band'"),
        (
            ("--dtypes", "float8_e5m2", "--ranks", "2", "--cc", "8.0"),
            "expected compute capability 8.9 or higher",
        ),
        (
            ("barrier", "--ranks", "2", "--cc", "9.0", "13.9", "--dry-run"),
            "that CUDA's compiler supports, got --cc 13.9; pass some of 8.0 8.6",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    cache, capsys, monkeypatch, arguments, text
):
    monkeypatch.setattr(compiling, "visible_gpus", list)
    assert cli.main(["compile", *arguments]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "name", "gpus"),
    [
        ("nvvm.version", "libNVVM", [gpu(0)]),
        ("nvrtc.nvrtcVersion", "NVRTC", [gpu(0)]),
        ("nvjitlink.version", "nvJitLink", []),
    ],
)
def test_without_cudas_compilers_the_error_has_the_command_to_install_them(
    cache, printed, monkeypatch, function, name, gpus
):
    def missing():
        raise RuntimeError("not found")

    monkeypatch.setattr(compiling, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(compiling, "_multiprocessors", lambda gpus: [132])
    monkeypatch.setattr(f"cuda.bindings.{function}", missing)
    with pytest.raises(SymmError, match=rf"{name} is missing; pip install .*\[cu13\]"):
        compiling.run(parsed("signals", *HERE, "--dry-run"), printed)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--cc", "7.5"), "8.0 or higher, got '7.5'"),
        (("--cc", "sm_90"), "8.0 or higher, got 'sm_90'"),
        (("--ranks", "65"), "expected 1 to 64, got '65'"),
        (("--ranks", "0"), "expected 1 to 64, got '0'"),
        (("--jobs", "0"), "expected a number of at least 1, got '0'"),
        (("--cc", "9.0,8.0"), "--cc: expected one value, got '9.0,8.0'; separate"),
        (("--dtypes", "f4,i4"), "--dtypes: expected one value, got 'f4,i4'; separate"),
        (
            ("--ops", "sum", "barrier"),
            "--ops: expected a value, got the call 'barrier'",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(capsys, arguments, text):
    with pytest.raises(SystemExit):
        cli.main(["compile", *arguments])
    assert text in capsys.readouterr().err


def test_a_misspelt_variable_is_named(cache, capsys, monkeypatch):
    monkeypatch.setenv("NUMBA_SYMM_MULTIPROCESSOR", "8")
    assert cli.main(["compile", "barrier", *HERE, "--dry-run"]) == 0
    assert "NUMBA_SYMM_MULTIPROCESSOR is not known" in capsys.readouterr().err


def test_by_default_what_this_host_has_is_compiled(monkeypatch):
    monkeypatch.setattr(compiling, "visible_gpus", lambda: [gpu(0), gpu(1)])
    properties = SimpleNamespace(multiprocessor_count=108)
    device = SimpleNamespace(properties=properties)
    monkeypatch.setattr("cuda.core.Device", lambda ordinal: device)
    wanted = compiling.wanted(parsed())
    assert wanted.calls == NAMES
    assert (wanted.ranks, wanted.capabilities) == ([2], [(9, 0)])
    assert wanted.multiprocessors == [108]


def test_kernels_of_all_ranks_capabilities_and_gpus_are_compiled():
    def jobs(*arguments):
        return {
            (kernel.key(capability), capability)
            for kernel, capability in compiling.wanted(
                parsed("send", "barrier", *arguments)
            ).jobs()
        }

    one = jobs("--ranks", "4", "--cc", "9.0", "--multiprocessors", "132")
    for more in (
        ("--ranks", "4", "8", "--cc", "9.0", "--multiprocessors", "132"),
        ("--ranks", "4", "--cc", "9.0", "8.0", "--multiprocessors", "132"),
        ("--ranks", "4", "--cc", "9.0", "--multiprocessors", "132", "60"),
    ):
        assert jobs(*more) > one


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, printed, monkeypatch):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file")
    done = start("compile", "barrier", *HERE, XDG_CACHE_HOME=folder)
    assert done.returncode == 1
    wanted = f"numba-symm: compile: expected a writable cache, got {folder}/cuda-python"
    assert done.stderr.startswith(wanted)  # and nothing was compiled in vain
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    compiling.show(compiling.facts(), printed)
    assert f"Wrong    expected a writable cache, got {folder}" in printed.export_text()


def test_without_a_home_the_command_says_what_to_set(monkeypatch, printed):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    with pytest.raises(SymmError, match=r"compile: expected a home.*XDG_CACHE_HOME"):
        compiling.run(parsed("barrier", *HERE), printed)


def test_a_cache_that_is_full_is_an_error(cache, monkeypatch):
    monkeypatch.setattr(Kernel, "code", lambda kernel, capability: b"")
    (job,) = compiling.wanted(parsed("barrier", *HERE)).jobs()
    with pytest.raises(SymmError, match="expected a writable cache, got"):
        compiling._compile([job])


def test_the_simulator_compiles_nothing():
    done = start("compile", NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 1
    assert "expected NUMBA_ENABLE_CUDASIM to be unset" in done.stderr


def test_a_kernel_that_cannot_be_compiled_is_named(cache, printed):
    wrong = Kernel(pads.make_fence, (), ("no type",), 32)
    with pytest.raises(SymmError, match=r"compile: make_fence for 9\.0: "):
        compiling._compile([(wrong, (9, 0))])


def test_a_process_that_is_killed_is_an_error(cache, printed):
    deadly = Kernel(os._exit, (1,), (), 32)
    with pytest.raises(SymmError, match="a process was killed"):
        compiling._compile_all([(deadly, (9, 0))], 1, printed)


@contextlib.contextmanager
def started():
    """Start the command with many kernels and two processes, and end all afterwards."""
    main = "import sys; from numba_symm.command.cli import main; sys.exit(main())"
    many = "signals", "barrier", "--ranks", *map(str, range(2, 20)), "--cc", "9.0"
    command = [sys.executable, "-c", main, "compile", *many, "--jobs", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def allow_interrupts():  # a shell ignores them in what it starts in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, start_new_session=True, preexec_fn=allow_interrupts, **pipes
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(deadline, is_true):
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("early", [True, False])
def test_an_interrupt_ends_all_processes_and_keeps_what_is_compiled(cache, early):
    def has_begun():
        # The processes that compile, which import now, and multiprocessing's.
        return stored(cache) or (early and len(children(process.pid)) == 3)

    deadline = time.monotonic() + 300
    with started() as process:
        wait_until(deadline, has_begun)
        before = len(stored(cache))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 130
        assert errors.splitlines() == [
            "numba-symm compile: interrupted; the compiled kernels are in the cache"
        ]
        # multiprocessing's own process ends last
        wait_until(deadline, lambda: not is_running(process.pid))
    assert early or before
    assert len(stored(cache)) - before <= 4  # each process ends after its kernel


def test_all_processes_end_if_the_command_is_killed(cache):
    deadline = time.monotonic() + 300
    with started() as process:
        wait_until(deadline, lambda: stored(cache))
        before = len(stored(cache))
        process.kill()
        process.communicate(timeout=300)
        wait_until(deadline, lambda: not is_running(process.pid))
    assert len(stored(cache)) - before <= 4


def children(pid):
    """Return the processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += task.read_text().split()
    return found


def is_running(group):
    """Return whether a process of a group is alive."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def stored(cache):
    return [file for file in cache.glob("entries/*/*") if file.is_file()]


def test_info_shows_the_cache_and_how_much_is_in_it(
    cache, printed, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    compiling.show(compiling.facts(), printed)
    limits, empty = printed.export_text().splitlines()
    assert limits.startswith("Limits   built in; `numba-symm tune` measures those")
    assert "5 ranks on, estimates for all_reduce by direct, reduce_scatter by" in limits
    tuned.write("NVIDIA H200", 2, {})
    assert re.fullmatch(rf"Cache +{re.escape(str(cache))}, 0\.0 MiB", empty)
    monkeypatch.setattr(compiling, "visible_gpus", lambda: [gpu(0), gpu(1)])
    monkeypatch.setattr(compiling, "_multiprocessors", lambda gpus: [132])
    jobs = compiling.wanted(parsed()).jobs()
    for kernel, capability in jobs[:3]:
        loads.store(kernel.key(capability), bytes(1 << 20))
    compiling.show(compiling.facts(), printed)
    text = printed.export_text()
    assert "limits.json: 2 ranks, NVIDIA H200, version " in text
    assert ", 3.0 MiB; 3 of the " in text
    assert f"of the {len(jobs)} kernels of `numba-symm compile`" in text
