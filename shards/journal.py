"""The durable core of a shard: what was acknowledged, the manifest and the epoch, in one SQLite file.

    lock = FolderLock(folder)                 # first: the WAL is read before SQLite opens it
    journal = Journal(lock, epoch)            # verified to the last byte, the epoch stored
    journal.manifest, journal.covered_seq     # None, 0 in a new folder
    for entry in journal.replay(): ...        # what the manifest does not cover, in order
    for transaction in journal.transactions(): ...
    journal.append(Entry(first_seq, last_seq, rows, payload), transactions)   # ~0.3 ms, durable
    journal.commit_manifest(manifest, covered_seq)        # and trims, in the same transaction
    journal.trim_transactions(before)
    journal.checkpoint_wal()                  # after compaction: deleted text leaves the files
    journal.status().entries, .bytes
    journal.close(); lock.release()

Payloads, results and the manifest are opaque bytes. Sequences start at 1 and have no holes; an
entry may hold several commits (first_seq..last_seq). All methods may be called from any thread.

Errors: Corruption (the stored bytes are not what was written; names the file), Moved (a newer owner
took over: nothing was written), Unavailable (disk full, I/O error: the outcome is unknown, the
journal is poisoned and every later call is Unavailable; close it, release nothing, open anew).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindgrid.shards.clock import Instant
from mindgrid.shards.lock import FolderLock


@dataclass(frozen=True, slots=True)
class Entry:
    """What is made durable at once: the commits first_seq..last_seq, `rows` rows in all."""

    first_seq: int
    last_seq: int
    rows: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction id and what its first call was told."""

    id: str
    seq: int
    time: Instant
    result: bytes


@dataclass(frozen=True, slots=True)
class JournalStatus:
    """The journal's size: entries not yet trimmed, their rows, and the bytes of its files."""

    entries: int
    rows: int
    bytes: int


class Journal:
    """The one connection that ever touches `<folder>/journal.sqlite`."""

    manifest: bytes | None
    covered_seq: int
    last_seq: int
    epoch: int

    def __init__(self, lock: FolderLock, epoch: int) -> None:
        """Open or create the journal of the locked folder, verify all of it, store `epoch`.

        Raises Corruption, Moved (a higher epoch is stored), Unavailable, FormatTooNew.
        """
        raise NotImplementedError

    def append(self, entry: Entry, transactions: Sequence[Transaction] = ()) -> None:
        """Make `entry` and the results of its transactions durable, or raise."""
        raise NotImplementedError

    def commit_manifest(
        self, manifest: bytes, covered_seq: int, trim_seq: int | None = None
    ) -> None:
        """Replace the manifest and drop the entries up to `trim_seq` (default `covered_seq`).

        An entry that only begins at or before it stays, and is replayed whole: skip what the
        manifest covers.
        """
        raise NotImplementedError

    def replay(self, after_seq: int | None = None) -> Iterator[Entry]:
        """Yield the entries that reach past `after_seq` (default `covered_seq`), in order."""
        raise NotImplementedError

    def transactions(self) -> Iterator[Transaction]:
        """Yield every transaction that is still remembered, oldest first."""
        raise NotImplementedError

    def trim_transactions(self, before: Instant) -> int:
        """Forget transactions older than `before`, as far as whole appends are; say how many."""
        raise NotImplementedError

    def checkpoint_wal(self) -> None:
        """Move everything into the main file and empty the WAL."""
        raise NotImplementedError

    def status(self) -> JournalStatus:
        """Return the journal's size."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection; the lock stays with whoever took it."""
        raise NotImplementedError
