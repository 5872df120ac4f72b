"""``numba-symm tune`` between islands: what the starts of exchanges and messages take.

Every rank sends along its rail, to the next islands, and receives from those before.
"""

import time
from collections.abc import Callable
from typing import Any

import numba_symm as ns
from numba_symm import streams
from numba_symm.bench.report import written
from numba_symm.collectives.communicator import inside
from numba_symm.collectives.islands import measured
from numba_symm.collectives.islands.measured import Starts
from numba_symm.collectives.islands.sizes import DEFAULT
from numba_symm.engines.protocol import Parcel
from numba_symm.islands import Islands

_MESSAGES = 9  # of an exchange of several
_SMALL = 8  # bytes
_REPEATS = 20
_ROUNDS = 5


def measure(comm: ns.Communicator, ranks: Any) -> tuple[Starts, float]:
    """Return what starts cost, and the bytes a microsecond of a link. Collective.

    Args:
        comm: the communicator, of several islands.
        ranks: the mpi4py communicator.
    """
    islands = inside(comm).ranks
    assert isinstance(islands, Islands)
    parts, index, local = islands.parts, islands.index, islands.local
    m, half = len(parts), DEFAULT.half
    symm = comm.rendezvous(comm.empty(2 * half, "uint8"))
    memory = symm.buffer_ptrs[symm.rank]
    in_all = local < islands.places.smallest  # otherwise it only waits

    def exchange(messages: int, nbytes: int) -> Callable[[], None]:
        sends, receives = list[Parcel](), list[Parcel]()
        for number in range(messages):
            distance, at = 1 + number % (m - 1), memory + number * nbytes
            if in_all:
                after = parts[(index + distance) % m][local]
                before = parts[(index - distance) % m][local]
                sends.append(Parcel(after, at, nbytes))
                receives.append(Parcel(before, at + half, nbytes))
        return lambda: islands.engine.exchange(sends, receives, streams.LEGACY_DEFAULT)

    def timed(messages: int, nbytes: int, repeats: int) -> float:
        """Return microseconds: of the best round, those of the slowest rank."""
        call, rounds = exchange(messages, nbytes), []
        for _ in range(_ROUNDS):
            call()
            comm.synchronize()
            ranks.Barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            comm.synchronize()
            rounds.append((time.perf_counter() - began) / repeats * 1e6)
        return float(min(map(max, zip(*ranks.allgather(rounds), strict=True))))

    one = timed(1, _SMALL, _REPEATS)
    many = timed(_MESSAGES, _SMALL, _REPEATS)
    large = timed(1, half, 2)
    rate = half / max(large - one, large / 100)
    each = max(0.0, many - one) / (_MESSAGES - 1)
    return Starts(max(1, round(one * rate)), max(1, round(each * rate))), rate


def tune(comm: ns.Communicator, ranks: Any) -> None:
    """Measure, and write what communicators of several islands use. Collective."""
    islands = inside(comm).ranks
    assert isinstance(islands, Islands)
    engine = islands.engine.name
    starts, rate = measure(comm, ranks)
    parts = islands.parts
    if comm.rank == 0:
        measured.write(comm.device.name, engine, starts)
        print(
            f"between {len(parts)} islands by {engine}: {rate:,.0f} bytes/µs; an "
            f"exchange starts in {starts.start / rate:.1f} µs, and each further "
            f"message in {starts.message / rate:.1f} µs",
            written(measured.file()),
            sep="\n",
        )
    ranks.Barrier()  # until then, another communicator would read the old limits
