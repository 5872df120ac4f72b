"""The processor time of each test, with that of the processes that it starts.

    pytest -p tests.costs [--costs FILE] ...

prints the files and the tests that cost most. Wall time says little: tests wait, and
two run at a time. FILE gets a line of JSON for each test, as soon as it ends. What a
server of ranks does for a test (spawned.py) is counted, because its time is read while
it runs.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests import processor

SHOWN = 40

collected = {}


def pytest_addoption(parser):
    parser.addoption("--costs", type=Path, help="a file for the cost of each test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = processor.seconds(os.getpid())
    item.user_properties.append(("before", before))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        before = dict(item.user_properties)["before"]
        cost = processor.seconds(os.getpid()) - before
        item.user_properties.append(("processor", cost))


class Costs:
    """Collects the costs, in the process that prints the report."""

    def __init__(self, file):
        self.file = file

    def pytest_runtest_logreport(self, report):
        known = dict(report.user_properties)
        if report.when == "teardown" and "processor" in known:
            collected[report.nodeid] = known["processor"]
            if self.file:
                with self.file.open("a") as lines:
                    print(json.dumps([report.nodeid, known["processor"]]), file=lines)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.getoption("--costs")), "costs")


def pytest_terminal_summary(terminalreporter):
    files = defaultdict(float)
    for test, cost in collected.items():
        files[test.partition("::")[0]] += cost
    total = sum(files.values())
    terminalreporter.section(f"processor time: {total:.0f} s in {len(collected)} tests")
    for found in (files, collected):
        for name, cost in sorted(found.items(), key=lambda each: -each[1])[:SHOWN]:
            terminalreporter.line(f"{cost:8.1f} s  {name}")
