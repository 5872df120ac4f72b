"""A pytest plugin that writes what each test has done into the folder MUTANTS_WATCH.

    PYTEST_ADDOPTS="-p tests.mutants.watching" MUTANTS_WATCH=FOLDER pytest …

Each process with pytest has a file of its own there, so also ranks and child processes
do. A line has a test and, after tabs, either its outcome and the seconds of processor
time it took, or, where MUTANTS_WATCH_CALLS is set, a function of the product that
it has called: its file, a colon, and its qualified name. Other processes than those
with pytest write nothing.
"""

import os
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = "numba_symm", "collectives", "launch", "bench"
OUTPUT = os.open(
    Path(os.environ["MUTANTS_WATCH"], f"{os.getpid()}.tsv"),
    os.O_WRONLY | os.O_APPEND | os.O_CREAT,
)
CALLS = "MUTANTS_WATCH_CALLS" in os.environ

names = {}  # by the identity of code: its file and name, or "" if it is not ours
kept = []  # the code, which therefore keeps its identity
seen = set()  # the identities of what the current test has called
current = ""  # the test


def write(*fields):
    """Append a line, in one step: forked processes have the same file."""
    os.write(OUTPUT, ("\t".join(map(str, fields)) + "\n").encode())


def named(code):
    """Return the file and the qualified name of code of the product, or ''."""
    path = Path(code.co_filename)
    if path.suffix != ".py" or not path.is_absolute():
        return ""
    path = path.resolve()  # numba_symm/launch is a link
    if not path.is_relative_to(ROOT):
        return ""
    path = path.relative_to(ROOT)
    return f"{path}:{code.co_qualname}" if path.parts[0] in PRODUCT else ""


def note(frame, event, argument):
    """Note a call, as the function that ``sys.settrace`` takes."""
    code = frame.f_code
    key = id(code)
    if key in seen:
        return
    name = names.get(key)
    if name is None:
        kept.append(code)
        name = names[key] = named(code)
    seen.add(key)
    if name and current:
        write(current, name)


def forget():
    """Let the next test's calls be noted, except those of foreign code."""
    seen.clear()
    seen.update(key for key, name in names.items() if not name)


def spent():
    """Return the seconds of processor time of this process and its children."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global current
    current, start = item.nodeid, spent()
    item.config.stash[OUTCOME] = "passed"
    if CALLS:
        forget()
        threading.settrace(note)
        sys.settrace(note)
    try:
        return (yield)
    finally:
        if CALLS:
            sys.settrace(None)
            threading.settrace(None)
        outcome = item.config.stash[OUTCOME]
        write(current, outcome, f"{spent() - start:.2f}")
        current = ""


OUTCOME = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if not report.passed:  # of its set-up, its call or what follows
        item.config.stash[OUTCOME] = report.outcome
    return report
