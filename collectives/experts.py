"""Mixtures of experts: their calls, checked sizes, and tokens as codes.

Mixtures of experts: send tokens to the ranks of their experts, and results back.

``expert_dispatch.py`` and ``expert_combine.py`` contain the kernels; for few tokens,
``mailed_dispatch.py`` and ``mailed_combine.py``. Received data has fixed addresses, and
all counts stay on the GPU. So no kernel waits for the host, and each replay of a graph
may have another routing.

Tokens that cross the links as codes of one byte: ``dispatch(wire=…)``.

The sender encodes its tokens as ``collectives/composed.py`` does, in groups of 128
elements. A dispatch sends these codes and scales instead of the tokens, in either form.
The receiver decodes them into the dtype of the tokens. The order of memory accesses:

1. The sender's first kernel stores codes in memory that only the sender uses.
2. The dispatch loads them, and stores them in the receivers' memory for results. No
   rank loads results there meanwhile: every earlier combine has ended on all ranks that
   load (``expert_combine.py``), or other ranks do not load its results.
3. The receiver's last kernel loads them, and stores tokens in its own memory. This
   kernel follows the dispatch on the rank's stream, so all codes have been stored.
"""

from typing import Any, NamedTuple

import numpy as np

from numba_symm import arguments, dtypes
from numba_symm.arguments import shown
from numba_symm.collectives import composed, kernel_set
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.enqueueing import PackedCall
from numba_symm.collectives.invocation import (
    UNKNOWN,
    are_apart,
    check_apart,
    check_order,
    check_writable,
)
from numba_symm.collectives.kernels import (
    coded_sum,
    expert_combine,
    expert_dispatch,
    mailed_combine,
    mailed_dispatch,
)
from numba_symm.collectives.protocols import few_tokens
from numba_symm.collectives.protocols.binding import Endpoint, Enqueue, Series
from numba_symm.collectives.protocols.tokens import (
    MOST_EXPERTS,
    MOST_TOKENS,
    NONE,
    Routing,
    Rows,
    TokenRoom,
    inverse_of,
)
from numba_symm.collectives.protocols.workspace import VECTOR, divide_up
from numba_symm.device.groups import GROUP
from numba_symm.dtypes import Element
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.gpu import arrays, loads
from numba_symm.gpu.arrays import ArrayView, Fields
from numba_symm.launch.devices import GPU

_WHOLE = coded_sum.IN_RECORD * GROUP


def vectors_of(hidden: int) -> int:
    """Return the vectors of a token's codes and scales; 0: it cannot have codes."""
    return 0 if hidden % _WHOLE else hidden // _WHOLE * coded_sum.RECORD // VECTOR


def check_token_codes(wire: Any, hidden: int, gpu: GPU, what: str) -> None:
    """Refuse codes that tokens of so many elements cannot have, or that have no name.

    Args:
        wire: the argument of that name, not None.
        hidden: the elements of a token.
        gpu: the rank's GPU.
        what: the call, for the error.
    """
    composed.check_name(wire, what)
    if not vectors_of(hidden):
        raise ArgumentError(
            f"{what}: expected tokens of a multiple of {_WHOLE} elements with "
            f"wire={shown(wire)}, got hidden {hidden}; dispatch without wire="
        )
    if not SIMULATED:
        composed.check_capability(wire, gpu, what)


def bind_encode(
    end: Endpoint, wire: str, kind: Element, x: int, codes: int, elements: int
) -> Enqueue:
    """Return the launch that encodes tokens.

    Args:
        end: this rank's end.
        wire: the name of the codes.
        kind: the type of the tokens.
        x: the address of the tokens.
        codes: where their codes are stored.
        elements: those of all tokens, at least one.
    """
    kernel = coded_sum.encode_kernel(end.size, composed.WIRES[wire], kind, False)
    number = elements // GROUP
    return coded_sum.bind(kernel, end, number, x, codes, elements, number)


def bind_decode(
    end: Endpoint,
    wire: str,
    kind: Element,
    codes: int,
    target: int,
    counts: int,
    capacity: int,
    hidden: int,
) -> Enqueue:
    """Return the launch that decodes what a rank has received.

    Args:
        end: this rank's end.
        wire: the name of the codes.
        kind: the type of the tokens.
        codes: the address of the codes, with room for ``capacity`` tokens of each rank.
        target: the same, of the tokens.
        counts: the address of how many tokens each rank has sent.
        capacity: for how many tokens of each rank there is room.
        hidden: the elements of a token.
    """
    kernel = coded_sum.decode_rows_kernel(end.size, composed.WIRES[wire], kind)
    width = hidden // GROUP
    arguments = codes, target, counts, capacity, width
    return coded_sum.bind(kernel, end, end.size * capacity * width, *arguments)


_MOST_CHOICES, _MOST_HIDDEN = 64, 1 << 20
_LINE = 128


class Mailed(NamedTuple):
    """The grid and the share of each kernel for few tokens (``few_tokens.py``)."""

    dispatch: tuple[int, few_tokens.Share]
    combine: tuple[int, few_tokens.Share]


class ExpertSizes(NamedTuple):
    """The checked sizes of an object, equal on all ranks.

    Attributes:
        experts: experts of all ranks together.
        top_k: experts of a token.
        tokens: the most tokens of a rank.
        capacity: the most tokens of a rank that are for another one.
        hidden: elements of a token.
        dtype: the type of tokens and results.
    """

    experts: int
    top_k: int
    tokens: int
    capacity: int
    hidden: int
    dtype: np.dtype[Any]

    @property
    def vectors(self) -> int:
        """Vectors of a token."""
        return self.hidden * self.dtype.itemsize // VECTOR

    @property
    def codes(self) -> int:
        """Vectors of a token as codes; 0: it cannot have codes."""
        return vectors_of(self.hidden)

    @property
    def row(self) -> tuple[int, int]:
        """The vectors of a token, and the shift by which threads share it."""
        return self.vectors, expert_dispatch.shift_of(self.vectors)

    def mailed(self, end: Endpoint, vectors: int) -> Mailed | None:
        """Return the grids and shares of calls of few tokens; None: there are many.

        Args:
            end: this rank's end.
            vectors: those of a token as it is sent.
        """
        sent = mailed_dispatch.vectors_of(self.top_k, vectors)
        there = few_tokens.share_of(end, self.tokens, sent)
        back = few_tokens.share_of(end, self.tokens, self.vectors)
        return Mailed(there, back) if there and back else None

    @property
    def words(self) -> str:
        """The sizes as errors show them."""
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())

    def places(self, size: int) -> tuple[dict[str, int], int]:
        """Return where each part of a rank's memory begins, and its bytes."""
        room = size * self.capacity
        parts = {
            "counts": 8 * size,
            "tokens": VECTOR * self.vectors * room,
            "ids": 4 * self.top_k * room,
            "weights": 4 * self.top_k * room,
            "sources": 4 * room,
            "results": VECTOR * self.vectors * room,
        }
        found, end = {}, 0
        for name, nbytes in parts.items():
            found[name] = end
            end += divide_up(nbytes, _LINE) * _LINE
        return found, end


def checked(
    experts: Any,
    top_k: Any,
    hidden: Any,
    tokens: Any,
    capacity: Any,
    dtype: Any,
    size: int,
) -> ExpertSizes:
    """Return the sizes, or refuse one."""
    what = "experts"

    def integer(value: Any, name: str, most: int, do: str) -> int:
        words = f"{name} to be an integer from 1 to {most}"
        return arguments.integer(value, what, words, least=1, most=most, do=do)

    kind = dtypes.checked(dtype, what)
    if kind.name not in expert_combine.DTYPES:
        known = ", ".join(expert_combine.DTYPES)
        raise ArgumentError(
            f"{what}: expected dtype {known}, got {kind.name}; convert the tokens"
        )
    found = integer(experts, "experts", MOST_EXPERTS, "pass those of all ranks")
    if found % size:
        raise ArgumentError(
            f"{what}: expected a multiple of the {size} ranks, got {found} experts; "
            "every rank has the same number"
        )
    most = integer(tokens, "tokens", MOST_TOKENS, "pass the most tokens of a rank")
    room = most
    if capacity is not None:
        do = "pass the most tokens of a rank for another one"
        room = integer(capacity, "capacity", most, do)
    choices = integer(top_k, "top_k", _MOST_CHOICES, "pass the experts of a token")
    length = integer(hidden, "hidden", _MOST_HIDDEN, "pass the elements of a token")
    if length * kind.itemsize % VECTOR:
        raise ArgumentError(
            f"{what}: expected tokens of a multiple of {VECTOR} bytes, got hidden "
            f"{length} of {kind.name}; pad the tokens"
        )
    vectors = size * room * length * kind.itemsize // VECTOR
    if vectors >= NONE:  # the combine numbers them in 32 bits
        raise ArgumentError(
            f"{what}: expected less than {VECTOR * NONE >> 30} GiB of results, got "
            f"{VECTOR * vectors >> 30}; pass a smaller capacity"
        )
    return ExpertSizes(found, choices, most, room, length, kind)


_INT32, _INT64, _FLOAT32 = map(np.dtype, (np.int32, np.int64, np.float32))


class Received(NamedTuple):
    """What a rank has received: arrays on its GPU, valid until its next dispatch.

    The tokens from rank ``r`` are at ``[r, :counts[r]]``, in the order of that rank.
    The contents after them are undefined.

    Attributes:
        tokens: the tokens, of shape (ranks, capacity, hidden).
        expert_ids: for each choice of a token, the number of the expert among those of
            this rank; -1: the expert is on another rank, or the choice is none. Of
            int32 and shape (ranks, capacity, top_k).
        weights: for each choice, its weight: of float32 and the same shape.
        sources: the row of each token in its rank's ``x``: of int32 and shape (ranks,
            capacity).
        counts: how many tokens each rank has sent to this one: int64.
    """

    tokens: Any
    expert_ids: Any
    weights: Any
    sources: Any
    counts: Any


class Experts:
    """Exchanges the tokens and results of a mixture of experts between ranks.

    :meth:`Communicator.experts` returns it.

    Attributes:
        received: the arrays that each dispatch stores and returns.
        results: an array of the shape and type of the received tokens. :meth:`combine`
            need not copy results that kernels have stored here.
    """

    received: Received
    results: Any

    def __init__(self, calls: Calls, sizes: ExpertSizes, like: Any, array: Any):
        what = "experts"
        self._calls, self._sizes, self._array = calls, sizes, array
        library = arrays.named(like, what)
        size, end = calls.size, calls.end
        address = arrays.view(array, what).address
        offsets, _ = sizes.places(size)

        def over(shape: tuple[int, ...], name: str, dtype: Any) -> Any:
            dtype = np.dtype(dtype)
            nbytes = int(np.prod(shape)) * dtype.itemsize
            there = arrays.Memory(address + offsets[name], nbytes, array)
            if library is None:
                return there.array(shape, dtype)
            return library.over(there, shape, dtype)

        place = size, sizes.capacity
        self.received = Received(
            over((*place, sizes.hidden), "tokens", sizes.dtype),
            over((*place, sizes.top_k), "ids", _INT32),
            over((*place, sizes.top_k), "weights", _FLOAT32),
            over(place, "sources", _INT32),
            over((size,), "counts", _INT64),
        )
        self.results = over((*place, sizes.hidden), "results", sizes.dtype)
        # What other ranks load in a combine, and what they store in a dispatch.
        self._loaded = arrays.view(self.results, what)
        within = (offsets["results"],)
        self._stored = ArrayView(address, within, np.dtype(np.uint8), "C", False)
        self._room = TokenRoom(
            tokens=offsets["tokens"],
            ids=offsets["ids"],
            weights=offsets["weights"],
            sources=offsets["sources"],
            capacity=sizes.capacity,
        )
        self._offsets = offsets
        self._grid = expert_dispatch.grid_of(end, sizes.tokens, sizes.vectors)
        # For the tokens, and for their codes: both have one form, as combine has.
        there = sizes.mailed(end, sizes.vectors)
        coded = sizes.mailed(end, sizes.codes or 1)
        self._mailed = there if coded else None
        self._mailed_codes = coded if there else None
        nbytes = expert_dispatch.scratch_nbytes(size, self._grid)
        nbytes, no_place = nbytes + 4 * sizes.tokens * size, 0xFF
        if self._mailed and self._mailed_codes:
            nbytes, no_place = 4 * few_tokens.table_words(size), 0
        nbytes = divide_up(nbytes, VECTOR) * VECTOR
        of_codes = VECTOR * sizes.codes * sizes.tokens
        self._kept = kept = arrays.empty((nbytes + of_codes,), np.dtype("u1"), what)
        self._scratch = arrays.view(kept, what).address
        # A combine may precede its dispatch, if that one was captured in a graph.
        calls.members.backend.fill(self._scratch, nbytes, no_place)
        self._codes = self._scratch + nbytes
        self._tokens: int | None = None  # of the last dispatch
        # Ranks that call different objects would store in different memory.
        self._words = words = f"object {calls.experts_made}, {sizes.words}"
        self._about = {
            name: calls.descriptions.of(name, words, words)
            for name in ("dispatch", "combine")
        }

    def __repr__(self) -> str:
        return f"<Experts: {self._words}>"

    def dispatch(
        self,
        x: Any,
        expert_ids: Any,
        weights: Any = None,
        *,
        wire: str | None = None,
        stream: Any = None,
    ) -> Received:
        """Send each token once to each rank that has one of its experts.

        Collective: every rank calls it, each with its own number of tokens. The GPU
        never waits for the host. In a captured graph, ``expert_ids`` and ``weights``
        may have other contents in each replay.

        The received tokens replace those of the previous dispatch. No rank stores them
        before the earlier work of the receiver's stream has ended.

        Args:
            x: the tokens: a device array in C order of shape (tokens, hidden), of the
                object's dtype.
            expert_ids: the experts of each token: a device array in C order of int32,
                of shape (tokens, top_k). With *e* experts on each rank, rank ``r`` has
                the experts from ``r`` * *e* on. -1: none.
            weights: the experts' weights, of the same shape, of float32. None: each is
                1.
            wire: ``"fp8"`` or ``"int8"``: send the tokens as codes of one byte, with a
                scale for each 128 elements; equal on all ranks. The received tokens are
                the codes' values, rounded to the object's dtype. Such a call overwrites
                :attr:`results`, and ``hidden`` must be a multiple of 512. None: send
                the tokens themselves.
            stream: the stream. None: that of ``x``.

        Returns:
            The arrays :attr:`received`.

        Raises:
            ArgumentError: an array has another shape, dtype or order, or overlaps
                :attr:`received`, or :attr:`results` with ``wire``; or tokens of this
                size or dtype cannot be encoded.
            CollectiveError: here or in a later call: a rank failed, or more tokens were
                for a rank than ``capacity``, or an expert's number was wrong.
        """
        calls, what = self._calls, "dispatch"
        with calls.thread.alone(what):
            (call, tokens), chosen = calls.agreement.checked(
                what,
                lambda *_: f"{self._words}, wire {shown(wire)}",
                self._dispatched,
                (x, expert_ids, weights, wire, stream),
            )
            calls.enqueuer.run(call, chosen, self, x, expert_ids, weights)
            self._tokens = tokens
        return self.received

    def combine(
        self, results: Any = None, *, out: Any = None, stream: Any = None
    ) -> Any:
        """Return, for each token of the last dispatch, the sum of its experts' results.

        Collective. Each rank adds the results from all ranks by their tree, in float32,
        so the bits are the same in every run. For a token without experts, the sum is
        zero.

        Args:
            results: this rank's results, in the places of their tokens: a device array
                in C order of the object's dtype. Its shape is that of the received
                tokens, with the weighted sum of the results of this rank's experts for
                each token. Or its shape is (ranks, capacity, top_k, hidden), with the
                result of the expert for each choice. Then this call multiplies the
                results by the received weights, and adds the products in the order of
                the choices, in float32. None: :attr:`results`.
            out: the sums, of the shape and dtype of ``x``. None: a new array.
            stream: the stream. None: that of ``results``.

        Returns:
            ``out``.

        Raises:
            ArgumentError: an array has another shape, dtype or order, or overlaps
                :attr:`results`; or this rank has not called :meth:`dispatch`.
            CollectiveError: here or in a later call: a rank failed.
        """
        calls, what = self._calls, "combine"
        results = self.results if results is None else results
        with calls.thread.alone(what):
            call, out, chosen = calls.agreement.checked(
                what, lambda *_: self._words, self._combined, (results, out, stream)
            )
            calls.enqueuer.run(call, chosen, self, results, out)
        return out

    def _checked(
        self, read: Fields, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> ArrayView:
        """Return an array in C order of that shape and dtype, or refuse it."""
        view = self._calls.usable(ArrayView(*read), what)
        if view.shape != shape or view.dtype != dtype:
            raise ArgumentError(
                f"{what}: expected shape {shape} of {dtype.name}, got {view.shape} of "
                f"{view.dtype.name}; see Communicator.experts for the sizes"
            )
        check_order(view, what)
        arrays.check_aligned(view, what)
        return view

    def _rows(self, read: Fields, what: str, shape: tuple[int, ...]) -> ArrayView:
        view = self._checked(read, what, shape, self._sizes.dtype)
        if view.size and view.address % VECTOR:
            raise ArgumentError(
                f"{what}: expected an array that begins on a 16-byte boundary, got "
                f"address {view.address:#x}; pass a copy"
            )
        return view

    def _dispatched(self, given: Any) -> tuple[tuple[PackedCall, int], int]:
        """Return a dispatch, remembered or new, its tokens and its stream."""
        (x, expert_ids, weights, wire, stream), what = given, "dispatch"
        calls, factors = self._calls, None
        calls.enqueuer.refuse_in_group(what)
        if wire is not None:
            composed.check_name(wire, what)
        rows = arrays.fields(x, "dispatch: x")
        ids = arrays.fields(expert_ids, "dispatch: expert_ids")
        if weights is not None:
            factors = arrays.fields(weights, "dispatch: weights")
        key = what, self._words, rows, ids, factors, wire  # all that is checked below
        known: tuple[PackedCall, int] = calls.memory.get(key)
        if known is UNKNOWN:
            launch, tokens = self._new_dispatch(rows, ids, factors, wire)
            known = calls.enqueuer.pack(self._about[what], launch), tokens
            calls.memory.put(key, known)
        return known, calls.streams.of(stream, x)

    def _new_dispatch(
        self, x: Fields, expert_ids: Fields, weights: Fields | None, wire: str | None
    ) -> tuple[Enqueue, int]:
        """Check the arguments of a dispatch, and bind it."""
        what, sizes = "dispatch", self._sizes
        if wire is not None:
            check_token_codes(wire, sizes.hidden, self._calls.gpu, what)
        shape = x[1]
        tokens = shape[0] if shape else 0
        if len(shape) != 2 or tokens > sizes.tokens:
            raise ArgumentError(
                f"{what}: expected x of shape (tokens, {sizes.hidden}) with at most "
                f"{sizes.tokens} tokens, got {shape}; make the object for more tokens"
            )
        rows = self._rows(x, f"{what}: x", (tokens, sizes.hidden))
        choices = tokens, sizes.top_k
        ids = self._checked(expert_ids, f"{what}: expert_ids", choices, _INT32)
        factors, read = 0, [rows, ids]
        if weights is not None:
            view = self._checked(weights, f"{what}: weights", choices, _FLOAT32)
            factors = view.address
            read.append(view)
        stored = {"received": self._stored}
        if wire is not None:
            stored["results"] = self._loaded
        for name, there in stored.items():
            if not all(are_apart(each, there) for each in read):
                raise ArgumentError(
                    f"{what}: expected arrays apart from Experts.{name}, got one that "
                    "overlaps it, where other ranks store tokens meanwhile; pass a copy"
                )
        with loads.of(what):
            launch = self._bound(tokens, rows.address, ids.address, factors, wire)
        return launch, tokens

    def _bound(
        self, tokens: int, x: int, ids: int, weights: int, wire: str | None
    ) -> Enqueue:
        """Return what enqueues a dispatch."""
        sizes, calls, room = self._sizes, self._calls, self._room
        each = sizes.experts // calls.size
        experts = sizes.top_k, sizes.experts, each, inverse_of(each)
        routing = Routing(ids, weights, tokens, *experts)
        if wire is None:
            rows = Rows(x, *sizes.row)
            return self._sending(routing, rows, room, self._mailed)
        shift = expert_dispatch.shift_of(sizes.codes)
        rows = Rows(self._codes, sizes.codes, shift)
        there = room._replace(tokens=self._offsets["results"])
        send = self._sending(routing, rows, there, self._mailed_codes)
        here = self._everywhere("counts")[calls.rank]
        given = calls.end, wire, dtypes.element(sizes.dtype, "dispatch")
        places = here + there.tokens, here + room.tokens, here
        decode = bind_decode(*given, *places, sizes.capacity, sizes.hidden)
        if tokens == 0:
            return Series(send, decode)
        elements = tokens * sizes.hidden
        encode = bind_encode(*given, x, self._codes, elements)
        return Series(encode, send, decode)

    def _sending(
        self, routing: Routing, rows: Rows, room: TokenRoom, mailed: Mailed | None
    ) -> Enqueue:
        """Return the launch that sends tokens as they are."""
        calls, targets = self._calls, self._everywhere("counts")
        if mailed:
            here = targets[calls.rank], self._scratch
            given = *mailed.dispatch, routing, rows, room, *here
            return mailed_dispatch.bind(calls.end, *given)
        scratch = expert_dispatch.scratch_nbytes(calls.size, self._grid)
        counting = expert_dispatch.Counting(
            self._scratch + scratch,
            self._scratch,
            divide_up(routing.tokens, self._grid),
        )
        arguments = routing, counting, rows, room, targets
        return expert_dispatch.bind(calls.end, self._grid, *arguments)

    def _everywhere(self, name: str) -> tuple[int, ...]:
        """Return, by rank, the address here of a part of that rank's memory."""
        view = arrays.view(self._array, "experts")
        place = self._calls.end.place(view.address, view.nbytes)
        if place is None:
            raise ArgumentError(
                "experts: expected the memory of an open communicator, got memory that "
                "is not mapped any more; make another object"
            )
        return tuple(each + self._offsets[name] for each in place.addresses)

    def _combined(self, given: Any) -> tuple[PackedCall, Any, int]:
        """Return a combine, remembered or new, its output and its stream."""
        (results, out, stream), what, sizes = given, "combine", self._sizes
        calls, tokens = self._calls, self._tokens
        calls.enqueuer.refuse_in_group(what)
        if tokens is None:
            raise ArgumentError(
                f"{what}: expected a dispatch before, got none; call dispatch first"
            )
        source = arrays.fields(results, "combine: results")
        chosen = calls.streams.of(stream, results)
        if out is None:
            like = self._results(source)
            out = calls.new(results, like, (tokens, sizes.hidden), chosen, what)
        target = arrays.fields(out, "combine: out")
        key = what, self._words, source, target, tokens  # all that is checked below
        call: PackedCall = calls.memory.get(key)
        if call is UNKNOWN:
            launch = self._new_sum(source, target, tokens)
            call = calls.enqueuer.pack(self._about[what], launch)
            calls.memory.put(key, call)
        return call, out, chosen

    def _results(self, results: Fields) -> ArrayView:
        """Return the results of a combine, or refuse them."""
        sizes = self._sizes
        shape: tuple[int, ...] = self._calls.size, sizes.capacity, sizes.hidden
        if len(results[1]) == 4:
            shape = (*shape[:2], sizes.top_k, sizes.hidden)
        return self._rows(results, "combine: results", shape)

    def _new_sum(self, results: Fields, out: Fields, tokens: int) -> Enqueue:
        """Check the arguments of a combine, and bind it."""
        what, source = "combine", self._results(results)
        target = self._rows(out, f"{what}: out", (tokens, self._sizes.hidden))
        check_writable(target, f"{what}: out")
        check_apart(source, target, what)
        weighted = len(source.shape) == 4
        self._check_results(source, target, weighted)
        with loads.of(what):
            return self._bound_sum(source, target.address, tokens, weighted)

    def _check_results(
        self, source: ArrayView, target: ArrayView, weighted: bool
    ) -> None:
        """Refuse arrays that overlap what other ranks load, or are stored there."""
        where = "Experts.results, got arrays that overlap"
        if not are_apart(target, self._loaded):
            raise ArgumentError(f"combine: expected out apart from {where}")
        there = source.address == self._loaded.address and not weighted
        if not there and not are_apart(source, self._loaded):
            raise ArgumentError(
                f"combine: expected results of each choice apart from {where}; pass a "
                "copy, or the sums of each token's results"
            )

    def _bound_sum(
        self, source: ArrayView, target: int, tokens: int, weighted: bool
    ) -> Enqueue:
        sizes, calls, what = self._sizes, self._calls, "combine"
        element = dtypes.element(sizes.dtype, what)
        counts = self._everywhere("counts")[calls.rank]
        numbers = counts + self._room.ids, counts + self._room.weights
        if self._mailed:
            made = source.address, *numbers, sizes.top_k, sizes.capacity
            place = self._scratch, (target, tokens)
            of_calls = *self._mailed.combine, element, made, weighted, *place
            return mailed_combine.bind(calls.end, *of_calls)
        rooms = self._everywhere("results")
        places = self._scratch + expert_dispatch.scratch_nbytes(calls.size, self._grid)
        given = calls.end, self._grid, element
        add = expert_combine.bind(
            *given, rooms, places, tokens, sizes.capacity, sizes.row, target
        )
        if source.address == rooms[calls.rank]:
            return add
        stage = expert_combine.bind_stage(
            *given,
            source.address,
            rooms[calls.rank],
            (counts, *numbers),
            sizes.top_k if weighted else 0,
            sizes.capacity,
            sizes.row,
        )
        return Series(stage, add)


def new(
    calls: Calls,
    experts: Any,
    top_k: Any,
    hidden: Any,
    tokens: Any,
    capacity: Any,
    dtype: Any,
    like: Any,
) -> Experts:
    """Return a new object; see ``Communicator.experts``. Collective."""
    what, members = "experts", calls.members
    with members.set_up(what):
        with members.exchange.agreed(what):
            if len(members.parts) > 1:
                raise ArgumentError(
                    f"{what}: expected ranks of one island, got {len(members.parts)} "
                    "islands, between which the host needs the sizes; use "
                    "all_to_all_v with counts of the host"
                )
            sizes = checked(experts, top_k, hidden, tokens, capacity, dtype, calls.size)
            arrays.check_type(arrays.named(like, what), sizes.dtype, what)
        members.exchange.agree_equal(sizes.words, what)
        calls.experts_made += 1  # on all ranks, whatever fails from here on
        array = calls.heap.array(sizes.places(calls.size)[1], np.uint8, what)
        with members.exchange.agreed(what):
            if not SIMULATED:
                names, kinds = [kernel_set.EXPERTS], [sizes.dtype]
                found = kernel_set.kernels(names, kinds, ["sum"], calls.end, what)
                kernel_set.load(found, calls.rank, calls.size, what)
            return Experts(calls, sizes, like, array)
