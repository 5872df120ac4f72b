"""The memory that this node has left for Numba's simulator.

Linux allocates more shared memory than there is, and kills a process that writes to too
much of it. So the simulator checks before it allocates.
"""

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def available() -> int:
    """Return the bytes that this process can still use, on the node and in its groups.

    Memory that caches files counts as free. Swap space does not count.
    """
    return min([_of_node(), *_of_groups()])


def _of_node() -> int:
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/meminfo has no MemAvailable")


def _of_groups() -> Iterator[int]:
    """Yield the bytes that are left in each control group that has a limit.

    If a container hides the groups above its own, its own is the root of the mount.
    """
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, used, prefix = _GROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit = _GROUPS / "memory", "memory.limit_in_bytes"
            used, prefix = "memory.usage_in_bytes", "total_"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                most = (folder / limit).read_text().strip()
                if most != "max":
                    taken = int((folder / used).read_text())
                    yield int(most) - taken + _caching(folder, prefix)
            except OSError:  # not visible here, or without a limit
                pass
            if folder == root:
                break


def _caching(folder: Path, prefix: str) -> int:
    """Return the bytes of files that a group caches, which can be freed."""
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split(" ", 1) for line in lines)
    kinds = (f"{prefix}inactive_file", f"{prefix}active_file")
    return sum(int(stat.get(kind, 0)) for kind in kinds)
