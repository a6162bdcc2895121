"""Small disks that a test may fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Yield `folder`, newly made, as a disk of so many bytes; skip the test where it cannot be."""
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root may mount the small tmpfs that this test fills")
    folder.mkdir()
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def free_bytes(disk: Path) -> int:
    """Return how much fits on the disk."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path, but: int = 0) -> Path:
    """Fill the disk with one file until so many bytes are left; return the file."""
    ballast = disk / "ballast"
    with open(ballast, "ab", buffering=0) as file:
        while (left := free_bytes(disk) - but) > 0:
            try:
                file.write(bytes(min(left, 1 << 20)))
            except OSError:
                break
    return ballast
