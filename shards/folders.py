"""Folders that are written once and named by a manifest: their errors, and that all are there."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa

from mindgrid.shards.errors import Corruption, MindgridError, Unavailable
from mindgrid.shards.files import DISK_FULL, FileDigest, verify
from mindgrid.shards.journal import JOURNAL_NAME, Journal


def check_folders(journal: Journal, named: Sequence[tuple[str, tuple[FileDigest, ...]]]) -> None:
    """Raise Corruption unless every byte of the named folders is there, and nothing else is due.

    A log that was cut short may have held a newer manifest. Then what looks like an orphan is
    sealed data, perhaps all there is, and deleting it would make a lost file a lost shard.
    """
    folder = journal.folder
    for name, files in named:
        verify(folder / name, files)
    names = {name for name, _ in named}
    unnamed = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in names)
    if journal.lost_transactions and unnamed:
        problem = (
            f"it was cut short by {journal.lost_transactions} acknowledged transactions, one of "
            f"which may have named {', '.join(unnamed)} (delete these to go on without them)"
        )
        raise Corruption(str(folder / f"{JOURNAL_NAME}-wal"), problem)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the new folder; turn what Lance, Arrow or the disk raise in the block into Unavailable.

    After an error the folder is gone again: on a full disk it would take what space is left.
    """
    try:
        folder.mkdir()
        yield
    except (OSError, RuntimeError, pa.ArrowException) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        reason = DISK_FULL if full else f"writing failed: {error}"
        shutil.rmtree(folder, ignore_errors=True)
        raise Unavailable(f"storage {folder}", reason) from error


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what Lance and Arrow raise on unreadable bytes into Corruption."""
    try:
        yield
    except MindgridError:
        raise
    except (OSError, RuntimeError, ValueError, msgspec.MsgspecError, pa.ArrowException) as error:
        raise Corruption(str(folder), f"it cannot be read: {error}") from error
