"""Captures of the benchmark that raise, on a stand-in for the driver."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from numba_symm.bench import measure
from numba_symm.gpu import driver

STEPS = [
    *("cuStreamBeginCapture", "call", "cuStreamEndCapture"),
    *("cuGraphGetNodes", "cuGraphInstantiate"),
]

NCCL = b"_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE"
TORCH = b"_ZN4c10d12_GLOBAL__N_1L15two_shot_kernelIfLi16ELi4EEEvPPT_S3_mjmm"
OTHER = [("kernel", 9, b"9plain", (2, 3, 4))]
NODES = [
    ("copy",),
    ("kernel", 0, NCCL, (24, 1, 1)),
    ("kernel", 0, NCCL, (24, 1, 1)),
    ("kernel", 8, TORCH, (200, 1, 1)),
    ("graph", OTHER),
]
"""Of each node: its kind. Of a kernel: the function's handle or 0, its symbol,
its grid. Of a graph: its nodes."""


class Driver:
    """Captures of one stream, with an interrupt before or after one of the steps."""

    def __init__(self, step="", after=False, names=True):
        self.step, self.after, self.names = step, after, names
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
        if name == "CUgraphNodeType":
            kinds = "CU_GRAPH_NODE_TYPE_KERNEL", "CU_GRAPH_NODE_TYPE_GRAPH"
            return SimpleNamespace(**dict(zip(kinds, ("kernel", "graph"), strict=True)))
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

    def cuGraphGetNodes(self, graph, count):
        assert graph is OTHER or graph in self.graphs
        nodes = OTHER if graph is OTHER else NODES
        return 0, nodes[:count], len(nodes)

    def cuGraphNodeGetType(self, node):
        return 0, node[0]

    def cuGraphChildGraphNodeGetGraph(self, node):
        return 0, node[1]

    def cuGraphKernelNodeGetParams(self, node):
        _, function, symbol, grid = node
        sizes = dict(zip(("gridDimX", "gridDimY", "gridDimZ"), grid, strict=True))
        kernel = None if function else symbol
        return 0, SimpleNamespace(func=function, kern=kernel, **sizes)

    def cuFuncGetName(self, function):
        assert function
        if not self.names:
            raise RuntimeError('Function "cuFuncGetName" is not found')
        return 0, next(node[2] for node in [*NODES[1:4], *OTHER] if node[1] == function)

    def cuKernelGetName(self, kernel):
        return 0, kernel

    def cuGraphInstantiate(self, graph, flags):
        return self.made("executable")

    def cuGraphDestroy(self, graph):
        self.graphs.remove(graph)
        return (0,)

    cuGraphExecDestroy = cuGraphDestroy


def capture(monkeypatch, fake):
    monkeypatch.setattr(driver, "function", fake.function)
    monkeypatch.setattr(measure.cuda, "defer_cleanup", nullcontext)
    device = SimpleNamespace(MULTIPROCESSOR_COUNT=132)
    monkeypatch.setattr(measure.cuda, "get_current_device", lambda: device)
    stream = object.__new__(measure.GpuStream)
    stream.handle = 7
    fake.call = lambda *handle: handle
    return stream.capture([fake.function("call")], lambda _: nullcontext())


@pytest.mark.parametrize("names", [True, False])
def test_a_graph_lists_the_kernels_that_were_captured(monkeypatch, names):
    graph = capture(monkeypatch, Driver(names=names))
    assert [tuple(each.values()) for each in graph.launches] == [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 24, 24, None),
        ("two_shot_kernel" if names else "?", 200, 132, None),
        ("9plain" if names else "?", 24, 24, None),
    ]


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
