"""Starts jobs on this node with MPI's launcher."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numba_symm.errors import SymmError
from numba_symm.launch.info import INSTALL_MPI

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Without a limit by slots, Open MPI compares the ranks with the cores, and lets
    # waiting ranks yield only if there are more ranks. On two cores this was 1000
    # times faster than as many slots as ranks (`--host localhost:4`).
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
"""Settings that let Open MPI start any number of ranks on one node, as root too.

They are variables, so that mpirun's flags and the user's variables override them.
"""

NEEDED = 1 << 16
"""Bytes of a job's files, at least; a full file system may still make folders."""

SESSIONS = "PRTE_MCA_prte_tmpdir_base"
"""Where Open MPI 5 keeps a job's files, if not in TMPDIR."""

LONGEST_TMPDIR = 60
"""Longest TMPDIR in bytes. A Unix socket's path has at most 108, of which Open MPI's
session folder needs the rest."""


def find_mpirun() -> str:
    """Return the path of the mpirun beside this Python, otherwise of the one on PATH.

    Raises:
        SymmError: there is none.
    """
    # sys.executable is not resolved, because it is a link in a virtual environment.
    beside = Path(sys.executable).parent
    found = shutil.which("mpirun", path=str(beside)) or shutil.which("mpirun")
    if found is None:
        raise SymmError(
            f"run: expected mpirun in {beside} or on PATH, got none; {INSTALL_MPI}"
        )
    return found


def mpirun_command(
    ranks: int, program: Sequence[str], mpirun: str, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command that starts ``program`` on ``ranks`` ranks of this node.

    Args:
        ranks: the number of ranks.
        program: the arguments of ``python``: a script or ``-m module``, and its own.
        mpirun: the path of mpirun.
        flags: for mpirun.
    """
    return [mpirun, *flags, "-n", str(ranks), sys.executable, *program]


def job_environment(environ: Mapping[str, str], *, simulate: bool) -> dict[str, str]:
    """Return the environment for mpirun, which passes it to every rank.

    Args:
        environ: the environment of this process.
        simulate: whether the ranks run in Numba's CUDA simulator.
    """
    job = {**OPEN_MPI, **environ}
    if simulate:
        job["NUMBA_ENABLE_CUDASIM"] = "1"
        # Ranks that wait in MPI yield their cores to ranks that simulate. By default,
        # Open MPI does so only for more ranks than cores.
        job.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if unfit(environ.get("TMPDIR") or "/tmp"):
        # Moves only Open MPI's files; the ranks keep TMPDIR. (Open MPI 4, then 5)
        job.setdefault("OMPI_MCA_orte_tmpdir_base", "/tmp")
        job.setdefault(SESSIONS, "/tmp")
    return job


def unfit(folder: str) -> str:
    """Return why Open MPI cannot keep a job's files in ``folder``, "" if it can."""
    if len(os.fsencode(folder)) > LONGEST_TMPDIR:
        return f"its name has more than {LONGEST_TMPDIR} bytes"
    try:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            Path(made, "bytes").write_bytes(bytes(NEEDED))
            return ""
    except OSError as error:
        return error.strerror or str(error)


def check_sessions(environ: Mapping[str, str]) -> None:
    """Raise :class:`SymmError` if Open MPI finds no place for a job's files."""
    folder = environ.get(SESSIONS) or environ.get("TMPDIR") or "/tmp"
    why = unfit(folder)
    if why:
        raise SymmError(
            f"Open MPI cannot keep a job's files in {folder!r}: {why}; set TMPDIR to a "
            f"folder that you can write, whose name has at most {LONGEST_TMPDIR} bytes"
        )


_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def started(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start mpirun, which ends when this process ends, in any way.

    A process cannot forward SIGKILL. So the kernel sends SIGTERM to mpirun, which then
    ends its ranks and removes its files.

    Args:
        command: mpirun and its arguments.
        options: for ``subprocess.Popen``.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before
            os._exit(1)

    return subprocess.Popen(command, preexec_fn=bind, **options)


_FORWARDED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_OF_KERNEL = 0x80  # SI_KERNEL


def code_of(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run mpirun, forward signals to it, and return its exit code.

    Raises:
        KeyboardInterrupt: after mpirun has ended, if one of the signals was SIGINT.
    """
    with started(command, env=dict(environ)) as job:
        waited = {*_FORWARDED, signal.SIGCHLD}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        interrupted = False
        try:
            while job.poll() is None:
                found = signal.sigwaitinfo(waited)
                interrupted |= found.si_signo == signal.SIGINT
                # A terminal sends its signals to all processes of the job.
                if found.si_signo != signal.SIGCHLD and found.si_code != _OF_KERNEL:
                    job.send_signal(found.si_signo)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if interrupted:
            raise KeyboardInterrupt
        return job.returncode if job.returncode >= 0 else 128 - job.returncode
