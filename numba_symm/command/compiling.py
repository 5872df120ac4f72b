"""``numba-symm compile``: fill the disk cache with kernels, with or without a GPU."""

import argparse
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from numba_symm import dtypes, environment
from numba_symm.arguments import at_least
from numba_symm.collectives import kernel_set, lifetime, select, tuned
from numba_symm.environment import SIMULATED
from numba_symm.errors import SymmError
from numba_symm.gpu import loads
from numba_symm.gpu.kernels import Kernel
from numba_symm.launch import info
from numba_symm.launch.devices import GPU, visible_gpus

DTYPES, OPS = kernel_set.DTYPES, ("sum",)
"""What is compiled unless the user names others."""

MULTIPROCESSORS = 132
"""Of an H100 or H200, for nodes without a GPU."""

SECONDS, START = 0.8, 3.0
"""Estimates: for a kernel on one core, and until the processes begin."""

_MOST_RANKS = 64
_OLDEST = (8, 0)
_BATCH = 4  # kernels that a process takes at a time; neighbours share device functions

Capability = tuple[int, int]
Compilation = tuple[Kernel, Capability]


class Wanted(NamedTuple):
    """What to compile.

    Attributes:
        calls: names of ``kernel_set.NAMES``.
        dtypes: of their arrays.
        ops: the operators of those that reduce.
        ranks: sizes of communicators.
        capabilities: compute capabilities.
        multiprocessors: how many the GPUs have.
        gpu: the name of this node's GPUs, if it is for them.
    """

    calls: Sequence[str]
    dtypes: Sequence[str]
    ops: Sequence[str]
    ranks: Sequence[int]
    capabilities: Sequence[Capability]
    multiprocessors: Sequence[int]
    gpu: str

    def jobs(self) -> list[Compilation]:
        """Return the kernels, each with every compute capability.

        Raises:
            ArgumentError: ``NUMBA_SYMM_MULTIPROCESSORS`` is wrong.
        """
        asked = environment.multiprocessors()  # as a communicator will read it
        limits = {asked or lifetime.limit_of(each) for each in self.multiprocessors}
        found: dict[Kernel, None] = {}
        for size in self.ranks:
            choices = tuned.read(self.gpu, size).choices or select.CHOICES
            for limit in limits:
                end = kernel_set.endpoint(size, limit, choices)
                given, ops = list(self.dtypes), list(self.ops)
                kernels = kernel_set.kernels(self.calls, given, ops, end, "compile")
                found |= dict.fromkeys(kernels)
        capabilities = dict.fromkeys(self.capabilities)
        for capability in capabilities:
            kernel_set.check_capability(list(found), capability, "compile")
        return [(kernel, each) for each in capabilities for kernel in found]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = argparse.ArgumentParser(
        prog="numba-symm compile",
        usage="numba-symm compile [CALL ...] [options]",
        description="Compile kernels into the disk cache, so that programs need not "
        "compile them. Run this when you build a container, on a login node or before "
        "a job. Kernels that are in the cache are not compiled again.",
        epilog="numba-symm compile all_reduce all_gather --ranks 4 8 --cc 9.0",
        allow_abbrev=False,
    )
    add: Callable[..., Any] = made.add_argument
    cores = len(os.sched_getaffinity(0))
    add(
        "calls",
        nargs="*",
        metavar="CALL",
        help="a method, or another name that prepare() accepts; default: all",
    )
    for option, metavar, parse, text in (
        ("--ranks", "N", _ranks, "numbers of ranks; default: the number of GPUs"),
        ("--dtypes", "TYPE", str, f"element types; default: {' '.join(DTYPES)}"),
        ("--ops", "OP", str, f"operators; default: {' '.join(OPS)}"),
        ("--cc", "X.Y", _capability, "compute capabilities; default: the GPUs'"),
        (
            "--multiprocessors",
            "N",
            at_least(1),
            f"multiprocessors of a GPU; default: this node's, or {MULTIPROCESSORS}",
        ),
    ):
        several = {"nargs": "+", "action": "extend", "metavar": metavar}
        add(option, type=_one(parse), help=text, **several)
    add(
        "--jobs",
        metavar="N",
        type=at_least(1),
        default=cores,
        help="default: all cores",
    )
    words = "compile nothing; print the number of kernels, and how long they take"
    add("--dry-run", action="store_true", help=words)
    return made


def _one(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of one of several values."""

    def value(text: str) -> Any:
        if "," in text:
            raise argparse.ArgumentTypeError(
                f"expected one value, got {text!r}; separate several by spaces"
            )
        # "sum" is an operator, too.
        if text in kernel_set.NAMES and text not in dtypes.REDUCTIONS:
            raise argparse.ArgumentTypeError(
                f"expected a value, got the call {text!r}; write calls before options"
            )
        return parse(text)

    return value


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected 1 to {_MOST_RANKS}, got {text!r}")
    return int(text)


def _capability(text: str) -> Capability:
    found = re.fullmatch(r"(\d+)\.(\d)", text)
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    if capability < _OLDEST:
        raise argparse.ArgumentTypeError(
            f"expected a compute capability of 8.0 or higher, got {text!r}; write one "
            "as 9.0"
        )
    return capability


def wanted(options: argparse.Namespace) -> Wanted:
    """Return what the options ask for, completed by what this node has.

    Raises:
        SymmError: this node has no GPU, and the options do not replace it.
    """
    gpus = visible_gpus()
    if not gpus and not (options.ranks and options.cc):
        raise SymmError(
            "compile: expected --ranks and --cc, because this node has no GPU; write: "
            "numba-symm compile --ranks 8 --cc 9.0"
        )
    return Wanted(
        calls=options.calls or kernel_set.NAMES,
        dtypes=options.dtypes or DTYPES,
        ops=options.ops or OPS,
        ranks=options.ranks or [len(gpus)],
        capabilities=options.cc or sorted({gpu.compute_capability for gpu in gpus}),
        multiprocessors=options.multiprocessors or _multiprocessors(gpus),
        gpu=gpus[0].name if gpus and not options.cc else "",
    )


def _multiprocessors(gpus: Sequence[GPU]) -> list[int]:
    from cuda.core import Device

    numbers = {int(Device(gpu.ordinal).properties.multiprocessor_count) for gpu in gpus}
    return sorted(numbers) or [MULTIPROCESSORS]


def run(options: argparse.Namespace, console: Console) -> None:
    """Compile what the options ask for and is not in the cache yet.

    Raises:
        SymmError: an argument is wrong, a kernel cannot be compiled, or the cache
            cannot be written.
    """
    if SIMULATED:
        raise SymmError(
            "compile: expected NUMBA_ENABLE_CUDASIM to be unset, got 1; the simulator "
            "compiles nothing"
        )
    try:
        writable = loads.is_writable(loads.folder())
    except RuntimeError as error:  # as of a container's user without an entry
        raise SymmError(
            f"compile: expected a home for the cache, got none ({error}); set "
            "XDG_CACHE_HOME to a writable folder"
        ) from error
    if not writable:
        raise SymmError(f"compile: {loads.refusal()}")
    asked = wanted(options)
    jobs = asked.jobs()
    _check_compilers()
    _check_capabilities(asked.capabilities)
    missing = [job for job in jobs if not _is_stored(job)]
    processes = max(1, min(options.jobs, -(-len(missing) // _BATCH)))
    console.print(
        f"{len(jobs)} {'kernel' if len(jobs) == 1 else 'kernels'}, "
        f"{len(jobs) - len(missing)} of them in {escape(str(loads.folder()))}",
        soft_wrap=True,
    )
    if not missing:
        return
    if options.dry_run:
        seconds = START + SECONDS * len(missing) / processes
        console.print(
            f"{len(missing)} to compile: about {seconds:.0f} s in {processes} "
            f"{'process' if processes == 1 else 'processes'}"
        )
        return
    begun = time.monotonic()
    _compile_all(missing, processes, console)
    console.print(f"{len(missing)} compiled in {time.monotonic() - begun:.0f} s")


def _check_compilers() -> None:
    """Raise :class:`SymmError` if a library of CUDA that compiles is missing."""
    from cuda.bindings import nvjitlink, nvrtc, nvvm

    needed = {"libNVVM": nvvm.version, "NVRTC": nvrtc.nvrtcVersion}
    if not visible_gpus():  # with a GPU, the driver can link
        needed["nvJitLink"] = nvjitlink.version
    for name, version in needed.items():
        try:
            version()
        except RuntimeError as error:  # not found
            raise SymmError(
                f"compile: expected CUDA's compiler libraries, but {name} is missing; "
                'pip install ".[cu13]" in the repository, or ".[cu12]" for a driver '
                "for CUDA 12"
            ) from error


def _check_capabilities(capabilities: Sequence[Capability]) -> None:
    """Raise :class:`SymmError` if CUDA's compiler lacks one of them."""
    from cuda.bindings import nvrtc

    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    known = [divmod(number, 10) for number in numbers]
    unknown = [each for each in capabilities if each not in known]
    if unknown:
        names = ["{}.{}".format(*each) for each in known if each >= _OLDEST]
        raise SymmError(
            "compile: expected compute capabilities that CUDA's compiler supports, got "
            f"--cc {'{}.{}'.format(*unknown[0])}; pass some of {' '.join(names)}"
        )


def _is_stored(job: Compilation) -> bool:
    kernel, capability = job
    return loads.load(kernel.key(capability)) is not None


def _compile_all(jobs: Sequence[Compilation], processes: int, console: Console) -> None:
    """Compile in several processes, with a progress bar on a terminal."""
    batches = [jobs[first : first + _BATCH] for first in range(0, len(jobs), _BATCH)]
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    spawn = multiprocessing.get_context("spawn")  # a fork may break a CUDA context
    pool = ProcessPoolExecutor(processes, spawn, _watch_parent)
    # The processes inherit the mask, so that Ctrl-C reaches only this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        futures = {pool.submit(_compile, batch): len(batch) for batch in batches}
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with bar:
            task = bar.add_task("", total=len(jobs))
            for future in as_completed(futures):
                future.result()
                bar.advance(task, futures[future])
    except BrokenProcessPool as error:
        raise SymmError(
            "compile: a process was killed, perhaps for lack of memory; pass fewer "
            "--jobs"
        ) from error
    finally:
        for each in multiprocessing.active_children():
            each.terminate()  # after an error or an interrupt, they have work left
        pool.shutdown(cancel_futures=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch_parent() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process if the parent is killed; the pool would wait for more work."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _compile(batch: Sequence[Compilation]) -> None:
    for job in batch:
        kernel, capability = job
        try:
            kernel.code(capability)
        except Exception as error:  # raised by Numba, NVVM or the linker
            name, (major, minor) = kernel.factory.__name__, capability
            raise SymmError(f"compile: {name} for {major}.{minor}: {error}") from None
        if not _is_stored(job):
            raise SymmError(f"compile: {loads.refusal()}")


def facts() -> dict[str, Any]:
    """Return the limits in use, and what the cache has, for ``numba-symm info``.

    The limits are those of ``numba-symm tune``.
    """
    gpus = [] if SIMULATED else visible_gpus()
    found = {"limits": tuned.described(gpus[0].name if gpus else None)}
    try:
        folder = loads.folder()
    except RuntimeError as error:  # no home
        return found | {"cache": {"folder": None, "why": str(error)}}
    cache: dict[str, Any] = {"folder": str(folder)}
    cache["bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    if gpus:
        jobs = wanted(parser().parse_args([])).jobs()
        cache |= {"kernels": len(jobs), "stored": sum(map(_is_stored, jobs))}
    why = "" if loads.is_writable(folder) else loads.refusal()
    return found | {"cache": cache | {"why": why}}


def show(found: dict[str, Any], console: Console) -> None:
    """Print what :func:`facts` has returned."""
    info.line(console, "Limits", found["limits"])
    cache = found["cache"]
    if cache["folder"] is None:
        info.line(console, "Cache", f"none: {cache['why']}")
        return
    text = f"{cache['folder']}, {cache['bytes'] / 2**20:.1f} MiB"
    if "kernels" in cache:
        counts = f"{cache['stored']} of the {cache['kernels']} kernels"
        text += f"; {counts} of `numba-symm compile`"
    info.line(console, "Cache", text)
    if cache["why"]:
        info.line(console, "Wrong", cache["why"], "bold red")
