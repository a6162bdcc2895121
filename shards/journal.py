"""The durable core of a shard: acknowledged commits, manifest and epoch, in one SQLite file.

    lock = FolderLock(folder)                 # first: the WAL is read before SQLite opens it
    journal = Journal(lock, epoch)            # verified to the last byte, the epoch stored
    journal.manifest, journal.covered_seq     # None, 0 in a new folder
    for entry in journal.replay(): ...        # what the manifest does not cover, in order
    for transaction in journal.transactions(): ...
    journal.append(Entry(first_seq, last_seq, rows, payload), transactions)   # ~0.3 ms, durable
    journal.commit_manifest(manifest, covered_seq)        # and trims, in the same transaction
    journal.trim_transactions(before)
    journal.checkpoint_wal()                  # after compaction: trimmed text leaves the files
    journal.status().entries, .bytes
    journal.close(); lock.release()

Payloads, results and the manifest are opaque bytes. Sequences start at 1 and have no holes; an
entry may hold several commits (first_seq..last_seq). All methods may be called from any thread.

**Errors.** Corruption: the stored bytes are not what was written; it names the file. Moved: a newer
owner took over, nothing was written. Unavailable: the disk is full or fails. After a full disk
nothing was written and the journal goes on (`is_usable`); else the outcome is unknown, the journal
is poisoned and every later call is Unavailable, until it is closed and a new one opened under the
same lock.

**Damage.** SQLite has no checksums outside its WAL, and a b-tree that lost its last leaf is a valid
b-tree. So entries and results are chains: each row's CRC goes on from the one before, and the head
row, written with every commit, names the anchor (the last row trimmed) and the end of both chains.
Everything is verified on open before anything is written, for SQLite would spread a bad page: first
the WAL (`shards.wal`), then SQLite's own structures (`quick_check`), then the chains.

**Fencing.** The flock keeps others out. Were it lost (someone deleted LOCK), the head row still
fences: it holds the epoch and a number drawn at each open, and a transaction that finds another
head than it left there writes nothing. That needs SQLite's locking_mode=NORMAL. In EXCLUSIVE the
index of the WAL lives in private memory, so the old owner sees its own head for ever and overwrites
the new owner's commits, while integrity_check says "ok" (tried). BEGIN IMMEDIATE makes check and
write one step.

**No stray opens.** Nothing else in this process may open journal.sqlite or its -shm: closing it
would drop the POSIX locks of the connection. What must be read outside SQLite is read before the
connection exists. (SQLite takes no lock on the -wal, so its header may be read.)

The WAL never restarts in place: it is emptied (TRUNCATE) on open, when it is large, and on request.
So it never holds frames of an older time, and its size says how many frames were written.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from mindgrid.shards import faults, files, wal
from mindgrid.shards.clock import Instant
from mindgrid.shards.errors import (
    Corruption,
    FormatTooNew,
    MindgridError,
    Moved,
    StorageLocked,
    Unavailable,
)
from mindgrid.shards.lock import FolderLock

FORMAT = 2
"""Raised by whatever adds a table or changes a row; `Journal` then migrates older ones on open.

1 had no steps of commits over several shards in its entries, and reads as it is.
"""
JOURNAL_NAME = "journal.sqlite"
MARK_NAME = "journal.mark"
WAL_BYTES_MAX = 32 << 20
"""A WAL over this size is emptied after the next commit; ~40 ms then."""
BUSY_S = 1.0

_log = logging.getLogger(__name__)


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
    """The journal's size: entries not yet trimmed, and the bytes of its files."""

    entries: int
    bytes: int


class Journal:
    """The one connection that ever touches `<folder>/journal.sqlite`.

    `manifest` is None until the first `commit_manifest`; `covered_seq` is what it covers and
    `last_seq` the newest durable commit, both 0 in a new folder. `lost_transactions` is above 0
    when acknowledged ones are missing because the WAL was cut short: what is left is a correct
    prefix, and a warning was logged.
    """

    def __init__(
        self, lock: FolderLock, epoch: int, accept: Callable[[Journal], None] | None = None
    ) -> None:
        """Open or create the journal of the locked folder, verify all of it, store `epoch`.

        `accept` is called with the verified journal before the first write and may refuse by
        raising: for what the manifest names and the journal cannot check.

        Raises Corruption, Moved (a higher epoch is stored), FormatTooNew, Unavailable (disk full,
        too many open files, …) or StorageLocked. After an error nothing is open, and nothing that
        was acknowledged has changed; the lock stays with the caller.
        """
        assert lock.is_held()
        self.folder = lock.folder
        self.manifest: bytes | None = None
        self.lost_transactions = 0
        self._path = lock.folder / JOURNAL_NAME
        self._wal_path = lock.folder / (JOURNAL_NAME + "-wal")
        self._lock = lock
        self._guard = threading.RLock()
        self._refusal: Unavailable | None = None
        self._salts = b""
        self._wal_bytes = 0
        self._entries = 0
        self._mark_fd = -1
        try:
            mark = self._prepare_files()
            # For reading, until all is verified: whoever may write moves the WAL into the main
            # file on closing, and so would change a journal that is refused.
            self._db = self._connect("ro")
        except OSError as error:
            raise files.unavailable(self._path, error) from error
        try:
            self._verify()
            self._report_loss(mark)
            if accept is not None:
                accept(self)
            self._db.close()
            self._db = self._connect("rw")
            for pragma in _PRAGMAS:
                self._db.execute(pragma)
            self._mark_fd = os.open(self.folder / MARK_NAME, os.O_WRONLY)
            self._empty_wal()
            self._take_over(epoch)
        except sqlite3.Error as error:
            self._let_go()
            raise self._translate(error, reading=True) from error
        except OSError as error:
            self._let_go()
            raise files.unavailable(self._path, error) from error
        except BaseException:
            self._let_go()
            raise

    @property
    def epoch(self) -> int:
        """The epoch this journal was opened with."""
        return self._head.epoch

    @property
    def covered_seq(self) -> int:
        """The newest commit that the manifest covers."""
        return self._head.covered_seq

    @property
    def trimmed_seq(self) -> int:
        """The newest commit whose entry is gone; earlier than `covered_seq` while one is needed."""
        return self._head.entries.trimmed_seq

    @property
    def last_seq(self) -> int:
        """The newest durable commit; the next entry starts one above it."""
        return self._head.entries.last_seq

    def append(self, entry: Entry, transactions: Sequence[Transaction] = ()) -> None:
        """Make `entry` and the results of its transactions durable.

        Raises Moved (a newer owner: nothing was written) or Unavailable (if the journal `is_usable`
        then, nothing was written, else the outcome is unknown). Transactions without an id are not
        remembered.
        """
        remembered = [t for t in transactions if t.id]
        assert entry.first_seq <= entry.last_seq
        assert all(entry.first_seq <= t.seq <= entry.last_seq for t in remembered)
        with self._guard:
            assert entry.first_seq == self.last_seq + 1, (
                f"commits {entry.first_seq}… do not follow {self.last_seq}"
            )
            with self._transaction("append") as head:
                head = replace(head, entries=self._add(head.entries, _to_row(entry)))
                if remembered:
                    row = _Row(
                        entry.first_seq,
                        entry.last_seq,
                        max(t.time for t in remembered),
                        _pack_transactions(remembered),
                    )
                    head = replace(head, results=self._add(head.results, row))
                self._commit(head, "append")
            self._entries += 1
            self._empty_large_wal()

    def commit_manifest(
        self, manifest: bytes, covered_seq: int, trim_seq: int | None = None
    ) -> None:
        """Replace the manifest and drop the entries up to `trim_seq`, in one transaction.

        `trim_seq` is at most `covered_seq`, which is the default; a smaller one keeps entries for
        a reader that lags. An entry that ends after it stays and is replayed whole: skip the
        commits that the manifest covers. Raises as `append` does.
        """
        trim_seq = covered_seq if trim_seq is None else trim_seq
        with self._guard:
            assert self.covered_seq <= covered_seq <= self.last_seq
            assert trim_seq <= covered_seq
            with self._transaction("manifest") as head:
                self._db.execute("REPLACE INTO state VALUES (?, ?)", (_MANIFEST_ID, manifest))
                trimmed, dropped = self._trim(head.entries, trim_seq)
                head = replace(
                    head,
                    covered_seq=covered_seq,
                    manifest_size=len(manifest),
                    manifest_crc=zlib.crc32(manifest),
                    entries=trimmed,
                )
                self._commit(head, "manifest")
            self.manifest = manifest
            self._entries -= dropped
            self._empty_large_wal()

    def replay(self, after_seq: int | None = None) -> Iterator[Entry]:
        """Yield the entries that reach past `after_seq` (default `covered_seq`), in order.

        Raises Corruption at the first row that is not what was written. Entries that are appended
        meanwhile are yielded too; those asked for must not be trimmed meanwhile.
        """
        position = self.covered_seq if after_seq is None else after_seq
        for row in self._walk("entries", position):
            yield Entry(row.first_seq, row.last_seq, row.number, row.body)

    def transactions(self) -> Iterator[Transaction]:
        """Yield every transaction that is still remembered, oldest first."""
        for row in self._walk("results", self._head.results.trimmed_seq):
            yield from _unpack_transactions(row.body)

    def trim_transactions(self, before: Instant) -> int:
        """Forget transactions older than `before`; return how many appends' worth went.

        Those of one append go together, once all are older. Raises as `append` does.
        """
        with self._guard:
            newest = self._newest_result_before(before)
            if newest == 0:
                return 0
            with self._transaction("transactions") as head:
                trimmed, dropped = self._trim(head.results, newest)
                self._commit(replace(head, results=trimmed), "transactions")
            self._empty_large_wal()
            return dropped

    def checkpoint_wal(self) -> None:
        """Rewrite the main file and empty the WAL: no byte of what was trimmed is in them then.

        Takes as long as writing the untrimmed entries. Raises Unavailable when the disk is full or
        fails; nothing is lost then, and it may be tried again. Raises Moved as `append` does.
        """
        with self._guard:
            with self._transaction("checkpoint_wal"):
                self._db.execute("ROLLBACK")  # it has only checked the fence
            faults.reach("journal.checkpoint_wal.before")
            try:
                self._db.execute("VACUUM")
                self._write_mark()
                faults.reach("journal.checkpoint_wal.vacuumed")
                self._empty_wal()
            except (sqlite3.Error, OSError) as error:
                self._clear_after(error)
                raise self._translate(error) from error
            faults.reach("journal.checkpoint_wal.after")

    def status(self) -> JournalStatus:
        """Return the journal's size."""
        size = sum(_size(path) for path in (self._path, self._wal_path))
        return JournalStatus(self._entries, size)

    def close(self) -> None:
        """Close the connection; the lock stays with whoever took it. A second call does nothing."""
        with self._guard:
            self._let_go()
            self._refusal = Unavailable(str(self.folder), "its journal is closed")

    # Opening: files, then SQLite, then the chains, then the first write.

    def _prepare_files(self) -> wal.Mark:
        mark_path = self.folder / MARK_NAME
        if not self._path.exists():
            if mark_path.exists() or self._wal_path.exists():
                raise Corruption(str(self._path), "the file is missing, but others beside it exist")
            self._create()
        mark = wal.Mark.decode(mark_path.read_bytes()) if mark_path.exists() else None
        _check_main_header(self._path)
        wal.check_wal(self._wal_path, mark)
        if mark is None:
            files.write_atomically(mark_path, wal.NO_MARK_YET.encode())
        return mark or wal.NO_MARK_YET

    def _create(self) -> None:
        """Make the file under another name first: one that has its name is complete."""
        fresh = self._path.with_name(JOURNAL_NAME + ".new")
        for suffix in ("", "-journal", "-wal", "-shm"):
            fresh.with_name(fresh.name + suffix).unlink(missing_ok=True)
        try:
            db = sqlite3.connect(fresh, isolation_level=None)
            try:
                db.execute("PRAGMA synchronous=OFF")  # synced below, before it has its name
                db.execute(f"PRAGMA page_size={wal.PAGE_BYTES}")
                for _, sql in _SCHEMA:
                    db.execute(sql.decode())
                db.execute("INSERT INTO state VALUES (?, ?)", (_HEAD_ID, _Head().encode()))
                db.execute("PRAGMA journal_mode=WAL")
            finally:
                db.close()
        except sqlite3.Error as error:
            raise self._translate(error) from error
        files.sync(fresh)
        faults.reach("journal.create.before_rename")
        fresh.rename(self._path)
        files.sync(self.folder)
        faults.reach("journal.create.after_rename")

    def _connect(self, mode: str) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode={mode}",
                timeout=BUSY_S,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        except sqlite3.Error as error:
            raise self._translate(error, reading=True) from error
        db.text_factory = bytes
        return db

    def _verify(self) -> None:
        """Read everything that is stored, or raise Corruption."""
        body = self._read_head()
        head = _Head.decode(body)
        schema = self._db.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()
        if schema != _SCHEMA:
            raise self._damaged("its tables are not those that were created")
        problems = self._db.execute("PRAGMA quick_check(1)").fetchall()
        if problems != [(b"ok",)]:
            raise self._damaged(f"quick_check says {problems[0][0]!r}")
        # The bytes as they are: those of an older format are not what `encode` would write.
        self._head, self._head_body = head, body
        self.manifest = self._read_manifest(head)
        self._entries = sum(1 for _ in self._walk("entries", head.entries.trimmed_seq))
        for row in self._walk("results", head.results.trimmed_seq):
            _unpack_transactions(row.body)

    def _read_head(self) -> bytes:
        """Return the head row's bytes, checked, in a format that this release knows."""
        found = self._db.execute("SELECT body FROM state WHERE id = ?", (_HEAD_ID,)).fetchone()
        body = found[0] if found else None
        if not isinstance(body, bytes) or zlib.crc32(body[:-4]).to_bytes(4, "little") != body[-4:]:
            raise self._damaged("its head row does not match its checksum")
        (format,) = struct.unpack_from("<I", body)
        if format > FORMAT:
            raise FormatTooNew(str(self._path), format, FORMAT)
        return body

    def _read_manifest(self, head: _Head) -> bytes | None:
        found = self._db.execute("SELECT body FROM state WHERE id = ?", (_MANIFEST_ID,)).fetchone()
        if found is None and head.manifest_size < 0:
            return None
        body = found[0] if found else None
        if not isinstance(body, bytes) or (head.manifest_size, head.manifest_crc) != (
            len(body),
            zlib.crc32(body),
        ):
            raise self._damaged("its manifest does not match its checksum")
        return body

    def _report_loss(self, mark: wal.Mark) -> None:
        self.lost_transactions = max(0, mark.commits - self._head.commits)
        if self.lost_transactions:
            _log.warning(
                "%s was cut short: %d acknowledged transactions are lost; going on from commit %d",
                self._wal_path,
                self.lost_transactions,
                self.last_seq,
            )

    def _take_over(self, epoch: int) -> None:
        # The owner's number makes our head differ from that of any other owner, equal epoch or not.
        self._db.execute("BEGIN IMMEDIATE")
        self._check_fence()
        if self._head.epoch > epoch:
            raise Moved(str(self.folder), self._head.epoch)
        self._commit(replace(self._head, epoch=epoch, owner=secrets.randbits(63)), "epoch")

    # Writing.

    @contextmanager
    def _transaction(self, what: str) -> Iterator[_Head]:
        """Run the body in a fenced transaction; what fails in it poisons the journal.

        Only a transaction for which the disk has no room is taken back instead.
        """
        self._check_usable()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._check_fence()
            yield self._head
        except MindgridError as error:
            self._roll_back(str(error))
            raise
        except (sqlite3.Error, OSError) as error:
            ours = self._translate(error)
            full = _code(error) & 0xFF == sqlite3.SQLITE_FULL
            if not (full and self._takes_back()):
                self._roll_back(f"a write failed ({error}); open it anew")
            raise ours from error
        except BaseException as error:
            self._roll_back(f"{what} was broken off by {type(error).__name__}; open it anew")
            raise

    def _commit(self, head: _Head, what: str) -> None:
        head = replace(head, commits=head.commits + 1)
        body = head.encode()
        self._db.execute("UPDATE state SET body = ? WHERE id = ?", (body, _HEAD_ID))
        faults.reach(f"journal.{what}.before_commit")
        self._db.execute("COMMIT")
        self._head, self._head_body = head, body
        self._write_mark()
        faults.reach(f"journal.{what}.after_commit")

    @property
    def is_usable(self) -> bool:
        """Return whether a write may still succeed; False once one failed."""
        return self._refusal is None

    def _check_usable(self) -> None:
        if self._refusal is None and not self._lock.is_held():
            self._refusal = Unavailable(
                str(self.folder), "its LOCK file was removed or replaced; open it anew"
            )
        if self._refusal is not None:
            raise self._refusal

    def _check_fence(self) -> None:
        found = self._db.execute("SELECT body FROM state WHERE id = ?", (_HEAD_ID,)).fetchone()
        if not found or found[0] != self._head_body:
            raise Moved(str(self.folder), _Head.decode(self._read_head()).epoch)

    def _roll_back(self, reason: str) -> None:
        self._refusal = Unavailable(str(self.folder), reason)
        with suppress(sqlite3.Error):
            self._db.execute("ROLLBACK")

    def _takes_back(self) -> bool:
        """Undo a transaction that ran out of room; return whether nothing is left of it.

        Its commit is its last frame, so it never was one. The frames before that are cut off, for
        the mark counts frames by the size of the WAL.
        """
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            os.truncate(self._wal_path, self._wal_bytes)
        except (sqlite3.Error, OSError):
            return False
        return True

    def _write_mark(self) -> None:
        """Note how many frames are durable. Not synced: the mark may lag, never lead."""
        if not self._salts:
            # Only the -wal may be opened like this: SQLite holds no POSIX lock on it.
            self._salts = wal.read_salts(self._wal_path)
        self._wal_bytes = _size(self._wal_path)
        mark = wal.Mark(self._salts, wal.frames_in(self._wal_bytes), self._head.commits)
        # A mark that could not be written only says too little.
        with suppress(OSError):
            os.pwrite(self._mark_fd, mark.encode(), 0)

    def _empty_large_wal(self) -> None:
        if self._wal_bytes <= WAL_BYTES_MAX:
            return
        try:
            self._empty_wal()
        except (sqlite3.Error, OSError) as error:
            # The commit is durable all the same, so it is not failed; the next one tries again.
            _log.warning("%s could not be emptied: %s", self._wal_path, error)

    def _clear_after(self, error: sqlite3.Error | OSError) -> None:
        """Remove the frames of a VACUUM that failed: left over, they would look like damage."""
        try:
            self._empty_wal()
        except (sqlite3.Error, OSError, StorageLocked):
            self._roll_back(f"a checkpoint failed ({error}); open it anew")

    def _empty_wal(self) -> None:
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise StorageLocked(str(self._path), "another connection, which must be closed")
        self._salts, self._wal_bytes = b"", 0

    def _let_go(self) -> None:
        """Close what is open. SQLite moves the WAL into the main file when it closes the last."""
        with suppress(sqlite3.Error):
            self._db.close()
        fd, self._mark_fd = self._mark_fd, -1
        if fd >= 0:
            os.close(fd)

    # Chains.

    def _add(self, chain: _Chain, row: _Row) -> _Chain:
        crc = row.crc_after(chain.last_crc)
        self._db.execute(
            f"INSERT INTO {chain.table} VALUES (?, ?, ?)",
            (row.last_seq, _LINK.pack(row.first_seq, row.last_seq, row.number, crc), row.body),
        )
        return replace(chain, last_seq=row.last_seq, last_crc=crc)

    def _trim(self, chain: _Chain, seq: int) -> tuple[_Chain, int]:
        """Delete the rows that end at or before `seq`; the last of them becomes the anchor."""
        found = self._last_link(chain.table, seq)
        if found is None:
            return chain, 0
        dropped = self._db.execute(
            f"DELETE FROM {chain.table} WHERE last_seq <= ?", (seq,)
        ).rowcount
        return replace(chain, trimmed_seq=found[0], trimmed_crc=found[1]), dropped

    def _newest_result_before(self, before: Instant) -> int:
        """Return the last sequence of the leading rows that are all older than `before`."""
        newest = 0
        self._check_usable()
        try:
            for (link,) in self._db.execute("SELECT link FROM results ORDER BY last_seq"):
                _, last_seq, time, _ = _LINK.unpack(link)
                if time >= before:
                    break
                newest = last_seq
        except sqlite3.Error as error:
            raise self._translate(error, reading=True) from error
        return newest

    def _walk(self, table: str, after_seq: int) -> Iterator[_Row]:
        """Yield the rows that end after `after_seq`, verified one by one, to the chain's end."""
        with self._guard:
            chain = self._chain(table)
            found = self._last_link(table, after_seq)
        seq, crc = found or (chain.trimmed_seq, chain.trimmed_crc)
        while True:
            with self._guard:
                chain = self._chain(table)
                assert seq >= chain.trimmed_seq, "rows were trimmed while they were being read"
                if seq == chain.last_seq:
                    break
                row, crc = self._next_row(chain, seq, crc)
                seq = row.last_seq
            yield row
        if crc != chain.last_crc:
            raise self._damaged(f"the end of {table} is not what was written")

    def _chain(self, table: str) -> _Chain:
        if self._refusal is not None:
            raise self._refusal
        return self._head.entries if table == "entries" else self._head.results

    def _next_row(self, chain: _Chain, seq: int, crc: int) -> tuple[_Row, int]:
        found = self._one(
            f"SELECT link, body FROM {chain.table} WHERE last_seq > ? ORDER BY last_seq LIMIT 1",
            seq,
        )
        if found is None:
            raise self._damaged(f"what follows commit {seq} is missing from {chain.table}")
        link, body = found
        if not isinstance(link, bytes) or len(link) != _LINK.size or not isinstance(body, bytes):
            raise self._damaged(f"the row after commit {seq} in {chain.table} is not one of ours")
        first_seq, last_seq, number, stored = _LINK.unpack(link)
        row = _Row(first_seq, last_seq, number, body)
        if row.crc_after(crc) != stored:
            raise self._damaged(
                f"commits {first_seq} to {last_seq} in {chain.table} do not match their checksum"
            )
        if chain.table == "entries" and first_seq != seq + 1:
            raise self._damaged(f"commits {seq + 1} to {first_seq - 1} are missing")
        return row, stored

    def _last_link(self, table: str, seq: int) -> tuple[int, int] | None:
        """Return sequence and CRC of the last row that ends at or before `seq`."""
        found = self._one(
            f"SELECT link FROM {table} WHERE last_seq <= ? ORDER BY last_seq DESC LIMIT 1", seq
        )
        if found is None:
            return None
        if not isinstance(found[0], bytes) or len(found[0]) != _LINK.size:
            raise self._damaged(f"the row of commit {seq} in {table} is not one of ours")
        _, last_seq, _, crc = _LINK.unpack(found[0])
        return last_seq, crc

    def _one(self, sql: str, seq: int) -> tuple[object, ...] | None:
        try:
            found: tuple[object, ...] | None = self._db.execute(sql, (seq,)).fetchone()
        except sqlite3.Error as error:
            raise self._translate(error, reading=True) from error
        return found

    # Errors.

    def _damaged(self, problem: str) -> Corruption:
        return Corruption(str(self._path), problem)

    def _translate(self, error: sqlite3.Error | OSError, reading: bool = False) -> MindgridError:
        """Return ours for SQLite's: the one seam between the two."""
        if isinstance(error, OSError):
            return files.unavailable(self._path, error)
        code = _code(error)
        primary = code & 0xFF
        if primary == sqlite3.SQLITE_FULL:
            return Unavailable(str(self._path), files.DISK_FULL)
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StorageLocked(str(self._path), "another process that opened it without LOCK")
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._damaged(str(error))
        if reading and (primary == sqlite3.SQLITE_ERROR or code == _SHORT_READ):
            return self._damaged(str(error))
        return Unavailable(str(self._path), f"{error}; see the system's log")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of either chain; `number` is the count of rows in `entries`, a time in `results`."""

    first_seq: int
    last_seq: int
    number: int
    body: bytes

    def crc_after(self, crc: int) -> int:
        """Return the chain's CRC after this row, when `crc` was the one before it."""
        return zlib.crc32(self.body, zlib.crc32(_KEYS.pack(*self._keys()), crc))

    def _keys(self) -> tuple[int, int, int]:
        return self.first_seq, self.last_seq, self.number


class _Chain(msgspec.Struct, frozen=True):
    """The ends of a chain of rows: the last row that was trimmed, and the last one written."""

    table: str
    trimmed_seq: int = 0
    trimmed_crc: int = 0
    last_seq: int = 0
    last_crc: int = 0


class _Head(msgspec.Struct, frozen=True):
    """The row that every transaction rewrites. Its first 4 bytes are the format, for ever."""

    epoch: int = 0
    owner: int = 0
    commits: int = 0
    covered_seq: int = 0
    manifest_size: int = -1
    manifest_crc: int = 0
    entries: _Chain = _Chain("entries")
    results: _Chain = _Chain("results")

    def encode(self) -> bytes:
        """Return the row's bytes, the CRC of the others last."""
        packed = _HEAD.pack(
            FORMAT,
            self.epoch,
            self.owner,
            self.commits,
            self.covered_seq,
            self.manifest_size,
            self.manifest_crc,
            *_ends(self.entries),
            *_ends(self.results),
        )
        return packed + zlib.crc32(packed).to_bytes(4, "little")

    @staticmethod
    def decode(body: bytes) -> _Head:
        """Return the head in these bytes, whose CRC was checked."""
        _, epoch, owner, commits, covered, size, crc, *ends = _HEAD.unpack(body[:-4])
        entries, results = _Chain("entries", *ends[:4]), _Chain("results", *ends[4:])
        return _Head(epoch, owner, commits, covered, size, crc, entries, results)


def _ends(chain: _Chain) -> tuple[int, int, int, int]:
    return chain.trimmed_seq, chain.trimmed_crc, chain.last_seq, chain.last_crc


def _to_row(entry: Entry) -> _Row:
    return _Row(entry.first_seq, entry.last_seq, entry.rows, entry.payload)


def _pack_transactions(transactions: Sequence[Transaction]) -> bytes:
    return msgspec.msgpack.encode([(t.id, t.seq, t.time, t.result) for t in transactions])


def _unpack_transactions(body: bytes) -> list[Transaction]:
    return [
        Transaction(id, seq, Instant(time), result)
        for id, seq, time, result in _transactions_decoder.decode(body)
    ]


def _code(error: sqlite3.Error | OSError) -> int:
    """Return SQLite's extended code, whose last byte is the primary one.

    Python raises some errors itself, without a code: text or numbers it cannot convert.
    """
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code


def _check_main_header(path: Path) -> None:
    """Raise Corruption unless the file's header says what ours always says.

    SQLite believes it: a flipped bit in "uses a WAL" or "auto-vacuum" would change what it does.
    """
    with open(path, "rb", buffering=0) as file:
        header = file.read(100) or b""
    for offset, expected in _HEADER_FIELDS.items():
        if header[offset : offset + len(expected)] != expected:
            raise Corruption(str(path), f"byte {offset} and following of its header were changed")


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


_HEAD_ID, _MANIFEST_ID = 1, 2
_KEYS = struct.Struct("<qqq")
_LINK = struct.Struct("<qqqI")
_CHAIN_FORMAT = "qIqI"
_HEAD = struct.Struct("<I" + "qqqqqI" + _CHAIN_FORMAT + _CHAIN_FORMAT)
_SHORT_READ = 522
"""SQLITE_IOERR_SHORT_READ: the file ends before its pages do."""
_transactions_decoder = msgspec.msgpack.Decoder(list[tuple[str, int, int, bytes]])

_SCHEMA = [
    (name, b"CREATE TABLE " + name + columns)
    for name, columns in (
        # `link` before `body`, so that it is read without the pages that a long body overflows to.
        (b"entries", b" (last_seq INTEGER PRIMARY KEY, link BLOB, body BLOB)"),
        (b"results", b" (last_seq INTEGER PRIMARY KEY, link BLOB, body BLOB)"),
        (b"state", b" (id INTEGER PRIMARY KEY, body BLOB)"),
    )
]

_PRAGMAS = (
    "PRAGMA locking_mode=NORMAL",
    "PRAGMA synchronous=FULL",
    # Zeroes what is deleted inside a page; freed pages wait for `checkpoint_wal`. ON writes every
    # freed page once more: trimming 15 MB took 300 ms and 15 MB of WAL instead of 45 ms and 0.6 MB.
    "PRAGMA secure_delete=FAST",
    # VACUUM must not leave text in a temporary file.
    "PRAGMA temp_store=MEMORY",
    "PRAGMA wal_autocheckpoint=0",
    # Hundreds of journals are open in one host; an append touches five pages.
    "PRAGMA cache_size=-256",
    # Nothing of a transaction may reach the WAL before its COMMIT, see `shards.wal`.
    "PRAGMA cache_spill=OFF",
)

_HEADER_FIELDS = {
    0: b"SQLite format 3\0" + wal.PAGE_BYTES.to_bytes(2, "big"),
    18: bytes((2, 2, 0, 64, 32, 32)),  # WAL twice, nothing reserved, payload fractions
    44: (4).to_bytes(4, "big"),  # schema format
    52: bytes(4),  # no auto-vacuum
    56: (1).to_bytes(4, "big"),  # UTF-8
    60: bytes(12),  # user version, incremental vacuum, application id
    72: bytes(20),  # reserved for expansion
}
