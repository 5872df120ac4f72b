"""Fixtures of the tests on ranks, and what keeps those under mpirun in step.

A plain pytest leaves ranks/ and gpu/ alone; test_mpirun.py starts their files. By
hand: ``numba-symm run -n 3 -m pytest tests/ranks``. test_in_place.py starts those of
in_place/: ``numba-symm run -n 3 --as-mpi4py -m pytest tests/in_place``.
"""

import gc
import os
import signal
from pathlib import Path

import pytest

from tests.isolation import isolate

UNDER_MPIRUN = not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}.isdisjoint(os.environ)
isolate(os.environ, UNDER_MPIRUN)

import numba_symm as ns  # noqa: E402  it reads the environment
from tests import patience  # noqa: E402
from tests.spawned import Ranks  # noqa: E402

STOPPED = 70
"""The exit code of a rank whose own tests passed, where another rank's failed."""

os.environ["XDG_DATA_HOME"] = str(Path(__file__).with_name("no-data"))
"""The user's measured limits would choose other algorithms, or warn."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a background job. Tests interrupt themselves and their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not UNDER_MPIRUN:
    collect_ignore_glob = ["ranks/test_*.py", "ranks/*/test_*.py", "gpu/test_*.py"]
    collect_ignore_glob += ["in_place/test_*.py"]


class Agreement:
    """Stops all ranks after the first test that fails on any of them.

    A rank that continued alone would wait for the others in its next test.
    """

    def __init__(self, comm):
        self.comm = comm
        self.ended = False

    def agree(self, session, step):
        """Return if no rank has failed up to ``step``; else end this rank."""
        patience.meet(self.comm)
        everyone = self.comm.allgather((session.testsfailed > 0, step))
        failed = [rank for rank, (failure, _) in enumerate(everyone) if failure]
        if failed:
            self.ended = True
            own = self.comm.rank in failed
            pytest.exit(f"{step} failed on ranks {failed}", 1 if own else STOPPED)
        if any(other != step for _, other in everyone):
            pytest.exit(f"the ranks are at different steps: {everyone}", 1)

    def pytest_collection_finish(self, session):
        self.agree(session, f"collecting {[item.nodeid for item in session.items]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        result = yield
        self.agree(item.session, item.nodeid)
        return result


def pytest_collection_modifyitems(items):
    """Run the longest file first, then the files that wait, then the others.

    The longest occupies one of two workers most of the time, and both processors. Tests
    of this folder and of sharing wait for processes and deadlines, so they run beside
    it. At the end, both workers have short files that do not wait.
    """
    here = Path(__file__).parent
    waiting = here, here / "sharing"
    items.sort(
        key=lambda item: (
            item.path.stem != "test_mpirun",
            item.path.parent not in waiting,
        )
    )


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Have the collector leave out what imports and earlier files have made.

    It looked through a million objects whenever a test called it.
    """
    gc.collect()
    gc.freeze()


class Names:
    """Prints the name of each test that fails, as it fails.

    The summary comes minutes later, and never if the run is ended before.
    """

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.line(f"FAILED {report.nodeid} ({report.when})", red=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not UNDER_MPIRUN:  # rank.py prints whole failures
        config.pluginmanager.register(Names(terminal), "names")
    if UNDER_MPIRUN:
        from mpi4py import MPI

        # A duplicate, so that no test receives the messages of this plugin.
        agreement = Agreement(MPI.COMM_WORLD.Dup())
        config.pluginmanager.register(agreement, "agreement")
        # Numba's advice on speed; tests launch few blocks.
        config.addinivalue_line("filterwarnings", "ignore:Grid size")


@pytest.fixture(scope="module")
def two():
    """Two spawned ranks, for one test after another: starting them takes a second."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    """Three such ranks."""
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def backend():
    """Do nothing. A file that needs another kind of memory overrides this."""


@pytest.fixture
def comm(world, backend, request):
    yield from communicators(world, request)


@pytest.fixture(scope="module")
def comm_of_a_file(world, request):
    yield from communicators(world, request)


@pytest.fixture
def careful(world, request):
    """A communicator that compares the ranks' calls."""
    yield from communicators(world, request, debug=True)


def communicators(world, request, debug=False):
    """Yield a communicator, and close it."""
    communicator = ns.Communicator(world, timeout=120, debug=debug)
    yield communicator
    # Closing is collective: if a rank has failed, it waits until the timeout.
    agreement = request.config.pluginmanager.get_plugin("agreement")
    if not agreement.ended:  # another exit would replace the failed test's traceback
        agreement.agree(request.session, request.node.nodeid)
        communicator.close()
