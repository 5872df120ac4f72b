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
        """Prepare an all-reduce to be called many times, as a persistent call of MPI.

        The arguments and errors are those of :meth:`all_reduce`. Calling the plan,
        ``plan()`` or ``plan(stream=…)``, is collective. Making it is collective only in
        debug mode.
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
        """Prepare an :meth:`all_gather`, as ``all_reduce_init`` does."""
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
        """Prepare an :meth:`all_to_all`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`reduce_scatter`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`scan`, as ``all_reduce_init`` does."""
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
        """Prepare an :meth:`exscan`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`reverse_scan`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`reduce`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`broadcast`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`reduce_scatter_v`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`gather`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`gather_v`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`scatter`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`scatter_v`, as ``all_reduce_init`` does."""
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
        """Prepare an :meth:`all_gather_v`, as ``all_reduce_init`` does."""
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
        """Prepare an :meth:`all_to_all_v`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`neighbor_all_gather`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`neighbor_all_to_all`, as ``all_reduce_init`` does."""
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
        """Prepare a :meth:`send`. Neither it nor calling the plan is collective."""
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
        """Prepare a :meth:`recv`. Neither it nor calling the plan is collective."""
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
        """Prepare a :meth:`sendrecv`. Neither it nor calling the plan is collective."""
        given = invocation(SENDRECV, x, out, stream, peers=(dst, src), count=count)
        return plans.of_messages(self._calls, given)

    def group_init(self) -> AbstractContextManager[Plan]:
        """Prepare the calls within a ``with`` block to be started together many times.

        No call is started, neither in the block nor at its end. The plan is ``plan`` in
        ``with comm.group_init() as plan:``, and may be called after the block. Its
        messages are one launch. Calling it returns None. In debug mode, its calls are
        compared when the plan is made, not when it is called.

        A plan that is called within the block is one of its calls. Otherwise, calls
        and ranks are as for :meth:`group`.

        Raises:
            As :meth:`group`.
        """
        return plans.of_group(self._calls)
