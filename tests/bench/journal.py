"""Measures the journal's durable appends, beside a bare fdatasync and a bare SQLite insert.

python tests/bench/journal.py [folder on the disk to measure]
"""

from __future__ import annotations

import os
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mindgrid.shards.clock import Instant
from mindgrid.shards.journal import Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock

PAYLOAD_BYTES = 2048
ROUNDS = 8
APPENDS = 100
LOADED = 8_192


def main() -> None:
    """Print one line per path, interleaved round by round so that noise hits all of them."""
    base = sys.argv[1] if len(sys.argv) > 1 else None
    payload = random.Random(1).randbytes(PAYLOAD_BYTES)
    print(f"{platform.machine()}, {os.cpu_count()} cores, SQLite {sqlite3.sqlite_version}")
    with tempfile.TemporaryDirectory(dir=base) as name:
        folder = Path(name)
        (folder / "s0").mkdir()
        lock = FolderLock(folder / "s0")
        journal = Journal(lock, 1)
        paths = {
            "2 KB append + fdatasync": _raw(folder / "raw", payload),
            "2 KB insert, SQLite WAL, synchronous=FULL": _sqlite(folder / "plain.sqlite", payload),
            "2 KB entry with one transaction, journal": _journal(journal, payload),
        }
        times: dict[str, list[float]] = {path: [] for path in paths}
        for _ in range(ROUNDS):
            for path, act in paths.items():
                times[path].extend(_timed(act) for _ in range(APPENDS))
        bare = statistics.median(next(iter(times.values())))
        for path, took in times.items():
            took.sort()
            p50, p99 = statistics.median(took), took[int(len(took) * 0.99)]
            print(
                f"{path:45s} p50 {p50 * 1e3:6.3f} ms  p99 {p99 * 1e3:6.2f} ms  "
                f"{len(took) / sum(took):6.0f}/s  {p50 / bare:4.1f} x the bare one"
            )
        _print_life(journal, lock, payload)


def _print_life(journal: Journal, lock: FolderLock, payload: bytes) -> None:
    while journal.last_seq < LOADED:
        seq = journal.last_seq + 1
        journal.append(Entry(seq, seq + 63, 64, payload * 64))
    size = journal.status().bytes
    print(f"{journal.status().entries} entries, {size >> 20} MiB in all")
    journal.close()
    started = time.perf_counter()
    journal = Journal(lock, 2)
    print(f"open and verify     {(time.perf_counter() - started) * 1e3:7.1f} ms")
    started = time.perf_counter()
    rows = sum(entry.rows for entry in journal.replay())
    print(f"replay              {(time.perf_counter() - started) * 1e3:7.1f} ms, {rows} rows")
    started = time.perf_counter()
    journal.commit_manifest(b"manifest", journal.last_seq)
    print(f"manifest and trim   {(time.perf_counter() - started) * 1e3:7.1f} ms")
    started = time.perf_counter()
    journal.checkpoint_wal()
    print(f"empty the WAL       {(time.perf_counter() - started) * 1e3:7.1f} ms")
    journal.close()
    lock.release()


def _timed(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _raw(path: Path, payload: bytes) -> Callable[[], None]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    def act() -> None:
        os.write(fd, payload)
        os.fdatasync(fd)

    return act


def _sqlite(path: Path, payload: bytes) -> Callable[[], None]:
    db = sqlite3.connect(path, isolation_level=None)
    for sql in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE t (b BLOB)"):
        db.execute(sql)

    def act() -> None:
        db.execute("INSERT INTO t VALUES (?)", (payload,))

    return act


def _journal(journal: Journal, payload: bytes) -> Callable[[], None]:
    def act() -> None:
        seq = journal.last_seq + 1
        journal.append(
            Entry(seq, seq, 1, payload),
            [Transaction(f"transaction {seq}", seq, Instant(seq), b"r")],
        )

    return act


if __name__ == "__main__":
    main()
