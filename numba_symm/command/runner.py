"""Runs the program in each rank that ``numba-symm run`` starts, and shows its errors.

    python runner.py COMMAND RANKS [--survive] [--as-mpi4py] [-m] PROGRAM …

This module does not see a program's ordinary output. An error that several ranks raise
is shown once, with their numbers. The first rank that fails collects the errors of the
others for a moment, prints them, and ends the job. As under ``python -m mpi4py``, a
rank that fails ends the job, because others may wait for it in MPI.

The ranks of a job write their errors to files of a folder, which the command makes and
removes. Ranks of other nodes do not find it, and show their own errors.

The file is run by its path and imports nothing of numba_symm, because a program may set
variables that Numba reads when it is imported.
"""

import atexit
import contextlib
import ctypes
import fcntl
import os
import runpy
import signal
import sys
import termios
import time
import traceback
from array import array
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn, TypeGuard

from mpi4py.run import set_abort_status

QUIET = 1.0
"""Seconds after an error in which the first rank waits for another one."""

LONGEST = 5.0
"""The most seconds for which the first rank that fails collects errors."""

LAST = 10.0
"""Seconds for which a failed rank waits until the first one has ended the job."""

FOLDER = "NUMBA_SYMM_RUN"
"""The variable with the job's folder, which the program does not see."""

SURVIVE = "--survive"
"""The argument of a job whose ranks go on after one has failed.

A rank that ends without an error makes ``WELL`` in the job's folder. For a rank that a
signal has ended, that has a link from the process' number to the signal's.
"""

WELL = "well"

ENDS = "NUMBA_SYMM_ENDS"
"""The variable with this folder, for the errors of the other ranks."""

IN_PLACE = "--as-mpi4py"
"""The argument that puts ``numba_symm.mpi`` in the place of ``mpi4py.MPI``."""

LAUNCHER = ("<frozen runpy>", runpy.__file__, __file__)
"""The files whose frames precede those of the program."""

PDEATHSIG = 1
"""``PR_SET_PDEATHSIG`` of <sys/prctl.h>: which signal follows a parent's end."""

INTERRUPTED = 128 + signal.SIGINT

ERROR = "error"
"""The beginning of the names of the files with errors."""

SHOWN = "shown"
"""The file that is there when the first rank prints what it has collected."""

RankError = tuple[int, str]
"""A rank and the text of its error."""


class RankFailure:
    """The failure of this rank, if it fails: which rank prints it and ends the job.

    Args:
        command: the process of the command, which has started mpirun.
        folder: the job's folder.
        ranks: the number of ranks that were started.
        rank: the rank of this process.
    """

    def __init__(self, command: int, folder: Path, ranks: int, rank: int) -> None:
        self._command = command
        self._folder = folder
        self._ranks = ranks
        self._rank = rank
        self._process = os.getpid()
        self._first = False  # or on a node without the folder
        self._code = 0

    def hook(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Report an uncaught exception; replaces ``sys.excepthook``."""
        code = INTERRUPTED if kind is KeyboardInterrupt else 1
        self.report(described(error), code)

    def report(self, text: str, code: int) -> None:
        """Leave this rank's error to the first rank that fails, or print all errors.

        A rank that fails after the first one has collected errors prints its own.

        Args:
            text: the text to print after the ranks' numbers.
            code: the exit code of this rank.
        """
        self._code = code
        flush()
        part, own = (self._folder / f"{kind}-{self._rank}" for kind in ("part", ERROR))
        try:
            part.write_text(text, errors="backslashreplace")
            part.rename(own)  # at once whole, for the first rank
            (self._folder / "first").touch(exist_ok=False)
        except FileExistsError:
            if (self._folder / SHOWN).exists():
                show(taken([own]))
            return
        except OSError:
            self._first = True
            show([(self._rank, text)])
            return
        self._first = True
        self._wait_for_others()
        # Before the last look, so that a rank that does not see it is seen.
        (self._folder / SHOWN).touch()
        show(taken(self._errors()))

    def _wait_for_others(self) -> None:
        """Wait for the errors of ranks that fail soon."""
        longest = quiet = time.monotonic() + LONGEST
        number = 0
        while number < self._ranks and time.monotonic() < min(quiet, longest):
            time.sleep(0.01)
            before, number = number, len(self._errors())
            if number > before:
                quiet = time.monotonic() + QUIET

    def _errors(self) -> list[Path]:
        return sorted(self._folder.glob(f"{ERROR}-*"))

    def end(self) -> None:
        """End the job of a failed rank; under Open MPI, without mpirun's own message.

        Runs after the program's own exit handlers. Unless this ends the process,
        mpi4py ends the job after it.
        """
        if (
            not self._code or os.getpid() != self._process
        ):  # or this is a child that it has forked
            return
        flush()
        if self._first:
            drain(2)
        else:
            time.sleep(LAST)  # the first rank ends the job, with its own exit code
        mpirun = os.getppid()
        if "OMPI_COMM_WORLD_RANK" not in os.environ or parent(mpirun) != self._command:
            return
        if self._first and self._code == 1:
            # mpirun ends all ranks, prints no message, and its exit code is 1. After a
            # second signal it would print that it is ending already.
            os.kill(mpirun, signal.SIGTERM)
            time.sleep(LAST)
        os._exit(self._code)


def taken(files: Sequence[Path]) -> list[RankError]:
    """Return the errors of files, without those that another rank takes."""
    found: list[RankError] = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            text = file.read_text()
            file.unlink()
            found.append((int(file.name.partition("-")[2]), text))
    return found


def parent(pid: int) -> int:
    """Return the process that started another one."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return int(text.rpartition(")")[2].split()[1])


def own_rank() -> int | None:
    """Return the rank that Open MPI or MPICH gave this process, or None."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def flush() -> None:
    """Flush the output of this process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, closed
            stream.flush()


def drain(descriptor: int) -> None:
    """Wait until mpirun has read and printed the output of this process.

    It may drop unread output when it ends the job.
    """
    unread = array("i", [0])
    deadline = time.monotonic() + QUIET
    with contextlib.suppress(OSError):  # it is not a pipe
        while fcntl.ioctl(descriptor, termios.FIONREAD, unread) == 0 and unread[0]:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
    time.sleep(0.1)  # for mpirun to print what it has read


def show(reports: Sequence[RankError]) -> None:
    """Print each text once, after the numbers of its ranks."""
    groups: dict[str, list[int]] = {}
    for rank, text in reports:
        groups.setdefault(text, []).append(rank)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, closed
        for text, ranks in groups.items():
            gap = "\n" if "\n" in text else " "
            sys.stderr.write(f"{named(ranks)}:{gap}{text}\n")
        sys.stderr.flush()


def show_alone(error: BaseException) -> None:
    """Show an error of this rank, after its number if it is known."""
    flush()
    rank = own_rank()
    if rank is None:
        sys.__excepthook__(type(error), error, error.__traceback__)
    else:
        show([(rank, described(error))])


def show_errors_whole() -> None:
    """Let this rank show an uncaught error in one write, after its number.

    Python writes line by line, so that the lines of several ranks would alternate.
    """
    sys.excepthook = lambda kind, error, trace: show_alone(error)


def named(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 0-3, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = [f"{span[0]}-{span[-1]}" if span[1:] else f"{span[0]}" for span in spans]
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(words)}"


def described(error: BaseException) -> str:
    """Return the text of an exception, with the program's own frames only.

    It omits the frames before the program's. If numba_symm raised the error on purpose,
    it also omits errors of numba_symm that this one repeats, and the frames inside
    numba_symm. The error's text has the advice.
    """
    shown = traceback.TracebackException.from_exception(error, compact=True)
    frames = shown.stack
    while frames and frames[0].filename in LAUNCHER:
        del frames[0]
    if is_ours(error):
        # The library's own with blocks raise through contextlib.
        ours = Path(sys.modules["numba_symm"].__file__ or "").parent
        inside = f"{ours}{os.sep}", contextlib.__file__
        while frames and frames[-1].filename.startswith(inside):
            del frames[-1]
        cause = error.__cause__
        while shown.__cause__ and is_ours(cause) and str(cause) in str(error):
            cause, shown.__cause__ = cause.__cause__, shown.__cause__.__cause__
    return "".join(shown.format()).rstrip("\n")


def is_ours(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether the error is of a class of numba_symm, or of its ``mpi``."""
    return type(error).__module__.partition(".")[0] == "numba_symm"


class InPlace(MetaPathFinder, Loader):
    """Puts ``numba_symm.mpi`` in the place of ``mpi4py.MPI`` when one is imported.

    Not earlier, because a program may set ``mpi4py.rc``, and choose a GPU, before that.
    """

    def find_spec(self, name: str, path: object, _: object = None) -> ModuleSpec | None:
        """Return how to import either of the two, if it is the first of them."""
        if name not in ("mpi4py.MPI", "numba_symm.mpi"):
            return None
        sys.meta_path.remove(self)
        if name == "mpi4py.MPI":
            return ModuleSpec(name, self)
        found = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if found is not None:
            self._own, found.loader = found.loader, self
        return found

    _own: Loader | None = None  # that of numba_symm.mpi, if it is the first

    def create_module(self, _: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Import ``numba_symm.mpi``, which imports mpi4py's own module, and install."""
        try:
            if self._own is not None:
                self._own.exec_module(module)
            else:
                del sys.modules["mpi4py.MPI"]  # so that this import finds mpi4py's
            from numba_symm import mpi

            mpi.install()
        except BaseException:
            # A program that goes on must not find mpi4py's own in the next import.
            sys.meta_path.insert(0, self)
            vars(sys.modules["mpi4py"]).pop("MPI", None)
            raise


def run(program: Sequence[str]) -> None:
    """Run a script, or the module after ``-m``, as Python does."""
    module = program[0] == "-m"
    sys.argv[:] = program[module:]
    name = sys.argv[0]
    if not sys.flags.safe_path:  # otherwise this file's folder is not in sys.path
        sys.path[0] = str(Path.cwd() if module else Path(name).resolve().parent)
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def main(command: str, ranks: str, *program: str) -> None:
    """Run the program of one rank; see the module's docstring."""
    folder, survive = os.environ.pop(FOLDER, ""), program[0] == SURVIVE
    if survive:
        program = program[1:]
        go_on_watched(folder)
        note_exits(folder)
        os.environ[ENDS] = folder
    if program[0] == IN_PLACE:
        program = program[1:]
        sys.meta_path.insert(0, InPlace())
    process, rank, failure = os.getpid(), own_rank(), None
    if survive:
        show_errors_whole()
    elif rank is not None and folder:  # otherwise Python shows each rank's error
        failure = RankFailure(int(command), Path(folder), int(ranks), rank)
        sys.excepthook = failure.hook
        atexit.register(failure.end)
    try:
        run(program)
        if survive and os.getpid() == process:
            note_success(folder)
    except BaseException as error:
        if os.getpid() != process:  # a child that this rank has forked
            sys.excepthook = sys.__excepthook__
            raise
        if survive:
            leave(error)
            note_success(folder)  # an exit with the code 0
        set_abort_status(error)
        if isinstance(error, SystemExit) and failure:
            text, code = exit_of(error)
            if code:
                failure.report(text, code)
                raise SystemExit(code) from None
        raise  # to sys.excepthook, which the program may have replaced


def go_on_watched(folder: str) -> None:
    """Go on in a child. This process tells by what signal it ends, and ends as it does.

    Nobody else would tell: an mpirun that goes on after a death prints nothing.
    """
    watcher, child = os.getpid(), os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:  # it ended before
            os._exit(1)
        return
    # They are the child's, which is in the same process group.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number, rank = os.WTERMSIG(status), own_rank()
    with contextlib.suppress(OSError):
        Path(folder, str(child)).symlink_to(str(number))  # at once whole, for readers
    if number not in signal.sigpending() and rank is not None:  # not of the whole job
        reason = signal.strsignal(number)
        show([(rank, f"process {child} was killed by signal {number} ({reason})")])
    os.kill(watcher, signal.SIGKILL)


def note_success(folder: str) -> None:
    """Note that this rank ends without an error."""
    with contextlib.suppress(OSError):
        Path(folder, WELL).touch()


def note_exits(folder: str) -> None:
    """Make ``os._exit`` note a success, too: after a death, programs end by it."""
    process, plain = os.getpid(), os._exit

    def _exit(status: int) -> NoReturn:
        if status == 0 and os.getpid() == process:
            note_success(folder)
        plain(status)

    os._exit = _exit


def leave(error: BaseException) -> None:
    """Show this rank's error, and end its process, while the others go on.

    It ends by a signal, with its watcher, because Open MPI ends the job if a rank exits
    with a code. MPI is not finalized, because that would wait for the others.
    """
    if isinstance(error, SystemExit):
        text, code = exit_of(error)
        if not code:
            return
        print(text, file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    flush()
    os.kill(os.getppid(), signal.SIGKILL)  # which would tell of a signal
    os.kill(os.getpid(), signal.SIGKILL)


def exit_of(ended: SystemExit) -> tuple[str, int]:
    """Return the text and the exit code of a SystemExit, as Python determines them."""
    if ended.code is None:
        return "", 0
    if isinstance(ended.code, int):
        return f"exit code {ended.code & 0xFF}", ended.code & 0xFF
    return str(ended.code), 1


if __name__ == "__main__":
    main(*sys.argv[1:])
