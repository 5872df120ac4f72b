"""Collectives that are drawn, and what NumPy has for them.

All ranks draw the same call from a seed, and each one draws its own arrays: where they
begin, whether peers can reach them, whether their elements have gaps.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from mpi4py import MPI
from numba import cuda

from numba_symm import dtypes
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.partition import LINE
from numba_symm.collectives.protocols.workspace import CHUNKED, THREADS
from numba_symm.environment import SIMULATED
from tests import operators
from tests.algorithms import ONE_SHOTS, PROTOCOLS, entry, takes
from tests.drivers.sides import rng
from tests.ranks.helpers import Window, get, ordinary, put

MOST = 20_000 if SIMULATED else 1 << 22  # bytes of a rank's input
FEW = 1 << 16  # elements of arrays with gaps
V_FORMS = ("gather_v", "scatter_v", "all_gather_v", "reduce_scatter_v", "all_to_all_v")
NAMES = (*OPERATIONS, "gather", "scatter", *V_FORMS)
PLACES = ("new", "out", "out", "in place")
SIZES = {f"of {n} bytes": np.dtype([("", np.uint8, (n,))]) for n in (3, 20, 24, 40)}
"""Elements that are moved only."""
DTYPES = {name: kind.dtype for name, kind in operators.ELEMENTS.items()} | SIZES


def difference(a, b):
    return a - b


def over_islands(parts, inputs, op):
    """Return the reduction of some ranks' inputs, by rank: over islands in order."""
    kind = dtypes.element(next(iter(inputs.values())).dtype, "test")
    kept = kind.accumulate if kind.floating or op == "avg" else kind.dtype
    function = operators.NUMPYS.get(op, op)
    if kind.complex and op == "prod":
        function = operators._product
    if op in ("min", "max"):
        function = operators._first_of(op)
    with np.errstate(all="ignore"):
        wide = {rank: each.astype(kept) for rank, each in inputs.items()}
        total = operators.over_islands(function, parts, wide)
        if op == "avg":
            total = operators._divided(total, len(inputs), kind)
        if op in dtypes.LOGICAL:
            total = total != 0
        return total.astype(kept).astype(kind.dtype)


def wanted(comm, name, inputs, op, root):
    """Return this rank's output of an operation; None if it has none."""
    rank, size = comm.rank, comm.size
    share = len(inputs[0]) // size
    mine = slice(rank * share, (rank + 1) * share)
    if name == "broadcast":
        return inputs[root]
    if name == "all_gather":
        return np.concatenate(inputs)
    if name == "all_to_all":
        return np.concatenate([each[mine] for each in inputs])
    if name == "reduce" and rank != root:
        return None
    part = mine if name == "reduce_scatter" else slice(None)
    used = {"scan": range(rank + 1), "exscan": range(rank)}
    used = (used | {"reverse_scan": range(rank, size)}).get(name, range(size))
    if not used:  # of a function, no identity is known: the output stays
        none = 0xA5 if op is difference else dtypes.identity(op, inputs[0].dtype)
        kind = np.uint8 if op is difference else inputs[0].dtype
        length = inputs[0].nbytes // np.dtype(kind).itemsize
        return np.full(length, none, kind).view(inputs[0].dtype)
    return over_islands(comm.islands, {r: inputs[r][part] for r in used}, op)


def edges(name, algorithm, itemsize, comm):
    """Return counts around where a thread, block, tile, shard or epoch begins."""
    lanes, blocks = max(1, 16 // itemsize), comm._calls.end.max_blocks
    tiles = CHUNKED.tiles(comm.size)
    region = entry(name, algorithm).region if algorithm else None
    if region in PROTOCOLS:
        blocks = min(blocks, PROTOCOLS[region].blocks)
        tiles = PROTOCOLS[region].tiles(comm.size)
    shares = {1} if region in ONE_SHOTS else {1, comm.size, max(1, comm.size - 1)}
    block = THREADS * lanes
    units = {1, lanes, LINE * lanes, block, block * tiles, block * blocks}
    units |= {block * blocks * tiles, 2 * block * blocks * tiles}
    return sorted({unit * share for unit in units for share in shares})


@dataclass
class Call:
    """What is equal on all ranks."""

    name: str
    kind: str
    op: object
    algorithm: str | None
    count: int
    root: int
    place: str
    planned: bool
    seed: tuple

    @property
    def operation(self):
        return OPERATIONS.get(self.name)


def drawn(comm, *seed):
    """Return a call."""
    draw = rng(*seed)
    name = draw.choice(NAMES)
    kind, op = draw.choice(operators.PAIRS)
    operation, size = OPERATIONS.get(name), comm.size
    if operation is not None and op in operation.without:
        op = "sum" if kind != "bool" else "lor"
    moves = operation is not None and not operation.reduces
    if moves and draw.random() < 0.3:
        kind = draw.choice([*SIZES])
    alike = len(comm.islands) == 1 and kind != "bool"
    if operation is not None and alike and draw.random() < 0.1:
        op = difference
    algorithm = None
    if operation is not None and len(comm.islands) == 1 and draw.random() < 0.8:
        fit = [a for a, made in operation.algorithms.items() if made.fewest <= size]
        fit = [a for a in fit if takes(name, a, DTYPES[kind])]
        algorithm = draw.choice(fit) if size > 1 else None
    shards = size if operation is None else operation.shards(size)
    itemsize = DTYPES[kind].itemsize
    most = max(1, MOST // itemsize // max(shards, 1))
    of = name if algorithm else "all_reduce"
    near = [n for n in edges(of, algorithm, itemsize, comm) if n < most]
    count = draw.choice(near) + draw.choice([-1, 0, 1])
    if draw.random() < 0.4:
        count = int(most ** draw.random()) - draw.choice([0, 0, 1])
    root, place = draw.randrange(size), draw.choice(PLACES)
    place = "out" if op is difference and name == "exscan" else place
    count, planned = max(0, count), draw.random() < 0.15
    return Call(name, kind, op, algorithm, count, root, place, planned, seed)


class Pool:
    """Symmetric memory for the calls between two checks: allocating is collective."""

    TOGETHER = 8

    def __init__(self, comm, nbytes=None):
        nbytes = nbytes or 2 * (MOST + 1024) * (comm.size + 1)
        self._all = [comm.empty(nbytes, np.uint8) for _ in range(2 * self.TOGETHER)]
        self.reset()

    def reset(self):
        self._left = iter(self._all)

    def take(self):
        """Return another piece, or one of no bytes."""
        return next(self._left, self._all[0][:0])


class Arrays:
    """This rank's arrays of a call, with what may not be written around them."""

    def __init__(self, pool, draw, dtype, direct):
        self.pool, self.dtype, self.draw = pool, dtype, draw
        self._direct, self._held = direct, []

    def of(self, host, shape=None, order="C"):
        """Return a device array with a host array's elements.

        Its elements may have gaps, and may begin anywhere in their memory. If it has a
        shape, they are in its order.
        """
        draw, shape = self.draw, shape or host.shape
        symmetric, gaps = draw.random() < 0.5, draw.random() < 0.2
        offset = draw.choice([0, 0, 0, 1, 3, max(1, 16 // self.dtype.itemsize)])
        if self._direct:
            symmetric, gaps, offset = True, False, 16 // self.dtype.itemsize
        longest = host.size + offset + Window.MARGIN
        view, shared = self._dense(host.size, shape, offset, order), self.pool.take()
        # Numba visits each element of a view with gaps, in Python.
        if gaps and order == "C" and 0 < host.size <= FEW:
            longest, view = self._with_gaps(shape, draw)
        nbytes = longest * self.dtype.itemsize
        if symmetric and nbytes <= shared.size:
            buffer = shared[:nbytes].view(self.dtype)
        else:
            buffer = ordinary(longest, self.dtype)
        array, inside = view(buffer), view(np.arange(longest)).ravel(order)
        self._held.append((array, buffer, inside))
        self.write(array, host)
        return array

    def _dense(self, count, shape, offset, order):
        """Return what makes a view without gaps, of memory with other elements."""

        def view(memory):
            part = memory[offset : offset + count]
            return part if len(shape) == 1 else part.reshape(shape, order=order)

        return view

    def _with_gaps(self, shape, draw):
        """Return the elements that a view with gaps needs, and what makes the view."""
        step, more = draw.choice([(1, 2), (2, 0), (3, 1)])
        wide = (*shape[:-1], step * shape[-1] + more)
        if len(shape) > 1 and draw.random() < 0.5:
            wide = (shape[0] + draw.randrange(3), *wide[1:])
        places = (*map(slice, shape[:-1]), slice(more, wide[-1], step))
        longest = int(np.prod(wide))

        def view(memory):
            return memory[:longest].reshape(wide)[places]

        return longest + Window.MARGIN, view

    def write(self, array, host):
        """Change an array's elements."""
        _, buffer, inside = next(each for each in self._held if each[0] is array)
        whole = np.full(buffer.size * self.dtype.itemsize, 0xA5, np.uint8)
        whole.view(self.dtype)[inside] = host
        put(buffer.view(np.uint8), whole)

    def read(self, array, order="C"):
        """Return an array's elements, and check what is around them."""
        for held, buffer, inside in self._held:
            if held is array:
                whole = get(buffer.view(np.uint8)).view(self.dtype)
                around = np.delete(whole, inside).tobytes()
                assert set(around) <= {0xA5}, "written outside of the array"
                return np.ascontiguousarray(whole[inside])
        if self.dtype.names and array.size:
            return array.view(np.uint8).copy_to_host().ravel().view(self.dtype)
        found = array.copy_to_host() if self.dtype.kind == "c" else get(array)
        return found.ravel(order)


class Made:
    """A call of this rank, which was enqueued, and its check."""

    shape, order = None, "C"

    def __init__(self, comm, pool, call):
        self.comm, self.call = comm, call
        self.dtype = DTYPES[call.kind]
        made = entry(call.name, call.algorithm) if call.algorithm else None
        often = rng(*call.seed, "direct").random() < 0.8
        direct = made is not None and made.handshake and often
        self.arrays = Arrays(pool, rng(*call.seed, comm.rank), self.dtype, direct)
        build = self._of_table if call.operation else getattr(self, f"_{call.name}")
        name, args, options = build()
        self._as_programs_do(options)
        draw = rng(*call.seed, "captured")
        captures = not SIMULATED and len(comm.islands) == 1 and call.place != "new"
        if captures and draw.random() < 0.2:
            self.found = self._replayed(partial(getattr(comm, name), *args, **options))
        elif call.planned:
            plan = getattr(comm, name + "_init")(*args, **options)
            for own in self.inputs[comm.rank][::-1], self.inputs[comm.rank]:
                if self.x is not None:  # a plan reads its input anew
                    self.arrays.write(self.x, own)
                self.found = plan()
        else:
            if rng(*call.seed, "stream", comm.rank).random() < 0.2:
                options["stream"] = cuda.stream()
            self.found = getattr(comm, name)(*args, **options)

    def _replayed(self, call):
        """Capture a call that was made before, and replay it with other inputs."""
        from cuda.core import Device

        from tests.gpu.helpers import capturing

        stream = Device().create_stream()
        found = call(stream=stream)  # compiled, and its memory allocated
        with capturing(stream) as (builder, graphs):
            call(stream=builder.stream)
        for own in self.inputs[self.comm.rank][::-1], self.inputs[self.comm.rank]:
            self.comm.synchronize(stream)
            if self.x is not None:
                self.arrays.write(self.x, own)
            cuda.synchronize()  # a copy returns before it has arrived
            graphs[0].launch(stream)
        self.comm.synchronize(stream)
        return found

    def _as_programs_do(self, options):
        """Be late, wait for all, or pass an operator of MPI and a root of NumPy."""
        draw = rng(*self.call.seed, "habits")
        if draw.random() < 0.1:
            self.comm.barrier()
        if draw.random() < 0.05 and draw.randrange(self.comm.size) == self.comm.rank:
            time.sleep(0.05)
        named = str(options.get("op")).upper()
        if draw.random() < 0.2 and hasattr(MPI, named):
            options["op"] = getattr(MPI, named)
        if draw.random() < 0.2 and "root" in options:
            options["root"] = np.uint8(options["root"])

    def _inputs(self, counts):
        """Return every rank's input, of so many elements, half of them special."""
        key = [len(self.call.seed), *map(hash, self.call.seed)]
        key = [each & 0xFFFFFFFF for each in key]
        self.inputs = []
        for rank, count in enumerate(counts):
            lot = np.random.default_rng([*key, rank, 1])
            if self.call.kind in SIZES:
                found = np.frombuffer(
                    lot.bytes(count * self.dtype.itemsize), self.dtype
                )
            else:
                found = operators.random(self.call.kind, count, [*key, rank])
                chosen = np.flatnonzero(lot.integers(0, 2, count))
                found[chosen] = lot.choice(
                    operators.special(self.call.kind), chosen.size
                )
            self.inputs.append(found)
        return self.inputs[self.comm.rank]

    def _shaped(self, count, rows):
        """Return the shape and order of an input, with so many rows at least."""
        draw, reduces = rng(*self.call.seed, "shape"), self.call.operation.reduces
        columns = draw.choice([n for n in (1, 2, 3) if count % (n * rows) == 0])
        if draw.random() < 0.5:
            return None, "C"
        inner = count // columns // rows
        two = draw.choice([n for n in (1, 2) if inner % n == 0])
        shapes = [(count // columns, columns), (rows, inner, columns)]
        shape = draw.choice([*shapes, (rows, two, inner // two, columns)])
        sides = self.call.operation.exchange.sends_shards
        return shape, draw.choice("CF") if reduces and not sides else "C"

    def _of_table(self):
        call, comm, operation = self.call, self.comm, self.call.operation
        own = self._inputs([call.count * operation.shards(comm.size)] * comm.size)
        self.wanted = wanted(comm, call.name, self.inputs, call.op, call.root)
        shards = operation.shards(comm.size)
        shape, order = self._shaped(call.count * shards, shards)
        self.x, options = self.arrays.of(own, shape, order), {}
        options["algorithm"] = call.algorithm
        self.shape, self.order = self.x.shape, order
        if call.name == "reduce_scatter":
            self.shape = (self.shape[0] // comm.size, *self.shape[1:])
        elif "gather" in call.name:
            self.shape = (comm.size, *self.shape)
        if operation.reduces:
            options["op"] = call.op
        if operation.rooted:
            options["root"] = call.root
        if not operation.in_place:
            options["out"] = self._out()
        return call.name, (self.x,), options

    def _out(self):
        """Return the output that a call gets: none, another array, or its input."""
        place, rank = self.call.place, self.comm.rank
        if self.wanted is None or place == "new":
            return None
        if place == "in place" and self.wanted.size == self.x.size:
            return self.x
        dense = self.x.ndim == 1 or self.x.is_c_contiguous()
        if place == "in place" and self.call.name == "reduce_scatter" and dense:
            flat = self.x if self.x.ndim == 1 else self.x.reshape(self.x.size)
            return flat[rank * self.wanted.size :][: self.wanted.size]
        host = np.full(self.wanted.size * self.dtype.itemsize, 0xA5, np.uint8)
        of = (self.shape, self.order) if self.order == "F" else ()
        return self.arrays.of(host.view(self.dtype), *of)

    def _counts(self):
        draw = rng(*self.call.seed, "counts")
        return [draw.randrange(self.call.count + 1) for _ in range(self.comm.size)]

    def _spread(self, parts, key):
        """Return displacements of parts in an output, in any order, and its contents.

        A new output has the parts one after another.
        """
        draw, displs, end = rng(*self.call.seed, "places", key), [0] * len(parts), 0
        if self.call.place == "new" or draw.random() < 0.5:
            return None, np.concatenate(parts)
        for part in draw.sample(range(len(parts)), len(parts)):
            end += draw.randrange(3)
            displs[part] = end
            end += parts[part].size
        whole = np.full(end * self.dtype.itemsize, 0xA5, np.uint8).view(self.dtype)
        for first, part in zip(displs, parts, strict=True):
            whole[first : first + part.size] = part
        return displs, whole

    def _gather(self, uneven=False):
        call, size = self.call, self.comm.size
        counts = self._counts() if uneven else [call.count] * size
        self.x = self.arrays.of(self._inputs(counts))
        options = {"root": call.root}
        if self.comm.rank != call.root:
            self.wanted = None
        elif uneven:
            displs, self.wanted = self._spread(self.inputs, "")
            options |= {"counts": counts, "displs": displs}
        else:
            self.wanted, self.shape = np.concatenate(self.inputs), (size, call.count)
        return call.name, (self.x,), options | {"out": self._out()}

    def _gather_v(self):
        return self._gather(uneven=True)

    def _scatter(self, uneven=False):
        call, size, rank = self.call, self.comm.size, self.comm.rank
        counts = self._counts() if uneven else [call.count] * size
        whole = self._inputs([sum(counts)] * size)
        first = sum(counts[:rank])
        self.wanted = self.inputs[call.root][first : first + counts[rank]]
        options = {"root": call.root}
        if uneven and rank == call.root:
            parts = np.split(whole, np.cumsum(counts)[:-1])
            displs, self.inputs[rank] = self._spread(parts, "")
            options |= {"counts": counts, "displs": displs}
        self.x = self.arrays.of(self.inputs[rank]) if rank == call.root else None
        host = np.full(self.wanted.size * self.dtype.itemsize, 0xA5, np.uint8)
        options["out"] = self.arrays.of(host.view(self.dtype))
        return call.name, (self.x,), options

    def _scatter_v(self):
        return self._scatter(uneven=True)

    def _all_gather_v(self):
        counts = self._counts()
        self.x = self.arrays.of(self._inputs(counts))
        displs, self.wanted = self._spread(self.inputs, "")
        options = {"counts": counts, "displs": displs, "out": self._out()}
        return self.call.name, (self.x,), options

    def _reduce_scatter_v(self):
        counts, rank = self._counts(), self.comm.rank
        self.x = self.arrays.of(self._inputs([sum(counts)] * self.comm.size))
        first = sum(counts[:rank])
        inputs = dict(enumerate(self.inputs))
        total = over_islands(self.comm.islands, inputs, self.call.op)
        self.wanted = total[first : first + counts[rank]]
        options = {"counts": counts, "op": self.call.op, "out": self._out()}
        return self.call.name, (self.x,), options

    def _all_to_all_v(self):
        size, rank = self.comm.size, self.comm.rank
        draw = rng(*self.call.seed, "counts")
        counts = [
            [draw.randrange(self.call.count // size + 1) for _ in range(size)]
            for _ in range(size)
        ]
        self._inputs([sum(each) for each in counts])
        parts = [
            np.split(own, np.cumsum(each)[:-1])
            for own, each in zip(self.inputs, counts, strict=True)
        ]
        sent, self.inputs[rank] = self._spread(parts[rank], rank)
        self.x = self.arrays.of(self.inputs[rank])
        taken, self.wanted = self._spread([each[rank] for each in parts], "taken")
        options = {"send_counts": counts[rank], "send_displs": sent}
        options |= {"recv_counts": [each[rank] for each in counts]}
        return (
            self.call.name,
            (self.x,),
            options
            | {
                "recv_displs": taken,
                "out": self._out(),
            },
        )

    def check(self):
        """Compare the result, the input, and what is around both."""
        call = self.call
        if self.wanted is None:
            assert self.found is None, "an output"
        else:
            found = self.arrays.read(self.found, self.order)
            if call.operation and not call.operation.reduces:
                assert found.tobytes() == self.wanted.tobytes(), "other bytes"
            else:
                assert operators.same(found, self.wanted).all(), "wrong result"
            if call.place == "new" and self.shape is not None:
                assert self.found.shape == self.shape, "another shape"
        kept = call.place != "in place" and call.name != "broadcast"
        if self.x is not None and kept:
            own = self.inputs[self.comm.rank]
            assert self.arrays.read(self.x).tobytes() == own.tobytes(), "the input"


@contextmanager
def failing(call):
    """Name the call in a failure."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{call}: {error}") from error


def run(comm, calls, before=lambda step: None):
    """Make calls, some of them without a wait between them, and check them."""
    pool, made, calls = Pool(comm), [], [*calls]
    for step, call in enumerate(calls, 1):
        before(step)
        made.append(Made(comm, pool, call))
        if len(made) == Pool.TOGETHER or step == len(calls):
            comm.synchronize()
            for each in made:
                with failing(each.call):
                    each.check()
            made.clear()
            pool.reset()
