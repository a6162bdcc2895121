"""A disk that fills up: a clear error, nothing half-written, and all is well with space again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.disks import fill, small_disk

from mindgrid.shards.clock import Instant
from mindgrid.shards.errors import Unavailable
from mindgrid.shards.journal import Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock

DISK_BYTES = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of DISK_BYTES."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


def append_until_full(journal: Journal) -> tuple[int, str]:
    """Append until the disk is full; return the last acknowledged commit and the error's words."""
    while True:
        seq = journal.last_seq + 1
        entry = Entry(seq, seq, 1, b"%d:" % seq * 5000)
        try:
            journal.append(entry, [Transaction(f"t{seq}", seq, Instant(seq), b"r")])
        except Unavailable as error:
            return seq - 1, str(error)


def check(journal: Journal, acknowledged: int) -> None:
    entries = list(journal.replay())
    assert [entry.first_seq for entry in entries] == list(range(1, acknowledged + 1))
    assert all(entry.payload == b"%d:" % entry.first_seq * 5000 for entry in entries)
    assert [t.seq for t in journal.transactions()] == list(range(1, acknowledged + 1))


def test_a_full_disk_is_unavailable_and_loses_nothing(disk: Path) -> None:
    shard = disk / "s0"
    shard.mkdir()
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    with FolderLock(shard) as lock:
        journal = Journal(lock, 1)
        acknowledged, words = append_until_full(journal)
        assert "free space" in words
        assert acknowledged > 5
        assert journal.is_usable
        for _ in range(3):
            with pytest.raises(Unavailable, match="free space"):
                journal.append(Entry(acknowledged + 1, acknowledged + 1, 1, bytes(3 << 20)))
            check(journal, acknowledged)
        journal.close()
        # Still full: opening says so, again and again, and destroys nothing.
        fill(disk / "s0")
        for _ in range(3):
            with pytest.raises(Unavailable, match="free space"):
                Journal(lock, 2)
        (shard / "ballast").unlink()
        ballast.unlink()
        journal = Journal(lock, 2)
        check(journal, acknowledged)
        journal.append(Entry(acknowledged + 1, acknowledged + 1, 1, b"goes on"))
        journal.close()


def test_an_append_that_does_not_fit_leaves_nothing_behind(disk: Path) -> None:
    shard = disk / "s0"
    shard.mkdir()
    with FolderLock(shard) as lock:
        journal = Journal(lock, 1)
        ballast = fill(disk, 1 << 20)
        acknowledged, _ = append_until_full(journal)
        acknowledged += 1
        entry = Entry(acknowledged, acknowledged, 1, b"%d:" % acknowledged * 5000)
        while True:  # whatever is left is enough for a smaller one, or is made so
            try:
                journal.append(entry, [Transaction("t", acknowledged, Instant(acknowledged), b"r")])
                break
            except Unavailable:
                ballast.write_bytes(bytes(max(0, ballast.stat().st_size - (64 << 10))))
        check(journal, acknowledged)
        journal.close()
        ballast.unlink()
        # The log is verified against its mark: no frame of a failed append may count.
        for epoch in (2, 3):
            journal = Journal(lock, epoch)
            assert journal.lost_transactions == 0
            check(journal, acknowledged)
            journal.close()


def test_a_killed_process_finds_its_log_whole_after_an_append_that_did_not_fit(disk: Path) -> None:
    shard, copy = disk / "s0", disk / "copy"
    shard.mkdir()
    with FolderLock(shard) as lock:
        journal = Journal(lock, 1)
        ballast = fill(disk, 1 << 20)
        acknowledged, _ = append_until_full(journal)
        ballast.unlink()
        shutil.copytree(shard, copy)  # as a kill would leave it
        journal.close()
    with FolderLock(copy) as lock:
        journal = Journal(lock, 2)
        assert journal.lost_transactions == 0
        check(journal, acknowledged)
        journal.close()


def test_a_journal_cannot_be_created_on_a_full_disk(disk: Path) -> None:
    shard = disk / "s0"
    shard.mkdir()
    ballast = fill(disk)
    with FolderLock(shard) as lock:
        with pytest.raises(Unavailable, match="free space"):
            Journal(lock, 1)
        ballast.unlink()
        journal = Journal(lock, 1)
        check(journal, 0)
        journal.close()


def test_a_checkpoint_that_does_not_fit_may_be_tried_again(disk: Path) -> None:
    shard = disk / "s0"
    shard.mkdir()
    with FolderLock(shard) as lock:
        journal = Journal(lock, 1)
        for seq in range(1, 41):
            entry = Entry(seq, seq, 1, b"%d:" % seq * 5000)
            journal.append(entry, [Transaction(f"t{seq}", seq, Instant(seq), b"r")])
        journal.checkpoint_wal()
        ballast = fill(disk)
        with pytest.raises(Unavailable, match="free space"):
            journal.checkpoint_wal()
        check(journal, 40)
        ballast.unlink()
        journal.checkpoint_wal()
        journal.append(Entry(41, 41, 1, b"41:" * 5000), [Transaction("t", 41, Instant(41), b"r")])
        journal.close()
        journal = Journal(lock, 1)
        check(journal, 41)
        journal.close()


def test_a_manifest_that_does_not_fit_changes_nothing(disk: Path) -> None:
    shard = disk / "s0"
    shard.mkdir()
    with FolderLock(shard) as lock:
        journal = Journal(lock, 1)
        for seq in range(1, 21):
            entry = Entry(seq, seq, 1, b"%d:" % seq * 5000)
            journal.append(entry, [Transaction(f"t{seq}", seq, Instant(seq), b"r")])
        journal.commit_manifest(b"small", 0)
        ballast = fill(disk)
        with pytest.raises(Unavailable, match="free space"):
            journal.commit_manifest(bytes(1 << 20), 20)
        journal.close()
        ballast.unlink()
        journal = Journal(lock, 1)
        assert (journal.manifest, journal.covered_seq) == (b"small", 0)
        check(journal, 20)
        journal.close()
