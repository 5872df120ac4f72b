"""The command line; letters, suffixes and type names are those of nccl-tests."""

import argparse
import importlib.util
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from numba_symm.bench.contenders import CONTENDERS
from numba_symm.bench.operations import (
    NO_REDUCTION,
    OPERATIONS,
    REDUCTIONS,
    TYPES,
    Operation,
)
from numba_symm.bench.plot import NoRun, load
from numba_symm.environment import SIMULATED

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

DESCRIPTION = """Time a collective by message size against other libraries, and check
every result. Start it on several ranks: numba-symm run -n 4 -m numba_symm.bench
all_reduce -e 1G"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, or raise SystemExit after argparse's usual help or usage.

    ``types``, ``reductions``, ``against`` and ``algorithms`` are tuples of names; a
    ``plot`` has what is to be drawn in ``run``.
    """
    parser = argparse.ArgumentParser(
        "python -m numba_symm.bench", description=DESCRIPTION
    )
    commands = parser.add_subparsers(dest="command", required=True)
    operations = {name: _add(commands, each) for name, each in OPERATIONS.items()}
    plot = commands.add_parser("plot", help="draw a recorded run again")
    plot.add_argument("json", type=Path, help="what --json has written")
    plot.add_argument("image", type=Path, help="such as r.png or r.svg")
    options = parser.parse_args(argv)
    if options.command in operations:
        _complete(operations[options.command], options)
    else:
        _complete_plot(plot, options)
    return options


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    operation: Operation,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        operation.name,
        help=f"measure {operation.name}",
        description=f"Measure {operation.name}. Sizes are in bytes, with binary "
        "suffixes K, M and G.",
    )
    largest = "16K" if SIMULATED else "64M"
    add = parser.add_argument
    add(
        "-b",
        dest="first",
        metavar="SIZE",
        type=nbytes,
        default="1K",
        help="smallest (default %(default)s)",
    )
    add(
        "-e",
        dest="last",
        metavar="SIZE",
        type=nbytes,
        default=largest,
        help="largest (default %(default)s)",
    )
    add(
        "-f",
        dest="factor",
        metavar="F",
        type=_at_least(2),
        default=4,
        help="from one size to the next (default %(default)s)",
    )
    add(
        "-d",
        dest="types",
        metavar="TYPE,…",
        type=_names(TYPES),
        help=f"types of elements, of {', '.join(TYPES)}, or all "
        "(default float; with --shuffle: all)",
    )
    if operation.reduces:
        add(
            "-o",
            dest="reductions",
            metavar="OP,…",
            type=_names(REDUCTIONS),
            help=f"reductions, of {', '.join(REDUCTIONS)}, or all "
            "(default sum; with --shuffle: all)",
        )
    else:
        parser.set_defaults(reductions=(NO_REDUCTION,))
    add(
        "-n",
        dest="calls",
        metavar="N",
        type=_at_least(1),
        default=20,
        help="calls timed at a time, at least in a graph and at most eager; "
        "fewer if they take more than 4 ms (default %(default)s)",
    )
    add(
        "-w",
        dest="warmups",
        metavar="N",
        type=_at_least(0),
        default=5,
        help="calls before the timed ones (default %(default)s)",
    )
    add(
        "-G",
        dest="replays",
        metavar="N",
        type=_at_least(0),
        default=20,
        help="timed replays of each graph; 0: eager calls only (default %(default)s)",
    )
    add(
        "-c",
        dest="check",
        type=int,
        choices=(0, 1),
        default=1,
        help="1: check all results (default %(default)s)",
    )
    add(
        "--against",
        metavar="NAME,…",
        type=_names(CONTENDERS),
        default="mpi" if SIMULATED else "nccl,nccl-symm,torch",
        help=f"contenders, of {', '.join(CONTENDERS)}, or all (default %(default)s)",
    )
    add(
        "--algorithm",
        dest="algorithms",
        metavar="NAME,…",
        default=(),
        type=_names(operation.algorithms),
        help="one of ours: measure it instead of the one chosen by size; several, or "
        f"all: each in a column of its own; of {', '.join(operation.algorithms)}",
    )
    add(
        "--plain",
        action="store_true",
        help="our arrays are ordinary device memory, not symmetric",
    )
    add(
        "--shuffle",
        metavar="N",
        type=_at_least(1),
        help="time nothing: make N calls, each of a random size, type, reduction and "
        "algorithm, in or out of place, and check all results",
    )
    add("--seed", type=_at_least(0), help="of the random numbers (default a new one)")
    add("--json", type=Path, metavar="FILE", help="write all measurements to a file")
    add("--plot", type=Path, metavar="FILE", help="draw them, such as into r.png")
    return parser


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what does not fit together, and fill in what depends on other options."""
    if options.first > options.last:
        parser.error(f"-b {options.first} is more than -e {options.last}")
    if options.json:
        _check_folder(parser, options.json)
    if options.plot:
        _check_image(parser, options.plot)
    if options.shuffle and (options.json or options.plot):
        parser.error("--shuffle measures nothing that --json or --plot could show")
    shuffled = options.shuffle is not None
    options.types = options.types or (tuple(TYPES) if shuffled else ("float",))
    options.reductions = options.reductions or (REDUCTIONS if shuffled else ("sum",))
    if options.seed is None:
        options.seed = secrets.randbits(32)


def _complete_plot(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    """Read the run, or refuse what is none."""
    try:
        options.run = load(options.json)
    except NoRun as error:
        parser.error(str(error))
    _check_image(parser, options.image)


def _check_folder(parser: argparse.ArgumentParser, file: Path) -> None:
    if not file.absolute().parent.is_dir():
        parser.error(f"there is no folder {file.parent} to write {file.name} to")


def _check_image(parser: argparse.ArgumentParser, image: Path) -> None:
    _check_folder(parser, image)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(f"{image} needs matplotlib: pip install matplotlib")


def nbytes(text: str) -> int:
    """Parse a size such as ``64K``; suffixes are binary, as in nccl-tests."""
    unit = UNITS.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; give bytes such as 512, 64K, 16M or 1G"
        )
    return int(number) * unit


def sizes(first: int, last: int, factor: int) -> Iterator[int]:
    """Yield message sizes in bytes."""
    while first <= last:
        yield first
        first *= factor


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give at least {least}")
        return int(text)

    return number


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names of ``known`` ones, or ``all``."""
    known = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        if text == "all":
            return known
        found = tuple(dict.fromkeys(filter(None, text.split(","))))
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(
                f"{text!r}: give some of {', '.join(known)}, or all"
            )
        return found

    return names
