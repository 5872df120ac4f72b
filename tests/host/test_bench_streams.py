"""Captures of the benchmark that raise, on a stand-in for the driver."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from numba_symm.bench import measure
from numba_symm.gpu import driver

STEPS = [
    *("cuStreamBeginCapture", "call", "cuStreamEndCapture"),
    "cuGraphInstantiate",
]


class Driver:
    """Captures of one stream, with an interrupt before or after one of the steps."""

    def __init__(self, step="", after=False):
        self.step, self.after = step, after
        self.capturing, self.graphs = False, set()

    def interrupt(self, step, after):
        if (step, after) == (self.step, self.after):
            self.step = ""
            raise KeyboardInterrupt

    def made(self, graph):
        self.graphs.add(graph)
        return 0, graph

    def function(self, name):
        if name == "CUstreamCaptureMode":
            return SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
        return lambda *args: self.run(name, *args)

    def run(self, name, *args):
        self.interrupt(name, False)
        found = getattr(self, name)(*args)
        self.interrupt(name, True)
        return found

    def cuStreamBeginCapture(self, stream, mode):
        self.capturing = True
        return (0,)

    def cuStreamEndCapture(self, stream):
        if not self.capturing:
            return 1, None
        self.capturing = False
        return self.made("graph")

    def cuGraphInstantiate(self, graph, flags):
        return self.made("executable")

    def cuGraphDestroy(self, graph):
        self.graphs.remove(graph)
        return (0,)

    cuGraphExecDestroy = cuGraphDestroy


def capture(monkeypatch, fake):
    monkeypatch.setattr(driver, "function", fake.function)
    monkeypatch.setattr(measure.cuda, "defer_cleanup", nullcontext)
    stream = object.__new__(measure.GpuStream)
    stream.handle = 7
    fake.call = lambda *handle: handle
    return stream.capture([fake.function("call")], lambda _: nullcontext())


def test_a_graph_is_destroyed_when_it_is_dropped(monkeypatch):
    fake = Driver()
    graph = capture(monkeypatch, fake)
    assert fake.graphs == {"executable"}
    del graph
    assert fake.graphs == set()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_capture_ends_if_it_is_interrupted(monkeypatch, step, after):
    fake = Driver(step, after)
    with pytest.raises(KeyboardInterrupt):
        capture(monkeypatch, fake)
    assert not fake.capturing
    # What the driver had made but not returned is lost.
    lost = {"cuStreamEndCapture": {"graph"}, "cuGraphInstantiate": {"executable"}}
    assert fake.graphs == (lost.get(step, set()) if after else set())
