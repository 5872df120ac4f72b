"""Write what the pages show of programs, recorded runs and the code.

    python docs/pages.py            # or `make pages`

Such text stands between two marks, and the first of them names how it is made:

    <!-- made: program ring.py -->
    …
    <!-- end -->

``MAKERS`` has the kinds. ``tests/simulated/test_pages_are_current.py`` checks that the
texts are current.
"""

import ast
import contextlib
import inspect
import io
import json
import os
import re
import sys
import textwrap
from itertools import chain
from pathlib import Path
from types import FunctionType

if __name__ == "__main__":  # device functions are plain Python then
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numba_symm
from numba_symm import dtypes
from numba_symm.collectives import kernel_set, operations, select
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.select import Arrays
from numba_symm.command import cli

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
_FOLDERS = "*.md", "docs/**/*.md", "examples/**/*.md", "bench/**/*.md", "tests/*.md"
PAGES = sorted(page for each in _FOLDERS for page in ROOT.glob(each))
BLOCK = re.compile(
    r"^<!-- made: (?P<made>.+?) -->\n\n(?P<text>.*?)^<!-- end -->$", re.M | re.S
)


def program(name):
    """A file of ``docs/programs``: a program, or what it prints on 4 ranks."""
    text = (ROOT / "docs/programs" / name).read_text().strip()
    return _fenced(text, "python" if name.endswith(".py") else "text")


def usage(command):
    """What ``numba-symm COMMAND -h`` prints."""
    asked = [*command.split(), "-h"]
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main(asked)
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return _fenced(textwrap.dedent(printed.getvalue()).strip(), "text")


def explored(arguments):
    """What ``numba-symm explore`` prints, with its arguments."""
    path, *rest = arguments.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(["explore", str(ROOT / path), *rest])
    return _fenced(printed.getvalue().rstrip(), "text")


def _fenced(text, language):
    return f"```{language}\n{text}\n```"


def algorithms(_):
    """Which algorithm each operation chooses on GPUs, by bytes, type and ranks."""
    rows = [["operation", *(f"{number} ranks" for number in _RANKS)]]
    for name in select.ON_GPUS:
        operation = operations.OPERATIONS[name]
        names = ", ".join(f"`{each}`" for each in _with_limits_of(name))
        kinds = _REDUCED if operation.reduces else _MOVED
        for kind, dtype in kinds.items():
            element = dtypes.element(dtype, "docs")
            cells = [_chosen(operation, n, element) for n in _RANKS]
            rows.append([names + kind, *cells])
    return _table(rows)


def _chosen(operation, size, element):
    def fastest(nbytes):
        name, choices = operation.name, select.ON_GPUS
        return select.fastest(name, nbytes, size, element, choices)

    lines, first = [], 1
    while first is not None:
        name = fastest(first)
        last = _last(lambda n, name=name: fastest(n) == name, first)
        most = (
            "above" if last is None else f"to {_human(last * operation.shards(size))}"
        )
        estimates = select.ESTIMATES.get(operation.limits_of, ())
        guess = r" \*" * (size > 4 and name in estimates)
        lines.append(f"{most}: `{name}`{guess}")
        first = None if last is None else last + 1
    return "<br>".join(lines)


def conditions(_):
    """What the algorithms that work on the ranks' own arrays need."""
    first = "arrays that are symmetric on every rank"
    rows = [["algorithm", first, "further conditions"]]
    for name, operation in operations.OPERATIONS.items():
        for algorithm, made in operation.algorithms.items():
            if made.handshake:
                arrays = made.arrays.replace("``", "`")
                if operation.at_root:
                    arrays = arrays.replace("`out`", "`out` on the root")
                where = [_WHERE[made.x], "not in place" * (not made.in_place)]
                more = "; ".join(filter(None, [*where, made.ranks]))
                rows.append([f"`{algorithm}`, `{name}`", arrays, more])
    return _table(rows)


_WHERE = {
    Arrays.SYMMETRIC: "all addresses are multiples of 16",
    Arrays.AT_ONE_PLACE: "the same place on every rank",
}

_RANKS = (2, 4, 8)  # what the limits were measured with
_REDUCED = {", floats": "float32", ", other types": "int32"}
_MOVED = {"": "int8"}


def _with_limits_of(name):
    """Return the names of the operations that use the limits of this one."""
    table = operations.OPERATIONS.values()
    return [each.name for each in table if each.limits_of == name]


def _last(holds, first, most=1 << 40):
    """Return the last number from ``first`` on for which it holds; None: no end."""
    if holds(most):
        return None
    low, high = first, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def measured(arguments):
    """Recorded runs, as a table of microseconds; the fastest of each run is bold.

    The arguments are files of bench/results, then ``against`` and other contenders, or
    ``others``: the fastest of these, with its name. ``A+B`` are the sizes of both runs,
    where those of B count. If one run recorded the multiprocessors of every column of a
    row, they stand in parentheses.
    """
    asked, _, against = arguments.partition(" against ")
    columns = ["numba_symm", *against.split()]
    files = asked.split()
    names = [_NAMES.get(column, column) for column in columns]
    head, times = ["message"], {}
    for place, name in enumerate(files):
        _, _, _, gpu, number, _ = name.split("-", 5)
        own = names[0] if len(files) == 1 else f"{number} {gpu.upper()}"
        head += [own, *names[1:]]
        runs = [json.loads((RESULTS / each).read_text()) for each in name.split("+")]
        rows = {row[0]["bytes"]: row for run in runs for row in run["rows"]}
        for nbytes, row in rows.items():
            cells = times.setdefault(nbytes, [[""] * len(columns) for _ in files])
            cells[place] = _cells(row, columns, with_counts=len(files) == 1)
    shown = sorted(times)[:: min(len(files), 2)]  # of several runs, every other size
    rows = ([_human(size), *chain(*times[size])] for size in shown)
    return _table([head, *rows])


_NAMES = {"nccl": "NCCL", "nccl-symm": "NCCL symmetric", "others": "fastest other"}
_OTHERS = {"nccl": "NCCL", "nccl-symm": "sym.", "torch": "torch"}


def _cells(row, columns, with_counts):
    """Return a size's times; the shortest is bold."""
    found = [_best(row, column) for column in columns]
    least = min(each["graph"]["median"] for each in found)
    known = with_counts and all("launches" in each for each in found)
    cells = []
    for column, each in zip(columns, found, strict=True):
        time = each["graph"]["median"]
        cell = _digits(time)
        if time == least and len(found) > 1:
            cell = f"**{cell}**"
        if known:
            cell += f" ({max(one['multiprocessors'] for one in each['launches'])})"
        if column == "others":
            cell += f" {_OTHERS[each['column']]}"
        cells.append(cell)
    return cells


def _best(row, column):
    """Return a contender's fastest record in graphs, out of place if it has one.

    Of the others, it is the fastest one in either place.
    """
    columns = _OTHERS if column == "others" else [column]
    return min(
        (each for each in row if each["column"] in columns and "graph" in each),
        key=lambda each: (
            column != "others" and each["in_place"],
            each["graph"]["median"],
        ),
    )


def _digits(microseconds):
    return f"{microseconds:.1f}" if microseconds < 99.95 else f"{microseconds:.0f}"


def _human(nbytes):
    """Return bytes with a binary unit and at most three digits."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1023.5:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.3g} {units[0]}"


def _table(rows):
    """Return rows of cells, of which the first is the head, as a table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def examples(folder):
    """The programs of a folder, with the first lines of their docstrings."""
    rows = [["program", "what it does"]]
    for file in sorted((ROOT / folder).glob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text()))
        link = file.relative_to(ROOT / "examples")
        what = _plain(text.partition("\n\n")[0])
        command = re.search(r"^    (\S.*)$", text, re.M)
        start = f"<br>`{command[1]}`" if command else ""
        rows.append([f"[{file.name}]({link})", what + start])
    return _table(rows)


def api(arguments):
    """Public names with their signatures, and the first lines of their docstrings.

    ``device.put`` is a name below ``numba_symm``, ``Event.*`` a class with all public
    members, ``Team.of,row`` one with these, and ``!free`` is left out.
    """
    lines = []
    for name, members in members_of(arguments).items():
        lines += _entry(name)
        lines += ["  " + line for each in members for line in _entry(f"{name}.{each}")]
    return "\n".join(lines)


def methods(_):
    """The class ``Communicator``, with its methods in groups."""
    lines = _entry("Communicator")
    for group, names in grouped().items():
        lines += ["", f"## {group}", ""]
        lines += [line for name in names for line in _entry(name)]
    return "\n".join(lines)


def members_of(arguments):
    """Return the names that an ``api`` block has, each with members of a class."""
    asked = arguments.split()
    left_out = {each[1:] for each in asked if each.startswith("!")}
    names = {}
    for each in asked:
        name, _, members = each.rpartition(".")
        if each.startswith("!"):
            continue
        if members == "*":
            names[name] = [m for m in _public(found(name)) if m not in left_out]
        elif isinstance(found(name or each), type):
            names[name or each] = members.split(",") if name else []
        else:
            names[each] = []
    return names


INTERNAL = ("disown",)
"""Methods that have no underscore, because other modules call them."""


def _public(cls):
    """Return the names of the public members, base classes' too, by their source."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("numba_symm")]
    names = dict.fromkeys(name for base in bases for name in vars(base))
    members = {name: inspect.getattr_static(cls, name) for name in names}
    return [
        name
        for name, member in members.items()
        if not name.startswith("_") and name not in INTERNAL
        if isinstance(member, _MEMBERS)
    ]


_MEMBERS = FunctionType, classmethod, staticmethod, property


def grouped():
    """Return the communicator's methods by their group."""
    groups = {name: [] for name in _GROUPS}
    for name, value in vars(Communicator).items():
        if not name.startswith("_") and name not in INTERNAL:
            groups[_group_of(name, value)].append(f"Communicator.{name}")
    return groups


_GROUPS = (
    *("Reductions", "Data movement", "Plans", "Messages"),
    *("Order and errors", "Memory, communicators"),
)


def _group_of(name, value):
    """Return the group of a method, which follows from its name and its arguments."""
    takes = set(inspect.signature(value).parameters) if callable(value) else set()
    if name == "prepare" or name.endswith("_init"):
        return "Plans"
    if "op" in takes or name in kernel_set.EXACT:
        return "Reductions"
    if name == "group" or takes & {"dst", "src"}:
        return "Messages"
    if "x" in takes:
        return "Data movement"
    checks = name in ("barrier", "synchronize", "check")
    return "Order and errors" if checks else "Memory, communicators"


def found(name):
    """Return what a dotted name below ``numba_symm`` stands for."""
    value = numba_symm
    for each in name.split("."):
        value = getattr(value, each)
    return value


def is_error(value):
    """Return whether a value is a class of errors."""
    return isinstance(value, type) and issubclass(value, BaseException)


def _entry(name):
    """Return a name's line: where links lead to, how it is called, what it does."""
    value, shown = found(name), name.rpartition(".")[2]
    is_type_only = getattr(value, "_is_protocol", False)
    if callable(value) and not is_error(value) and not is_type_only:
        shown += _signature(value)
    text = _plain((inspect.getdoc(value) or "").partition("\n\n")[0])
    return [f'- <a id="{name}"></a>`{shown}`: {text}']


def _signature(value):
    """Return the arguments without their types, and without ``self``."""
    signature = inspect.signature(value)
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in signature.parameters.items()
        if name != "self"
    ]
    text = str(inspect.Signature(parameters))
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def _plain(text):
    """Return a docstring's text as Markdown."""
    text = " ".join(text.split())
    text = re.sub(r":\w+:`~(?:\w+\.)*(\w+)`", r"`\1`", text)
    return re.sub(r":\w+:`([^`]+)`|``([^`]+)``", r"`\1\2`", text)


MAKERS = {
    "program": program,
    "measured": measured,
    "help": usage,
    "explored": explored,
    "algorithms": algorithms,
    "conditions": conditions,
    "examples": examples,
    "api": api,
    "methods": methods,
}


def current(block):
    """Return what should stand in the place of a block, the marks included."""
    kind, _, arguments = block["made"].partition(" ")
    text = MAKERS[kind](arguments) + "\n\n"
    if kind == "help" and _words(text) == _words(block["text"]):
        text = block["text"]  # Pythons differ in where they break lines
    return f"<!-- made: {block['made']} -->\n\n{text}<!-- end -->"


def _words(text):
    """Return the words of a help text, in which Python 3.13 changed the options."""
    return re.sub(r"(-\w) (\S+), (--[\w-]+) \2", r"\1, \3 \2", " ".join(text.split()))


def main():
    """Bring every page up to date, and print the names of those that were not."""
    for page in PAGES:
        text = page.read_text()
        written = BLOCK.sub(current, text)
        if written != text:
            page.write_text(written)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
