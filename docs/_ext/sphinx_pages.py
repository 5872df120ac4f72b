"""What the site has beyond the pages: docstrings, contents, and what a search finds."""

import re

import pages

CONTENTS = "<!-- contents -->"
"""What follows it on a page are headings, and links to other pages."""


def read(app, docname, source):
    """Put whole docstrings in the place of lists of names, and add the contents."""
    text = pages.BLOCK.sub(_documented, source[0])
    text = _VARIABLES.sub(_indexed, text)
    source[0] = text + "".join(_toctrees(text.partition(CONTENTS)[2]))


_VARIABLES = re.compile(r"^\| variable \|.*\n(?:\|.*\n)+", re.M)


def _indexed(table):
    """Name each variable in the index, of which a search shows the entries first."""
    names = re.findall(r"^\| `(?:NUMBA_SYMM_)?(\w+)`", table[0], re.M)
    words = ", ".join(f"! {name.replace('_', ' ').lower()}" for name in names)
    return f"```{{index}} {words}\n```\n\n{table[0]}"


def _documented(block):
    """Return what the site has instead of a block of a page."""
    kind, _, arguments = block["made"].partition(" ")
    if kind not in ("api", "methods"):
        return block[0]
    home = "numba_symm"
    lines = [f".. currentmodule:: {home}"]
    if kind == "methods":
        parts = [_block([*lines, *_shown("Communicator")])]
        for group, names in pages.grouped().items():
            whole = [line for name in names for line in _shown(name)]
            parts += [f"## {group}", _block([*lines, *_summary(names), *whole])]
        return "\n\n".join(parts)
    listed = pages.members_of(arguments)
    if len(listed) > 1:
        lines += _summary(listed)
    for name, members in listed.items():
        lines += _shown(name)
        if members:
            lines += [f"   :members: {', '.join(members)}", "   :inherited-members:"]
    return _block(lines)


def _block(lines):
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _shown(name):
    """Return the directive that shows a name's whole docstring."""
    found = pages.found(name)
    if pages.is_error(found):
        kind = "exception"
    elif isinstance(found, type):
        kind = "class"
    elif isinstance(found, property):
        kind = "property"
    else:
        kind = "method" if name.startswith("Communicator.") else "function"
    return ["", f".. auto{kind}:: numba_symm.{name}"]


def _summary(names):
    return [
        "",
        ".. autosummary::",
        "   :nosignatures:",
        "",
        *(f"   {n}" for n in names),
    ]


def _toctrees(text):
    """Return a table of contents for each heading: what the links below it name."""
    caption, linked = "", {}
    for heading, target in re.findall(r"^#+ (.+)$|\]\(([^)#]+)\.md\)", text, re.M):
        caption = heading or caption
        if target:
            linked.setdefault(caption, []).append(target)
    for caption, targets in linked.items():
        options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
        yield "\n".join(["\n\n```{toctree}", *options, "", *targets, "```"])


def anchors(app, env):
    """Let links of pages lead to docstrings, as they do to the names in the pages."""
    home = "numba_symm."
    for name, found in env.get_domain("py").objects.items():
        slugs = env.metadata[found.docname].setdefault("myst_slugs", {})
        slugs[name.removeprefix(home)] = (0, found.node_id, name)


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

_HOMES = tuple(
    f"numba_symm.{home}" for home in ("Communicator.", "sharing.", "", "device.")
)


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
    """Follow the pages' reading, and the way in which names are looked up."""
    app.connect("source-read", read)
    app.connect("env-updated", anchors)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", write_sections, priority=400)
    return {"parallel_read_safe": True}
