"""A writer killed at any instant: every acknowledged entry is there, once, and without a hole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from mindgrid.shards.clock import Instant
from mindgrid.shards.journal import Entry, Journal
from mindgrid.shards.lock import FolderLock

ROUNDS = 20

_WRITER = """
import sys
from pathlib import Path
from mindgrid.shards import journal as module
from mindgrid.shards.clock import Instant
from mindgrid.shards.journal import Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock
module.WAL_BYTES_MAX = 300_000  # so that a kill also meets the emptying of the WAL
journal = Journal(FolderLock(Path(sys.argv[1])), 1)
while True:
    seq = journal.last_seq + 1
    rows = seq % 7 + 1
    entry = Entry(seq, seq + rows - 1, rows, b"%d:" % seq * 600)
    journal.append(entry, [Transaction(f"t{seq}", seq, Instant(seq), b"r%d" % seq)])
    print(journal.last_seq, flush=True)
    if seq % 50 < 7:
        journal.commit_manifest(b"covers %d" % seq, journal.last_seq - 20 if seq > 50 else 0)
        journal.trim_transactions(Instant(seq - 100))
        print("manifest", seq, flush=True)
    if seq % 90 < 7:
        journal.checkpoint_wal()
"""


def start(folder: Path, fault: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "MINDGRID_FAULT": fault}
    command = [sys.executable, "-c", _WRITER, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(writer: subprocess.Popen[str]) -> tuple[int, bytes | None]:
    """Return the last acknowledged commit and manifest of a writer that was killed."""
    assert writer.stdout is not None
    *lines, _ = writer.stdout.read().split("\n")  # what follows the last newline was cut
    assert writer.wait() == -9
    writer.stdout.close()
    seqs = [int(line) for line in lines if not line.startswith("manifest")]
    manifests = [line.split()[1] for line in lines if line.startswith("manifest")]
    manifest = f"covers {manifests[-1]}".encode() if manifests else None
    return max(seqs, default=0), manifest


def check(folder: Path, acknowledged: int, manifest: bytes | None, context: str) -> None:
    """Open the folder and compare it with what the writer was told."""
    with FolderLock(folder) as lock:
        journal = Journal(lock, 1)
        assert journal.lost_transactions == 0, context
        assert journal.last_seq >= acknowledged, context
        entries = list(journal.replay())
        for entry in entries:
            assert entry.payload == b"%d:" % entry.first_seq * 600, context
        covered = journal.covered_seq
        assert entries[-1].last_seq == journal.last_seq if entries else True, context
        if entries:
            assert entries[0].first_seq <= covered + 1, context
        for before, after in pairwise(entries):
            assert after.first_seq == before.last_seq + 1, context
        if manifest is not None:
            assert journal.manifest is not None, context
            assert int(journal.manifest.split()[1]) >= int(manifest.split()[1]), context
        remembered = list(journal.transactions())
        assert [t.seq for t in remembered] == sorted({t.seq for t in remembered}), context
        for transaction in remembered:
            assert transaction.result == b"r%d" % transaction.seq, context
        assert not entries or remembered[-1].seq == entries[-1].first_seq, context
        journal.close()


def test_every_acknowledged_entry_survives_kill_9(tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    acknowledged = 0
    for round_ in range(ROUNDS):
        writer = start(tmp_path)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        writer.kill()
        last, manifest = finish(writer)
        acknowledged = max(acknowledged, last)
        check(tmp_path, acknowledged, manifest, f"{seed=} {round_=}")
    assert acknowledged > ROUNDS


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "point",
    [
        "journal.append.before_commit",
        "journal.append.after_commit",
        "journal.manifest.before_commit",
        "journal.manifest.after_commit",
        "journal.transactions.before_commit",
        "journal.transactions.after_commit",
        "journal.checkpoint_wal.before",
        "journal.checkpoint_wal.vacuumed",
        "journal.checkpoint_wal.after",
    ],
)
def test_a_kill_at_each_fault_point_loses_nothing(tmp_path: Path, point: str, count: int) -> None:
    for _ in range(2):
        last, manifest = finish(start(tmp_path, f"{point}:{count}"))
        check(tmp_path, last, manifest, point)


@pytest.mark.parametrize(
    "point",
    [
        "journal.create.before_rename",
        "journal.create.after_rename",
        "journal.epoch.before_commit",
        "journal.epoch.after_commit",
    ],
)
def test_a_kill_while_a_journal_is_created_leaves_none_or_an_empty_one(
    tmp_path: Path, point: str
) -> None:
    assert finish(start(tmp_path, f"{point}:1")) == (0, None)
    check(tmp_path, 0, None, point)


def test_an_append_that_was_not_acknowledged_is_whole_or_absent(tmp_path: Path) -> None:
    finish(start(tmp_path, "journal.append.after_commit:5"))
    with FolderLock(tmp_path) as lock:
        journal = Journal(lock, 1)
        entries = list(journal.replay())
        assert len(entries) == 5, "its COMMIT had returned"
        seq = journal.last_seq + 1
        journal.append(Entry(seq, seq, 1, b"next"))
        assert journal.trim_transactions(Instant(10**9)) == 5
        journal.close()
