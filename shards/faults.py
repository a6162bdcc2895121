"""Fault points: places where a test makes the process die or the disk fill, and nothing otherwise.

    MINDGRID_FAULT=journal.append.before_commit:3          SIGKILL at the third time it is reached
    MINDGRID_FAULT=journal.append.before_commit:3:full     OSError(ENOSPC) there instead

In the same process a test calls `set_hook` instead.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

NAMES = frozenset(
    {
        "journal.append.before_commit",
        "journal.append.after_commit",
        "journal.manifest.before_commit",
        "journal.manifest.after_commit",
        "journal.transactions.before_commit",
        "journal.transactions.after_commit",
        "journal.epoch.before_commit",
        "journal.epoch.after_commit",
        "journal.checkpoint_wal.before",
        "journal.checkpoint_wal.vacuumed",
        "journal.checkpoint_wal.after",
        "journal.create.before_rename",
        "journal.create.after_rename",
        "seal.written",
        "merge.written",
        "index.written",
        "manifest.switching",
        "manifest.switched",
    }
)
"""Every fault point of the tree; a test that walks all of them reads this."""


def reach(name: str) -> None:
    """Do nothing, unless a test set a hook."""
    assert name in NAMES, f"{name} is missing from faults.NAMES"
    if _hook is not None:
        _hook(name)


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every point that is reached; None ends it."""
    global _hook
    _hook = hook


def _hook_from_environment() -> Callable[[str], None] | None:
    text = os.environ.get("MINDGRID_FAULT", "")
    if not text:
        return None
    wanted, count, *action = text.split(":")
    assert wanted in NAMES, f"MINDGRID_FAULT names {wanted}, which is not in faults.NAMES"
    left = int(count)

    def hook(name: str) -> None:
        nonlocal left
        if name != wanted:
            return
        left -= 1
        if left == 0 and action == ["full"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


_hook = _hook_from_environment()
