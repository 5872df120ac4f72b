"""A sample of mutants, drawn from the syntax trees of the whole product.

Each place where an operator below applies has a number, a hash of the seed, the file,
the function, and the texts. The sample is the places with the smallest numbers. So it
depends on the seed and on the tree only, and a change of one function changes no more
than this function's mutants.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant

SEED = 51
PRODUCT = "numba_symm", "collectives", "launch", "bench"

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
REMOVED = ast.AugAssign, ast.Raise, ast.Delete, ast.Break, ast.Continue


def files(root: Path) -> list[str]:
    """Return the product's files, relative to the root, without those behind links."""
    return sorted(
        str(path.relative_to(root))
        for folder in PRODUCT
        for path in (root / folder).rglob("*.py")
        if not any(part.is_symlink() for part in path.parents)
    )


class _Places(ast.NodeVisitor):
    """Collects (function, first byte, end, new text) of every place of a file."""

    def __init__(self, text: str) -> None:
        self.found: list[tuple[str, int, int, str]] = []
        self._names: list[str] = []
        self._text = text.encode()
        self._lines = [0]
        for line in self._text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.expr) -> str:
        return self._text[self._start(node) : self._end(node)].decode()

    def _add(self, start: int, end: int, new: str) -> None:
        self.found.append((".".join(self._names), start, end, new))

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self._add(self._start(node), self._end(node), new)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace an operator between two operands."""
        start, end = self._end(left), self._start(right)
        between = self._text[start:end].decode()
        if between.count(old) == 1:
            self._add(start, end, between.replace(old, new))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit a function's defaults and body."""
        self._names.append(node.name)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._body(node.body)
        self._names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit a class's body."""
        self._names.append(node.name)
        self._body(node.body)
        self._names.pop()

    def _body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value, without the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts as they are."""

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call."""
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remove what is stored elsewhere than in a local variable."""
        kept = ast.Attribute, ast.Subscript
        if self._names and all(isinstance(each, kept) for each in node.targets):
            self._replace(node, "pass")
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Remove some kinds of statements; visit what a node consists of."""
        if isinstance(node, REMOVED):
            self._replace(node, "pass")
        super().generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Remove it, and leave its message as it is."""
        self._replace(node, "pass")

    def visit_If(self, node: ast.If) -> None:
        """Let a branch always run, or never."""
        if "TYPE_CHECKING" not in self._source(node.test):
            self._replace(node.test, "True")
            self._replace(node.test, "False")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Move a bound, or negate a comparison."""
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(
            operands, operands[1:], node.ops, strict=False
        ):
            self._between(left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Leave out an operand."""
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            others = [each for each in node.values if each is not left_out]
            joined = word.join(f"({self._source(each)})" for each in others)
            self._replace(node, joined)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Leave out a negation."""
        if isinstance(node.op, ast.Not):
            self._replace(node, f"bool({self._source(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Use another operation, except on texts."""
        sides = [node.left, node.right]
        texts = any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in sides
        )
        if type(node.op) in ARITHMETIC and not texts:
            self._between(*sides, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Add 1 to an integer."""
        if type(node.value) is int:
            self._replace(node, str(node.value + 1))


def places(file: str, text: str) -> Iterator[tuple[str, Mutant]]:
    """Yield a number and a mutant for each place of a file."""
    visitor, raw = _Places(text), text.encode()
    visitor.visit(ast.parse(text))
    same: Counter[str] = Counter()
    for function, start, end, new in visitor.found:
        old = raw[start:end].decode()
        key = "\n".join([str(SEED), file, function, old, new])
        digest = hashlib.sha256(f"{key}\n{same[key]}".encode()).hexdigest()
        same[key] += 1
        name = f"{file}:{function or '<module>'}:{digest[-8:]}"
        yield digest, Mutant(name, file, old, new, at=len(raw[:start].decode()))


def sample(root: Path, number: int) -> list[Mutant]:
    """Return so many mutants of the tree at ``root``, sorted by their files."""
    every = [
        place
        for file in files(root)
        for place in places(file, (root / file).read_text())
    ]
    return sorted(mutant for _, mutant in sorted(every)[:number])
