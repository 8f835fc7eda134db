"""How much more memory this process may take: of the host, and of every control group that it runs in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["available_bytes", "groups_of"]

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of a control group, version 2 and 1: its limit, its use, and what of that the kernel can drop (in memory.stat)."""


def available_bytes() -> int:
    """Return the bytes that can be taken before the host, or a control group, runs out of memory."""
    free = [_free(group) for group in groups_of(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    return min([int(psutil.virtual_memory().available), *(number for number in free if number is not None)])


def groups_of(membership: Path, mount: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that limit a process's memory, from the innermost to the root.

    Args:
        membership: the process's /proc/PID/cgroup; none where there are no control groups.
        mount: where control groups are mounted. A container may see its own group there, whatever its membership says.
    """
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif "memory" in controllers.split(","):
            root = mount / "memory"
        else:
            continue
        parts = Path(path).parts[1:]
        for length in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:length])
            if ".." not in parts[:length] and folder.is_dir():
                yield folder


def _free(group: Path) -> int | None:
    """Return the bytes below the group's limit, or None where it has none."""
    for limit, usage, reclaimable in _FILES:
        try:
            most = (group / limit).read_text().strip()
            used = int((group / usage).read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:  # the other version, or the root
            continue
        return None if most == "max" else int(most) - used + int(statistics.get(reclaimable, 0))
    return None
