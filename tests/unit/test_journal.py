"""The journal's promises on a healthy disk: what was appended is what is replayed."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindgrid.shards import faults, wal
from mindgrid.shards import journal as journal_module
from mindgrid.shards.clock import Instant
from mindgrid.shards.errors import Corruption, FormatTooNew, Moved, StorageLocked, Unavailable
from mindgrid.shards.journal import Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[FolderLock]:
    with FolderLock(tmp_path) as taken:
        yield taken


def entry(first: int, last: int | None = None) -> Entry:
    last = first if last is None else last
    return Entry(first, last, last - first + 1, f"payload {first}".encode() * 50)


def transaction(seq: int) -> Transaction:
    return Transaction(f"t{seq}", seq, Instant(seq * 1000), f"result {seq}".encode())


def test_a_new_journal_is_empty(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    assert (journal.manifest, journal.covered_seq, journal.last_seq) == (None, 0, 0)
    assert list(journal.replay()) == []
    assert list(journal.transactions()) == []
    assert journal.status().entries == 0
    journal.close()


def test_entries_and_transactions_come_back_in_order_after_reopening(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    journal.append(entry(1, 3), [transaction(1), transaction(3)])
    journal.append(entry(4))
    journal.append(entry(5, 6), [transaction(6)])
    journal.close()
    journal = Journal(lock, 2)
    assert list(journal.replay()) == [entry(1, 3), entry(4), entry(5, 6)]
    assert list(journal.replay(after_seq=3)) == [entry(4), entry(5, 6)]
    assert list(journal.transactions()) == [transaction(1), transaction(3), transaction(6)]
    assert (journal.last_seq, journal.status().entries, journal.lost_transactions) == (6, 3, 0)
    journal.close()


def test_a_transaction_without_an_id_is_not_remembered(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    journal.append(entry(1), [Transaction("", 1, Instant(1), b"r")])
    assert list(journal.transactions()) == []
    journal.close()


def test_a_manifest_and_the_trim_that_goes_with_it_survive(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    for seq in range(1, 11):
        journal.append(entry(seq), [transaction(seq)])
    journal.commit_manifest(b"first", 4)
    journal.commit_manifest(b"second" * 2000, 7)
    journal.close()
    journal = Journal(lock, 1)
    assert journal.manifest == b"second" * 2000
    assert (journal.covered_seq, journal.last_seq) == (7, 10)
    assert list(journal.replay()) == [entry(8), entry(9), entry(10)]
    assert len(list(journal.transactions())) == 10, "results are trimmed by age, not with entries"
    assert journal.status().entries == 3
    journal.close()


def test_the_chain_goes_on_when_everything_was_trimmed(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    journal.append(entry(1))
    journal.commit_manifest(b"m", 1)
    journal.close()
    journal = Journal(lock, 1)
    journal.append(entry(2))
    journal.close()
    journal = Journal(lock, 1)
    assert list(journal.replay()) == [entry(2)]
    journal.close()


def test_an_entry_that_ends_after_what_is_covered_stays_whole(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    journal.append(entry(1, 2))
    journal.append(entry(3, 6))
    journal.commit_manifest(b"m", 4)
    assert list(journal.replay()) == [entry(3, 6)]
    journal.close()


def test_entries_can_be_kept_for_a_reader_that_lags(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    for seq in range(1, 6):
        journal.append(entry(seq))
    journal.commit_manifest(b"m", 4, trim_seq=2)
    assert list(journal.replay()) == [entry(5)]
    assert list(journal.replay(after_seq=2)) == [entry(3), entry(4), entry(5)]
    journal.close()


def test_transactions_are_forgotten_by_age(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    for seq in range(1, 6):
        journal.append(entry(seq), [transaction(seq)])
    assert journal.trim_transactions(Instant(500)) == 0
    assert journal.trim_transactions(Instant(3000)) == 2
    journal.close()
    journal = Journal(lock, 1)
    assert list(journal.transactions()) == [transaction(3), transaction(4), transaction(5)]
    assert len(list(journal.replay())) == 5
    assert journal.trim_transactions(Instant(10**9)) == 3
    journal.append(entry(6), [transaction(6)])
    assert list(journal.transactions()) == [transaction(6)]
    journal.close()


def test_what_was_trimmed_leaves_the_files(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    secret = b"the text that must go" * 400
    journal.append(Entry(1, 1, 1, secret), [Transaction("t", 1, Instant(1), secret)])
    for seq in range(2, 30):
        journal.append(Entry(seq, seq, 1, b"the text that must go" * 20 * seq))
    journal.append(entry(30))
    assert any(secret[:30] in path.read_bytes() for path in lock.folder.glob("*-wal"))
    journal.commit_manifest(b"m", 29)
    journal.trim_transactions(Instant(2))
    for seq in range(31, 40):  # which overwrite some of the freed pages, not to their ends
        journal.append(entry(seq))
    journal.checkpoint_wal()
    # Reading the main file here drops SQLite's POSIX locks, which only this test may do.
    assert not [p for p in lock.folder.iterdir() if b"xt that mu" in p.read_bytes()]
    assert list(journal.replay()) == [entry(seq) for seq in range(30, 40)]
    journal.close()
    journal = Journal(lock, 1)
    assert len(list(journal.replay())) == 10
    assert journal.lost_transactions == 0
    journal.close()


def test_a_large_wal_is_emptied(lock: FolderLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "WAL_BYTES_MAX", 100_000)
    journal = Journal(lock, 1)
    sizes = []
    for seq in range(1, 60):
        journal.append(Entry(seq, seq, 1, os.urandom(4000)))
        sizes.append((lock.folder / "journal.sqlite-wal").stat().st_size)
    assert max(sizes) < 200_000
    assert 0 in sizes
    journal.close()
    journal = Journal(lock, 1)
    assert len(list(journal.replay())) == 59
    journal.close()


def test_a_sequence_with_a_hole_is_a_bug(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    with pytest.raises(AssertionError):
        journal.append(entry(2))
    journal.append(entry(1))
    journal.close()


def test_a_lower_epoch_is_refused_and_a_higher_one_stored(lock: FolderLock) -> None:
    Journal(lock, 5).close()
    with pytest.raises(Moved) as refused:
        Journal(lock, 4)
    assert refused.value.epoch == 5
    journal = Journal(lock, 6)
    assert journal.epoch == 6
    journal.close()


def test_a_newer_format_is_named(lock: FolderLock, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(journal_module, "FORMAT", journal_module.FORMAT + 1)
        Journal(lock, 1).close()
    with pytest.raises(FormatTooNew, match=f"format {journal_module.FORMAT + 1}"):
        Journal(lock, 1)


def test_a_write_that_fails_poisons_the_journal_until_it_is_reopened(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    journal.append(entry(1))

    def fill(name: str) -> None:
        if name == "journal.append.before_commit":
            raise OSError(errno.ENOSPC, "full")

    faults.set_hook(fill)
    try:
        with pytest.raises(Unavailable, match="free space"):
            journal.append(entry(2))
    finally:
        faults.set_hook(None)
    for call in (
        lambda: journal.append(entry(2)),
        lambda: journal.commit_manifest(b"m", 1),
        lambda: journal.trim_transactions(Instant(10**9)),
        journal.checkpoint_wal,
        lambda: list(journal.replay()),
    ):
        with pytest.raises(Unavailable):
            call()
    journal.close()
    journal = Journal(lock, 1)
    assert list(journal.replay()) == [entry(1)]
    journal.append(entry(2))
    journal.close()


def test_a_closed_journal_answers_with_an_error(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    journal.close()
    journal.close()
    with pytest.raises(Unavailable, match="closed"):
        journal.append(entry(1))


def test_threads_may_append_and_replay_at_once(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    journal.append(entry(1))

    def append() -> None:
        for seq in range(2, 100):
            journal.append(entry(seq))

    writer = threading.Thread(target=append)
    writer.start()
    while writer.is_alive():
        seqs = [found.first_seq for found in journal.replay()]
        assert seqs == list(range(1, len(seqs) + 1))
    writer.join()
    assert len(list(journal.replay())) == 99
    journal.close()


def test_a_lost_main_file_is_not_an_empty_journal(lock: FolderLock) -> None:
    Journal(lock, 1).close()
    (lock.folder / "journal.sqlite").unlink()
    with pytest.raises(Corruption, match="missing"):
        Journal(lock, 1)


def test_a_folder_has_one_lock_at_a_time(lock: FolderLock) -> None:
    with pytest.raises(StorageLocked, match=f"process {os.getpid()} "):
        FolderLock(lock.folder)
    lock.release()
    assert not lock.is_held()
    with FolderLock(lock.folder) as again:
        assert again.is_held()


def test_a_journal_whose_lock_file_was_replaced_writes_no_more(lock: FolderLock) -> None:
    journal = Journal(lock, 1)
    lock.path.unlink()
    with pytest.raises(Unavailable, match="LOCK"):
        journal.append(entry(1))
    journal.close()


def test_our_check_of_a_log_agrees_with_sqlites(tmp_path: Path) -> None:
    path = tmp_path / "any.sqlite"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE t (b BLOB)")
    for size in (10, 3000, 50_000, 400_000):
        db.execute("INSERT INTO t VALUES (?)", (os.urandom(size),))
    path = tmp_path / "any.sqlite-wal"
    assert wal.frames_in(path.stat().st_size) > 100
    wal.check_wal(path, None)
    db.close()


def test_a_mark_with_a_flipped_bit_is_no_mark() -> None:
    data = wal.Mark(b"saltsalt", 7, 3).encode()
    assert wal.Mark.decode(data) == wal.Mark(b"saltsalt", 7, 3)
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 4
        assert wal.Mark.decode(bytes(flipped)) is None
    assert wal.Mark.decode(b"") is None
