"""One rank of a test job, started by test_mpirun.py under mpirun.

    python tests/rank.py FOLDER SECONDS [pytest arguments]

All that the rank prints goes to FOLDER/<rank>.txt, its exit code to
FOLDER/<rank>.code, the names of the kernels and algorithms that its tests bind to
FOLDER/<rank>.bound. Where every thread is after SECONDS is printed too, unless they are
0: a rank that lives as long hangs. SIGABRT prints it, too.
"""

import faulthandler
import os
import sys
from pathlib import Path


class Immediate:
    """Prints a failure when it happens, because its rank may end before the summary."""

    @staticmethod
    def pytest_runtest_logreport(report):
        if report.failed:
            print(f"\n{report.longreprtext}\n")

    pytest_collectreport = pytest_runtest_logreport


class Bound:
    """Notes the names of the kernels that tests bind, and of the algorithms."""

    def __init__(self):
        self.names = set()

    def pytest_collection_finish(self):
        from numba_symm.collectives.operations import Operation
        from numba_symm.gpu.kernels import Kernel
        from tests.kernels import named, named_call

        bind, bind_call = Kernel.bind, Operation.bind

        def noting(kernel, *args, **options):
            self.names.add(named(kernel.factory))
            return bind(kernel, *args, **options)

        def noting_call(operation, algorithm, *args):
            self.names.add(named_call(operation.name, algorithm))
            return bind_call(operation, algorithm, *args)

        Kernel.bind, Operation.bind = noting, noting_call


def main(folder, seconds, *arguments):
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    with Path(folder, f"{rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)
        faulthandler.enable(output)
        if float(seconds):
            faulthandler.dump_traceback_later(float(seconds), file=output)
        import pytest

        # Of its own: ranks that clear away old folders together trip over each other.
        own = f"--basetemp={Path(folder, f'tmp{rank}')}"
        bound = Bound()
        code = int(pytest.main([own, *arguments], plugins=[Immediate, bound]))
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    Path(folder, f"{rank}.bound").write_text("\n".join(sorted(bound.names)))
    Path(folder, f"{rank}.code").write_text(str(code))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
