"""One owner per folder: an flock on its `LOCK` file, held for as long as the owner lives.

flock belongs to the open file, so unlike the POSIX locks SQLite takes it is not lost when something
else in the process opens and closes the file. It is lost only with the last descriptor: exec closes
ours (CLOEXEC), and a forked child closes its copy at once, so that no child keeps a dead owner's
folder locked. A stopped owner (SIGSTOP) keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from datetime import UTC, datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from mindgrid.shards.errors import StorageLocked

LOCK_NAME = "LOCK"
_TAKE_ATTEMPTS = 10


class FolderLock:
    """The right to write in `folder`, until `release` or the end of this process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder without waiting.

        Raises StorageLocked, naming the owner's process, when another process or another
        FolderLock of this one holds it.
        """
        self.folder = folder
        self.path = folder / LOCK_NAME
        self._fd = self._take()
        self._pid = os.getpid()
        self._inode = os.fstat(self._fd).st_ino
        self._sign()
        _held.add(self)

    def _take(self) -> int:
        for _ in range(_TAKE_ATTEMPTS):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _read_owner(fd)
                os.close(fd)
                raise StorageLocked(str(self.folder), owner) from None
            except BaseException:
                os.close(fd)
                raise
            if _inode(self.path) == os.fstat(fd).st_ino:
                return fd
            # Someone removed the file between our open and our flock: that lock guards nothing.
            os.close(fd)
        raise StorageLocked(str(self.folder), "someone who keeps replacing its LOCK file")

    def _sign(self) -> None:
        started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
        text = f"process {self._pid} (started {started:%Y-%m-%dT%H:%M:%SZ})\n".encode()
        # The text only words the error of others; a full disk must not stop the owner.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)

    def is_held(self) -> bool:
        """Return whether this process still owns the folder.

        False after `release`, in a forked child, and when the LOCK file was removed or replaced,
        which lets a second owner in.
        """
        return self._fd >= 0 and _inode(self.path) == self._inode

    def release(self) -> None:
        """Let the folder go; a second call does nothing."""
        _held.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Closing is enough and, unlike LOCK_UN, right in a forked child too.
            os.close(fd)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return -1


def _read_owner(fd: int) -> str:
    text = os.pread(fd, 200, 0).decode(errors="replace").strip()
    return text or "another process"


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_release_in_child)
