"""Parts of pages that are made from the code, so that they cannot disagree with it."""

import contextlib
import inspect
import io
import json
import re
import textwrap
from pathlib import Path
from types import MappingProxyType

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from numba_symm import dtypes
from numba_symm.bench import options
from numba_symm.collectives import operations, select
from numba_symm.collectives.algorithms import Arrays
from numba_symm.collectives.communicator import Communicator
from numba_symm.collectives.persistent import Persistent
from numba_symm.command import cli

RESULTS = Path(__file__).parents[2] / "bench/results"


class Help(SphinxDirective):
    """What ``numba-symm … -h`` prints; the argument is what stands for the dots."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        """Return the text as a literal block."""
        asked = [*self.arguments[0].split(), "-h"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            if asked[0] == "bench":  # whose command line starts MPI first
                options.parse(asked[1:], cli.BENCH)
            cli.main(asked)
        text = textwrap.dedent(printed.getvalue()).strip()
        block = nodes.literal_block(text, text)
        block["language"] = "text"
        return [block]


class Algorithms(SphinxDirective):
    """Which algorithm each operation chooses on GPUs, by bytes, type and ranks."""

    def run(self):
        """Return a table of the largest size of each algorithm."""
        ranks = [f"{number} ranks" for number in _RANKS]
        rows = [["operation", *ranks]]
        for name in select.ON_GPUS:
            operation = operations.OPERATIONS[name]
            names = ", ".join(f"`{each}`" for each in _with_limits_of(name))
            kinds = _REDUCED if operation.reduces else _MOVED
            for kind, dtype in kinds.items():
                element = dtypes.element(dtype, "docs")
                cells = [self._cell(operation, n, element) for n in _RANKS]
                rows.append([names + kind, *cells])
        return self.parse_text_to_nodes(_markdown(rows))

    def _cell(self, operation, size, element):
        def fastest(nbytes):
            name, choices = operation.name, select.ON_GPUS
            return select.fastest(name, nbytes, size, element, choices)

        lines, first = [], 1
        while first is not None:
            name = fastest(first)
            last = _last(lambda n, name=name: fastest(n) == name, first)
            most = (
                "above"
                if last is None
                else f"to {_human(last * operation.shards(size))}"
            )
            lines.append(f"{most}: `{name}`")
            first = None if last is None else last + 1
        return "<br>".join(lines)


class Conditions(SphinxDirective):
    """What the algorithms that work on the ranks' own arrays need."""

    def run(self):
        """Return a table of arrays and of other conditions."""
        rows = [
            ["algorithm", "arrays that are symmetric on every rank", "where, and more"]
        ]
        for name, operation in operations.OPERATIONS.items():
            for algorithm, made in operation.algorithms.items():
                if made.handshake:
                    arrays = made.arrays.replace("``", "`")
                    if operation.at_root:
                        arrays = arrays.replace("`out`", "`out` on the root")
                    where = [_WHERE[made.x], "not in place" * (not made.in_place)]
                    more = "; ".join(filter(None, [*where, made.ranks]))
                    rows.append([f"`{algorithm}`, `{name}`", arrays, more])
        return self.parse_text_to_nodes(_markdown(rows))


_WHERE = {
    Arrays.SYMMETRIC: "the address of each is a multiple of 16",
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


class Methods(SphinxDirective):
    """The communicator's methods, in groups."""

    def run(self):
        """Return a summary of each group."""
        groups = {name: [] for name in _GROUPS}
        for base in (Communicator, Persistent):
            for name, value in vars(base).items():
                if not name.startswith("_"):
                    groups[_group_of(name, value)].append(name)
        lines = ["```{eval-rst}", ".. currentmodule:: numba_symm"]
        for group, names in groups.items():
            lines += ["", f".. rubric:: {group}", "", ".. autosummary::"]
            lines += ["   :nosignatures:", ""]
            lines += [f"   Communicator.{name}" for name in names]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


_GROUPS = (
    *("Reductions", "Data movement", "Plans", "Messages"),
    *("Order and errors", "Memory, communicators"),
)


def _group_of(name, value):
    """Return the group of a method, which follows from its name and its arguments."""
    takes = set(inspect.signature(value).parameters) if callable(value) else set()
    if name == "prepare" or name.endswith("_init"):
        return "Plans"
    if "op" in takes:
        return "Reductions"
    if name == "group" or takes & {"dst", "src"}:
        return "Messages"
    if "x" in takes:
        return "Data movement"
    checks = name in ("barrier", "synchronize", "check")
    return "Order and errors" if checks else "Memory, communicators"


class Measured(SphinxDirective):
    """Recorded runs, as a table of microseconds: a column each for us and the others.

    The arguments are files of bench/results. The option names other contenders.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = MappingProxyType({"against": directives.unchanged_required})

    def run(self):
        """Return the table; the fastest of each run and size is bold."""
        columns = ["numba_symm", *self.options.get("against", "").split()]
        files = [RESULTS / name for name in self.arguments[0].split()]
        runs = [json.loads(file.read_text()) for file in files]
        for file in files:
            self.env.note_dependency(str(file))
        head, times = ["message"], {}
        for run in runs:
            names = [_NAMES.get(column, column) for column in columns]
            if len(runs) > 1:
                names[0] = f"`{run['operation']}`"
            head += names
            for row in run["rows"]:
                found = [_best(row, column) for column in columns]
                least = min(found)
                cells = [
                    f"**{_digits(t)}**" if t == least and len(found) > 1 else _digits(t)
                    for t in found
                ]
                times.setdefault(row[0]["bytes"], []).extend(cells)
        rows = [[_human(nbytes), *cells] for nbytes, cells in times.items()]
        return self.parse_text_to_nodes(_markdown([head, *rows]))


_NAMES = {"nccl": "NCCL", "nccl-symm": "NCCL symmetric"}


def _best(row, column):
    """Return the least time of a contender in graphs, out of place if it has one."""
    return min(
        (each["in_place"], each["graph"]["median"])
        for each in row
        if each["column"] == column and "graph" in each
    )[1]


def _digits(microseconds):
    return f"{microseconds:.1f}" if microseconds < 99.95 else f"{microseconds:.0f}"


def _human(nbytes):
    """Return bytes with a binary unit and at most three digits."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1023.5:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.3g} {units[0]}"


def _markdown(rows):
    """Return rows of cells, of which the first is the head, as a table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


INTERNAL = ("disown",)
"""Methods that have no underscore, because other modules call them."""


def skip(app, what, name, obj, skipped, options):
    """Leave internal methods out of the reference."""
    return True if name in INTERNAL else None


def write_sections(app, what, name, obj, options, lines):
    """Write a docstring's sections of prose as fields.

    Napoleon takes the words before a colon for a type. In this project no result has
    one, and an error section may refer to another method: "As :meth:`all_reduce`."
    """
    written, at = [], 0
    while at < len(lines):
        head, at = lines[at], at + 1
        start = at
        while at < len(lines) and (not lines[at] or lines[at].startswith(" ")):
            at += 1
        body = lines[start:at]
        errors = head == "Raises:" and body and not _NAMED_ERRORS(body[0])
        if head == "Returns:" or errors:
            written += ["", f":{head.lower()} {body[0].strip()}", *body[1:]]
        else:
            written += [head, *body]
    lines[:] = written


_NAMED_ERRORS = re.compile(r"\s+\w+(, \w+)*: ").match

_HOMES = ("numba_symm.Communicator.", "numba_symm.sharing.", "numba_symm.")


def resolve(app, env, node, content):
    """Link a docstring's short name, or a module's name for what is public above it.

    A docstring means its neighbours by their names alone; in a summary table, or on
    another page, Sphinx no longer knows whose neighbours.
    """
    python = env.get_domain("py")
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or not name:
        return None
    for home in _HOMES:
        found = python.objects.get(home + name)
        if found is not None:
            return python.resolve_xref(
                env,
                node["refdoc"],
                app.builder,
                node["reftype"],
                home + name,
                node,
                content,
            )
    return None


def setup(app):
    """Add the directives, and the way in which names are looked up."""
    for name, directive in (
        ("algorithms", Algorithms),
        ("conditions", Conditions),
        ("help", Help),
        ("methods", Methods),
        ("measured", Measured),
    ):
        app.add_directive(name, directive)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", write_sections, priority=400)
    return {"parallel_read_safe": True}
