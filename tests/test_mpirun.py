"""Runs tests/ranks and tests/gpu under mpirun, in a few jobs, on 2 to 4 ranks.

Without a GPU the ranks run in Numba's CUDA simulator, and tests/gpu is skipped. This
process never does: the simulator disables the compiling that other tests need.

On one rank test_one_rank.py does.

NUMBA_SYMM_TEST_RANKS     the numbers of ranks, such as "4" or "1,2,8"
NUMBA_SYMM_TEST_DEADLINE  the seconds of processor time that a job may use
                          without any output; default 240, on GPUs 1800
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from numba_symm.command import cli, launcher
from numba_symm.errors import DeviceError
from tests import patience, processor
from tests.kernels import every_call, every_kernel
from tests.whole import WHOLE

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
TOGETHER = [
    ("test_random_calls.py", "communicators", "islands", "mpi"),
    (
        *("operations", "messages", "all_reduce", "memory", "misuse"),
        *("test_set_up_calls.py", "test_launch.py", "test_bench.py"),
        *("test_doctor.py", "test_prepare.py"),
    ),
]
"""Files and folders of tests/ranks, by jobs.

Starting a job takes a second of processor time for each rank. What is not here is a job
of its own.
"""


def jobs():
    """Return what is run together: tuples of files and folders."""
    ranks = TESTS / "ranks"
    together = [tuple(ranks / name for name in names) for names in TOGETHER]
    files = {*ranks.glob("test_*.py"), *(f.parent for f in ranks.glob("*/test_*.py"))}
    others = sorted(files.difference(*together)) + sorted(TESTS.glob("gpu/test_*.py"))
    return [*together, *((file,) for file in others)]


NIGHTLY = {2: (*TOGETHER[1], "communicators"), 4: (*TOGETHER[1], "mpi")}
"""What is not simulated on that many ranks by default: it seldom fails where three
ranks pass, and calls and programs are drawn on two ranks, too. `make nightly` runs it.
"""


def cases():
    """Return the jobs on each number of ranks."""
    found = []
    for job, ranks in itertools.product(jobs(), filter(lambda n: n > 1, RANKS)):
        everything = ASKED or WHOLE or cli.visible_gpus()
        left_out = () if everything else NIGHTLY.get(ranks, ())
        found.append((tuple(part for part in job if part.name not in left_out), ranks))
    return [(job, ranks) for job, ranks in found if job]


def name_of(job, *ranks):
    return "-".join(["+".join(file.stem for file in job), *map(str, ranks)])


ASKED = os.environ.get("NUMBA_SYMM_TEST_RANKS")
RANKS = [int(number) for number in (ASKED or "1,2,3,4").split(",")]
DEADLINE = os.environ.get("NUMBA_SYMM_TEST_DEADLINE")
WELL = {"0", "70"}  # passed; stopped because another rank failed (conftest.py)
LINES = 150  # of each rank's output, the last ones
INNARDS = re.compile(r'^  File ".*/(_pytest|pluggy)/')  # pytest's part of a dump
IDLE = re.compile(
    r'^Thread 0x.*\n(  File ".*/(simulator|threading)\.py".*\n)+\n?', re.M
)
"""The simulator's threads that wait for a block, in a dump."""

# Every rank runs the same tests in the same order; its file is its capture.
PYTEST = ["-vs", "--no-header", "--no-summary"]
PYTEST += ["-pno:cacheprovider", "-pno:faulthandler"]  # rank.py has its own

BOUND = {}
"""By job, the names of the kernels and algorithms that its tests have bound."""


@pytest.mark.parametrize(
    ("job", "ranks"), [pytest.param(*case, id=name_of(*case)) for case in cases()]
)
def test_on_ranks(job, ranks, tmp_path):
    check(job, ranks, tmp_path)


def test_an_algorithm_that_was_added_by_the_guide_on_ranks(tmp_path):
    """tests/added.py adds it; the tests of all algorithms have it then, too."""
    folder = TESTS / "ranks/all_reduce"
    check((folder, "-padded", "-kpulled"), 3, tmp_path)
    for rank in range(3):
        assert re.search(r"\b[1-9]\d* passed", read(tmp_path / f"{rank}.txt"))


def test_every_kernel_and_algorithm_is_bound_by_a_test_on_ranks():
    """Runs after the tests above. Skips if not all of them ran in this process."""
    ran = BOUND.keys() >= {job for job in jobs() if not on_gpus(job)}
    if not ran or max(RANKS) < 3:  # two ranks relay nothing
        pytest.skip("not all jobs ran, on three ranks or more")
    missing = (every_kernel() | every_call()) - set().union(*BOUND.values())
    assert not missing, f"no test in tests/ranks binds {missing}: add one"


def on_gpus(job):
    return job[0].parent.name == "gpu"


def check(job, ranks, tmp_path, runner=()):
    """Run a job's tests on that many ranks, or skip them; ``runner`` runs rank.py."""
    environ = environment(ranks)
    if on_gpus(job) and environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("no NVIDIA GPU")
    program = [*runner, str(ROOT / "tests/rank.py"), str(tmp_path), "0", *PYTEST]
    program += map(str, job)
    command = launcher.mpirun_command(ranks, program, launcher.find_mpirun())
    try:
        code = run(command, environ, tmp_path / "mpirun.txt")
    except Hung as hung:
        text = f"the job of {ranks} ranks was ended: {hung.rule}"
        pytest.fail(describe(text, ranks, tmp_path), pytrace=False)
    for names in tmp_path.glob("*.bound"):
        BOUND.setdefault(job, set()).update(read(names).splitlines())
    if code != 0:
        ended = f"mpirun on {ranks} ranks ended with exit code {code}"
        pytest.fail(describe(ended, ranks, tmp_path), pytrace=False)


class Hung(AssertionError):
    """A job was ended; ``rule`` says why, the text also where its ranks were."""

    def __init__(self, rule, output):
        super().__init__(f"the job was ended: {rule}\n{output}")
        self.rule = rule


def busiest(environ):
    """Return the seconds of processor time that a job may use without any output.

    On GPUs these are more, because kernels are compiled there.
    """
    if DEADLINE:
        return float(DEADLINE)
    return 240 if environ.get("NUMBA_ENABLE_CUDASIM") == "1" else 1800


def environment(ranks):
    """Return the job's environment, or skip: this node has too few GPUs."""
    try:
        simulate = cli.simulation_needed(ranks)
    except DeviceError as error:
        if ASKED:
            raise
        pytest.skip(str(error))
    job = launcher.job_environment(os.environ, simulate=simulate)
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Other packages' plugins double the time that four ranks need to start.
    job["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return job | {"PYTHONPATH": os.pathsep.join(path)}


def run(command, environ, log, busy=None, idle=60):
    """Return a job's exit code, or raise :class:`Hung` with the stacks of its ranks.

    Args:
        command: mpirun and its arguments.
        environ: its environment; None: that of this process.
        log: a file for its output. The files beside it are output, too.
        busy: the seconds of processor time that it may use without any output.
        idle: the seconds for which all of its processes may wait.
    """
    environ = {**(os.environ if environ is None else environ), **patience.DUMPS}
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as job,
    ):
        watch = patience.Watch(
            [job.pid],
            busy or busiest(environ),
            idle,
            lambda: patience.written(log.parent),
        )
        try:
            while (rule := watch.broken()) is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return job.wait(patience.STEP)
            patience.abort(processor.tree(job.pid))
        finally:
            end(job)
    raise Hung(rule, "\n".join(read(log).splitlines()[-LINES:]))


def end(job):
    """End mpirun and the ranks that have not ended."""
    if job.poll() is None:
        job.terminate()  # mpirun ends its ranks and removes its files
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(5)
    # Open MPI gives each rank a process group of its own, and a rank may outlive
    # mpirun; all of them stay in the session that began with mpirun.
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == job.pid:
                os.kill(int(process.name), signal.SIGKILL)


def describe(what, ranks, folder):
    """Return what went wrong: the output of the ranks that failed, and mpirun's."""
    parts = [what]
    results = [read(folder / f"{rank}.code") for rank in range(ranks)]
    if not all(results):  # mpirun prints which rank ended first
        parts.append(section("mpirun", folder / "mpirun.txt"))
    for rank, result in enumerate(results):
        if result not in WELL:
            ended = f"exit code {result}" if result else "no result: it crashed or hung"
            parts.append(section(f"rank {rank}: {ended}", folder / f"{rank}.txt"))
    return "\n".join(parts)


def section(title, file):
    text = IDLE.sub("", read(file))
    lines = [line for line in text.splitlines() if not INNARDS.search(line)]
    return "\n".join([f" {title} ".center(80, "-"), *lines[-LINES:]])


def read(file):
    return file.read_text(errors="replace") if file.exists() else ""
