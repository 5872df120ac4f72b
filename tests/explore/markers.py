"""Markers in the device code, and edits that break the code at them.

A marker is a comment ``# explore: NAME``, with a name of its own in its file. It stands
at the end of a statement's first line, or alone above the statement, and means all of
it. An edit names a module by its last name, and a marker in it. So comments, texts and
the rest of the code may change:

    removed("flags", "fence")                       nothing in its place
    replaced("flags", "agree", "return failed")     other statements in its place
    within("flags", "raise", "4 * rank", "0")       a part of it is another
    moved("flags", "synchronize", after="fence")           it runs later, or earlier

What an edit puts in may call any intrinsic, imported there or not.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass

_MARKER = re.compile(r"# explore: ([a-z]+(?:-[a-z]+)*)")

EDITS = []
"""All edits that the imported modules have made."""


@dataclass(frozen=True)
class Edit:
    """What is done to the statement at a marker.

    Attributes:
        module: the last name of the module.
        marker: the marker's name.
    """

    module: str
    marker: str

    def __post_init__(self):
        EDITS.append(self)

    @property
    def markers(self):
        """The names of the markers that it uses."""
        return {self.marker}

    @property
    def names(self):
        """The names in the code that is put in."""
        nodes = ast.walk(ast.parse(getattr(self, "new", "")))
        return {node.id for node in nodes if isinstance(node, ast.Name)}

    def apply(self, tree, places):
        """Edit ``tree``, whose statements at markers are ``places``."""
        missing = self.markers - places.keys()
        assert not missing, f"{self}: expected markers {missing}, got none"
        before = ast.dump(tree)
        self._apply(tree, places)
        assert ast.dump(tree) != before, f"{self}: expected a change, got none"


@dataclass(frozen=True)
class _Replaced(Edit):
    new: str

    def _apply(self, tree, places):
        statement = places[self.marker]
        body = _body_of(statement, tree)
        at = body.index(statement)
        body[at : at + 1] = _placed(ast.parse(self.new).body, statement)


@dataclass(frozen=True)
class _Within(Edit):
    old: str
    new: str

    def _apply(self, tree, places):
        part = _Part(self.old, self.new)
        part.visit(places[self.marker])
        assert part.found == 1, f"{self}: expected 1 such part, got {part.found}"


@dataclass(frozen=True)
class _Moved(Edit):
    beside: str
    later: bool

    @property
    def markers(self):
        return {self.marker, self.beside}

    def _apply(self, tree, places):
        statement, other = places[self.marker], places[self.beside]
        _body_of(statement, tree).remove(statement)
        body = _body_of(other, tree)
        body.insert(body.index(other) + self.later, statement)


def removed(module, marker):
    """Return the edit that removes a statement."""
    return _Replaced(module, marker, "pass")


def replaced(module, marker, new):
    """Return the edit that puts other statements in a statement's place."""
    return _Replaced(module, marker, new)


def within(module, marker, old, new):
    """Return the edit that replaces an expression or a statement within a statement.

    There must be one such part; how its text is laid out does not matter.
    """
    return _Within(module, marker, old, new)


def moved(module, marker, *, after=None, before=None):
    """Return the edit that moves a statement after or before another."""
    assert (after is None) != (before is None)
    return _Moved(module, marker, after or before, after is not None)


def marked(text, tree):
    """Return the statements of ``tree`` by the names of their markers in ``text``."""
    statements = {}  # the outermost that begins on a line
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            for start in (node, *getattr(node, "decorator_list", ())):
                statements.setdefault(start.lineno, node)
    places = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or "explore:" not in token.string:
            continue
        match = _MARKER.fullmatch(token.string)
        assert match, f"expected '# explore: NAME', got {token.string!r}"
        line, column = token.start
        if token.line[:column].isspace() or column == 0:
            line = min((first for first in statements if first > line), default=0)
        assert line in statements, (
            f"{token.string!r}: expected a statement's first line"
        )
        assert match[1] not in places, f"{token.string!r}: expected once, got twice"
        places[match[1]] = statements[line]
    return places


class _Part(ast.NodeTransformer):
    """Replaces the parts that are as ``old``, and counts them."""

    def __init__(self, old, new):
        self._old, self._new = _only(old), _only(new)
        if not isinstance(self._new, ast.expr):
            self._old = ast.parse(old).body[0]
        self.found = 0

    def visit(self, node):
        if ast.dump(node) != ast.dump(self._old):
            return super().generic_visit(node)
        self.found += 1
        (new,) = _placed([self._new], node)
        return new


def _only(code):
    """Return the expression or statement that ``code`` is."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _placed(nodes, there):
    """Return the nodes, which take their lines from the node ``there``."""
    for node in nodes:
        for part in ast.walk(node):
            ast.copy_location(part, there)
    return nodes


def _body_of(statement, tree):
    """Return the list of statements that a statement is in."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and any(each is statement for each in value):
                return value
    raise AssertionError("the statement is gone: another edit has removed it")
