"""Files that outlive a power cut: how they are synced, what bytes they hold, what is an orphan."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from mindgrid.shards.errors import Corruption, Unavailable

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file held when it was written: its path below the folder, its size and its CRC-32.

    CRC-32 finds every burst of up to 32 bits and misses one in 2**32 of other accidents; it is no
    defence against malice. zlib's runs without the GIL and several times as fast as blake2b.
    """

    path: str
    size: int
    crc: int


def digest_tree(folder: Path) -> tuple[FileDigest, ...]:
    """Return the digest of every file below `folder`, sorted by path."""
    return tuple(digest_file(folder, path) for path in _files(folder))


def digest_file(folder: Path, path: str) -> FileDigest:
    """Return the digest of `folder / path`. Raises OSError when it cannot be read."""
    size = crc = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    # Unbuffered, into one buffer: no copy is made and memory stays flat for a file of any size.
    with open(folder / path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return FileDigest(path, size, crc)


def verify(folder: Path, digests: Iterable[FileDigest]) -> None:
    """Check that every named file is what was written; files not named are not looked at.

    Raises Corruption naming the first file that is missing or differs, Unavailable when one cannot
    be read for another reason.
    """
    for expected in digests:
        path = folder / expected.path
        try:
            found = digest_file(folder, expected.path)
        except FileNotFoundError:
            raise Corruption(str(path), "the file is missing") from None
        except OSError as error:
            raise unavailable(path, error) from error
        if found.size != expected.size:
            raise Corruption(
                str(path), f"it has {found.size} bytes where {expected.size} were written"
            )
        if found.crc != expected.crc:
            raise Corruption(
                str(path), f"its CRC is {found.crc:08x} where {expected.crc:08x} was written"
            )


def sync_tree(folder: Path) -> None:
    """Make everything below `folder`, its own name included, outlive a power cut.

    Files first, then folders from the leaves up: a folder that is durable names only files that
    are.
    """
    for parent, _, names in os.walk(folder, topdown=False, onerror=_raise):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
    sync(folder.parent)


def sync(path: Path) -> None:
    """fsync one file or one folder (that is, the names in it)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def create_folder(folder: Path) -> None:
    """Create `folder` and its missing parents, durably; one that exists is left alone."""
    if folder.is_dir():
        return
    create_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file by `data`, durably: after a crash it holds the old bytes or the new ones."""
    fresh = path.with_name(path.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(fresh, path)
    sync(path.parent)


def remove_orphans(folder: Path, keep: Collection[str]) -> list[str]:
    """Delete what lies directly in `folder` under a name not in `keep`; return those names.

    Call it only under the shard's lock: what another owner is just writing looks like an orphan.
    """
    orphans = sorted(entry.name for entry in os.scandir(folder) if entry.name not in keep)
    for name in orphans:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return orphans


def unavailable(path: Path, error: OSError) -> Unavailable:
    """Return the error to raise for a file that the system would not read or write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(str(path), DISK_FULL)
    return Unavailable(str(path), f"{error.strerror or error}; see the system's log")


DISK_FULL = "the disk is full; free space on it and try again"


def _files(folder: Path) -> list[str]:
    return sorted(
        str(Path(parent, name).relative_to(folder))
        for parent, _, names in os.walk(folder, onerror=_raise)
        for name in names
    )


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _raise(error: OSError) -> None:
    raise error
