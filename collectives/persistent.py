"""The methods that prepare calls to be made many times: all ``…_init`` methods."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from numba_symm.collectives import plans
from numba_symm.collectives.calls import Calls
from numba_symm.collectives.invocation import NONE, invocation
from numba_symm.collectives.messages import RECV, SEND, SENDRECV
from numba_symm.collectives.neighbors import (
    NEIGHBOR_ALL_GATHER,
    NEIGHBOR_ALL_TO_ALL,
)
from numba_symm.collectives.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXSCAN,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SHARD,
    REVERSE_SCAN,
    SCAN,
)
from numba_symm.collectives.plans import Plan
from numba_symm.collectives.spelling import spelled
from numba_symm.collectives.vector_forms import (
    GATHER,
    GATHER_V,
    SCATTER,
    SCATTER_V,
)


@spelled
class Persistent:
    """The ``_init`` forms of a communicator's calls."""

    _calls: Calls

    def all_reduce_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
        wire: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = NONE,
        row_sum: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`all_reduce`. MPI calls plans persistent operations.

        The arguments and errors are those of :meth:`all_reduce`. To call the plan, with
        ``plan()`` or ``plan(stream=…)``, is collective. To make it is collective only
        in debug mode.
        """
        given = invocation(
            *(ALL_REDUCE, x, out, stream),
            op=op,
            algorithm=algorithm,
            wire=wire,
            epilogue=epilogue,
            args=args,
            row_sum=row_sum,
        )
        return plans.plan(self._calls, given)

    def all_gather_init(
        self,
        x: Any,
        *,
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = NONE,
        row_sum: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`all_gather`; see :meth:`all_reduce_init`."""
        given = invocation(
            *(ALL_GATHER, x, out, stream),
            algorithm=algorithm,
            epilogue=epilogue,
            args=args,
            row_sum=row_sum,
        )
        return plans.plan(self._calls, given)

    def all_to_all_init(
        self,
        x: Any,
        *,
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Return a plan of :meth:`all_to_all`; see :meth:`all_reduce_init`."""
        given = invocation(ALL_TO_ALL, x, out, stream, algorithm=algorithm)
        return plans.plan(self._calls, given)

    def reduce_scatter_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
        epilogue: Any = None,
        args: Sequence[Any] = NONE,
        row_sum: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`reduce_scatter`; see :meth:`all_reduce_init`."""
        given = invocation(
            *(REDUCE_SCATTER, x, out, stream),
            op=op,
            algorithm=algorithm,
            epilogue=epilogue,
            args=args,
            row_sum=row_sum,
        )
        return plans.plan(self._calls, given)

    def scan_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Return a plan of :meth:`scan`; see :meth:`all_reduce_init`."""
        given = invocation(SCAN, x, out, stream, op=op, algorithm=algorithm)
        return plans.plan(self._calls, given)

    def exscan_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Return a plan of :meth:`exscan`; see :meth:`all_reduce_init`."""
        given = invocation(EXSCAN, x, out, stream, op=op, algorithm=algorithm)
        return plans.plan(self._calls, given)

    def reverse_scan_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Return a plan of :meth:`reverse_scan`; see :meth:`all_reduce_init`."""
        given = invocation(REVERSE_SCAN, x, out, stream, op=op, algorithm=algorithm)
        return plans.plan(self._calls, given)

    def reduce_init(
        self,
        x: Any,
        *,
        op: Any = "sum",
        root: int = 0,
        out: Any = None,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Return a plan of :meth:`reduce`; see :meth:`all_reduce_init`."""
        given = invocation(
            REDUCE, x, out, stream, op=op, algorithm=algorithm, root=root
        )
        return plans.plan(self._calls, given)

    def broadcast_init(
        self,
        x: Any,
        *,
        root: int = 0,
        stream: Any = None,
        algorithm: str | None = None,
    ) -> Plan:
        """Return a plan of :meth:`broadcast`; see :meth:`all_reduce_init`."""
        given = invocation(BROADCAST, x, x, stream, algorithm=algorithm, root=root)
        return plans.plan(self._calls, given)

    def reduce_scatter_v_init(
        self,
        x: Any,
        *,
        counts: Sequence[int],
        op: Any = "sum",
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`reduce_scatter_v`; see :meth:`all_reduce_init`."""
        tables = ((counts, None),)
        given = invocation(REDUCE_SHARD, x, out, stream, op=op, tables=tables)
        return plans.of_shards(self._calls, given)

    def gather_init(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`gather`; see :meth:`all_reduce_init`."""
        given = invocation(GATHER, x, out, stream, root=root)
        return plans.of_collective(self._calls, given)

    def gather_v_init(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`gather_v`; see :meth:`all_reduce_init`."""
        given = invocation(
            GATHER_V, x, out, stream, root=root, tables=((counts, displs),)
        )
        return plans.of_collective(self._calls, given)

    def scatter_init(
        self,
        x: Any = None,
        *,
        root: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`scatter`; see :meth:`all_reduce_init`."""
        given = invocation(SCATTER, x, out, stream, root=root)
        return plans.of_collective(self._calls, given)

    def scatter_v_init(
        self,
        x: Any = None,
        *,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`scatter_v`; see :meth:`all_reduce_init`."""
        given = invocation(
            SCATTER_V, x, out, stream, root=root, tables=((counts, displs),)
        )
        return plans.of_collective(self._calls, given)

    def all_gather_v_init(
        self,
        x: Any,
        *,
        counts: Sequence[int] | Any,
        displs: Sequence[int] | None = None,
        capacity: int | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`all_gather_v`; see :meth:`all_reduce_init`."""
        from numba_symm.collectives import counted_forms

        given = counted_forms.gathering(x, counts, displs, capacity, out, stream)
        return plans.of_collective(self._calls, given)

    def all_to_all_v_init(
        self,
        x: Any,
        *,
        send_counts: Sequence[int] | Any,
        recv_counts: Sequence[int] | Any,
        send_displs: Sequence[int] | Any = None,
        recv_displs: Sequence[int] | None = None,
        capacity: int | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`all_to_all_v`; see :meth:`all_reduce_init`."""
        tables = (send_counts, send_displs), (recv_counts, recv_displs)
        from numba_symm.collectives import counted_forms

        given = counted_forms.exchanging(x, *tables, capacity, out, stream)
        return plans.of_collective(self._calls, given)

    def neighbor_all_gather_init(
        self,
        x: Any,
        *,
        sources: Sequence[int | None],
        destinations: Sequence[int | None] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`neighbor_all_gather`; see :meth:`all_reduce_init`."""
        given = invocation(
            NEIGHBOR_ALL_GATHER, x, out, stream, peers=(destinations, sources)
        )
        return plans.of_collective(self._calls, given)

    def neighbor_all_to_all_init(
        self,
        x: Any,
        *,
        sources: Sequence[int | None],
        destinations: Sequence[int | None] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`neighbor_all_to_all`; see :meth:`all_reduce_init`."""
        given = invocation(
            NEIGHBOR_ALL_TO_ALL, x, out, stream, peers=(destinations, sources)
        )
        return plans.of_collective(self._calls, given)

    def send_init(
        self,
        x: Any,
        *,
        dst: int | None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`send`. Making and calling the plan are local."""
        given = invocation(SEND, x, stream=stream, peers=(dst, None))
        return plans.of_messages(self._calls, given)

    def recv_init(
        self,
        out: Any,
        *,
        src: int | None,
        count: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`recv`. Making and calling the plan are local."""
        given = invocation(RECV, None, out, stream, peers=(None, src), count=count)
        return plans.of_messages(self._calls, given)

    def sendrecv_init(
        self,
        x: Any,
        *,
        dst: int | None,
        out: Any,
        src: int | None,
        count: Any = None,
        stream: Any = None,
    ) -> Plan:
        """Return a plan of :meth:`sendrecv`. Making and calling the plan are local."""
        given = invocation(SENDRECV, x, out, stream, peers=(dst, src), count=count)
        return plans.of_messages(self._calls, given)

    def group_init(self) -> AbstractContextManager[Plan]:
        """Return a plan of the calls within a ``with`` block, which start together.

        No call starts, neither in the block nor at its end. The plan is ``plan`` in
        ``with comm.group_init() as plan:``, and may be called after the block, which
        returns None. All its messages are one launch. In debug mode, the ranks compare
        the calls when the plan is made, not when it is called.

        If another plan is called within the block, that call is one of the block's
        calls. The rules for calls and ranks are those of :meth:`group`.

        Raises:
            As :meth:`group`.
        """
        return plans.of_group(self._calls)
