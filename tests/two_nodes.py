"""Two nodes on one machine, of namespaces: for network, mounts and the node's name.

    python tests/two_nodes.py 4 PROGRAM [ARGUMENTS]

Each has a boot id, a folder for shared memory and an address of its own, and a virtual
cable connects them. One mpirun starts half of the ranks on each. Needs root, and Open
MPI.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from numba_symm.command import cli, launcher

NODES = {"numba-symm-a": "10.213.77.1", "numba-symm-b": "10.213.77.2"}

NAMESPACES = ["--net", "--mount", "--uts"]


def why_not() -> str:
    """Return why this process cannot make two nodes; "" if it can."""
    try:
        made = subprocess.run(
            ["unshare", *NAMESPACES, "ip", "link", "set", "lo", "up"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return str(error)
    return made.stderr.strip()


@contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Make two nodes. Yield, by name, the words before a command that runs there.

    Args:
        folder: for files, by an absolute path.
    """
    names = folder / "hosts"
    lines = [f"{address} {name}" for name, address in NODES.items()]
    names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    with ExitStack() as ends:
        within, pids = {}, []
        for name in NODES:
            process = ends.enter_context(
                subprocess.Popen(
                    ["unshare", *NAMESPACES, "sh", "-c", "echo; exec sleep infinity"],
                    stdout=subprocess.PIPE,
                )
            )
            ends.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.read(1)  # it is in its namespaces
            pids.append(str(process.pid))
            within[name] = ["nsenter", "-t", pids[-1], *NAMESPACES]
            boot = folder / f"{name}.boot_id"
            boot.write_text(f"{uuid.uuid4()}\n")
            mount = shlex.join(["mount", "--bind", str(boot)])
            steps = f"""hostname {name}
                {mount} /proc/sys/kernel/random/boot_id
                mount --bind {shlex.quote(str(names))} /etc/hosts
                mount -t tmpfs tmpfs /dev/shm
                ip link set lo up"""
            _run(within[name], "sh", "-ec", steps)
        first = next(iter(within.values()))
        cable = [
            "ip",
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
        ]
        _run(first, *cable, pids[1])
        for name, address in NODES.items():
            _run(within[name], "ip", "addr", "add", f"{address}/24", "dev", "cable")
            _run(within[name], "ip", "link", "set", "cable", "up")
        yield within


def _run(within: list[str], *command: str) -> None:
    subprocess.run([*within, *command], check=True)


def command(
    ranks: int, program: list[str], folder: Path, within: dict[str, list[str]]
) -> list[str]:
    """Return the command that starts a program on the ranks of both nodes.

    Args:
        ranks: how many.
        program: the arguments of ``python``.
        folder: that of :func:`two_nodes`.
        within: what it yielded.
    """
    agent = folder / "agent.sh"  # as ssh: HOST COMMAND
    cases = [
        f'{name}) exec {shlex.join(run)} sh -c "$*" ;;' for name, run in within.items()
    ]
    cases.insert(0, "#!/bin/sh\nhost=$1\nshift\ncase $host in")
    agent.write_text("\n".join([*cases, "esac\n"]))
    agent.chmod(0o755)
    numbers = ranks - ranks // 2, ranks // 2
    nodes = ",".join(f"{name}:{n}" for name, n in zip(NODES, numbers, strict=True))
    flags = ["--prtemca", "plm_ssh_agent", str(agent), "--host", nodes]
    flags += ["--map-by", "slot:oversubscribe"]
    flags += ["--wdir", str(Path.cwd())]  # nsenter changes it
    for name in os.environ:
        if name.startswith(("NUMBA_", "PYTEST_", "PYTHON")):
            flags += ["-x", name]
    first = next(iter(within.values()))
    return [
        *first,
        *launcher.mpirun_command(ranks, program, launcher.find_mpirun(), flags),
    ]


def main(ranks: str, *program: str) -> int:
    """Run a program on two nodes, and return mpirun's exit code."""
    simulate = cli.simulation_needed(int(ranks))
    os.environ.update(launcher.job_environment(os.environ, simulate=simulate))
    with tempfile.TemporaryDirectory() as name, two_nodes(Path(name)) as within:
        return subprocess.call(command(int(ranks), [*program], Path(name), within))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
