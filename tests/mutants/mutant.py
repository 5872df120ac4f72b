"""What a mutant is: a change of one place of the product, which tests should notice."""

import ast
from typing import NamedTuple


class Mutant(NamedTuple):
    """A text of a file, and another one in its place.

    Attributes:
        name: unlike those of all others.
        file: relative to the root.
        old: the text that it replaces.
        new: what replaces it.
        at: where the file has the old text; None: at its only occurrence.
        tests: the nearest tests, or files of tests; empty: recorded calls tell.
        equivalent: why no test can notice it; empty: one can.
    """

    name: str
    file: str
    old: str
    new: str
    at: int | None = None
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def change(self) -> str:
        """Its texts, on one line, for the results."""
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{old} -> {new}"

    def place(self, text: str) -> int | None:
        """Return where the file's text has the old one; None: it is gone."""
        if self.at is not None:
            return self.at if text.startswith(self.old, self.at) else None
        return text.index(self.old) if text.count(self.old) == 1 else None

    def applied(self, text: str) -> str | None:
        """Return the file's text with the change; None: the old text is gone."""
        place = self.place(text)
        if place is None:
            return None
        return text[:place] + self.new + text[place + len(self.old) :]

    def function(self, text: str) -> str:
        """Return the qualified name of the function that it changes, or ``<module>``.

        It is that of the function's code, so it has ``<locals>``.
        """
        place = self.place(text)
        assert place is not None
        # The first line may end before what is changed.
        first = place + len(self.old) - len(self.old.lstrip())
        line = text.count("\n", 0, first) + 1
        return _function_at(ast.parse(text), line) or "<module>"


def _function_at(node: ast.AST, line: int, outer: str = "") -> str:
    """Return the innermost function around a line, within ``node``."""
    found = ""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not child.lineno <= line <= (child.end_lineno or 0):
                continue
            name += child.name
            if isinstance(child, ast.ClassDef):
                found = _function_at(child, line, f"{name}.") or found
            else:
                found = _function_at(child, line, f"{name}.<locals>.") or name
        else:
            found = _function_at(child, line, name) or found
    return found
