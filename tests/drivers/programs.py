"""Programs of mpi4py that are drawn, and run by both libraries.

    numba-symm run -n 3 --simulate tests/drivers/programs.py 500
    numba-symm run -n 3 --simulate tests/drivers/programs.py 1 --first 4711
    numba-symm run -n 2 --simulate tests/drivers/programs.py 99 --limit 3000 --of mess

runs as many programs, from the first seed on, and prints those that differ. Programs
become longer with their seeds, so the first one that fails is short. Set PYTHONPATH to
the folder above tests/.
"""

import argparse
import contextlib
import faulthandler
import os
import sys
import time
import traceback

from mpi4py import MPI as plain

from numba_symm import mpi
from tests.drivers.collectives import Collectives
from tests.drivers.messages import Messages
from tests.drivers.sides import Side, difference, rng
from tests.drivers.windows import Windows

PHASES = (Messages, Messages, Collectives, Windows)


class Programs:
    """The communicators of both libraries, which run many programs.

    Args:
        world: mpi4py's communicator of the ranks.
    """

    def __init__(self, world, phases=PHASES):
        self.world, self._phases = world.Dup(), phases
        self._of_mpi = [self.world, self.world.Split(0, -self.world.rank)]
        self._of_mpi.append(self.world.Dup())
        self._of_device = [mpi.Comm(each, timeout=60) for each in self._of_mpi]
        plain.Attach_buffer(bytearray(8 << 20))

    def run(self, seed):
        """Run a program. Returns how the runs differ on some ranks, as text, or None.

        Collective.
        """
        draw = rng(seed)
        chosen = [draw.choice(self._phases) for _ in range(1 + min(seed, 40) // 10)]
        first = Side(mpi, self._of_device)
        self._run(first, seed, chosen)
        second = Side(plain, self._of_mpi, first)
        self._run(second, seed, chosen, first)
        text = difference(first, second)
        found = self.world.allgather(text and "\n".join([text, *first.errors]))
        each = [f"rank {rank}: {said}" for rank, said in enumerate(found) if said]
        return "\n".join([f"program {seed}", *each]) if each else None

    def _run(self, side, seed, phases, first=None):
        for number, phase in enumerate(phases):
            try:
                phase(side, (seed, number)).run()
            except Exception:  # the other ranks may wait for this one for ever
                kind = "numba_symm" if side.on_device else "mpi4py"
                print(f"program {seed}, phase {number}, by {kind}", *side.errors)
                print(first and difference(first, side))
                traceback.print_exc()
                sys.stdout.flush()
                self.world.Abort(1)
            self.world.Barrier()

    def close(self):
        """Free the communicators. Collective."""
        for each in self._of_device:
            each.Free()
        plain.Detach_buffer()
        for each in reversed(self._of_mpi):
            each.Free()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", help="bytes that are sent ahead")
    parser.add_argument("--of", default="", help="messages, collectives or windows")
    parser.add_argument("--patience", type=float, default=60, help="s per program")
    asked = parser.parse_args()
    if asked.limit:
        os.environ["NUMBA_SYMM_MESSAGE_LIMIT"] = asked.limit
    phases = [each for each in PHASES if asked.of in each.__module__]
    begin, bad = time.monotonic(), 0
    programs = Programs(plain.COMM_WORLD, phases)
    with contextlib.closing(programs):
        for seed in range(asked.first, asked.first + asked.programs):
            faulthandler.dump_traceback_later(asked.patience, exit=True)
            if programs.world.rank == 0:
                print("program", seed, end="\r", flush=True)
            found = programs.run(seed)
            if found and programs.world.rank == 0:
                print(found, flush=True)
            bad += found is not None
    faulthandler.cancel_dump_traceback_later()
    if plain.COMM_WORLD.rank == 0:
        took = time.monotonic() - begin
        print(f"{asked.programs} programs, {bad} differ, {took:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
