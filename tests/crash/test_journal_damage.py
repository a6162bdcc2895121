"""Damage shows: after any flip the journal refuses, or answers exactly what was acknowledged."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindgrid.shards.clock import Instant
from mindgrid.shards.errors import Corruption
from mindgrid.shards.journal import Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock
from mindgrid.shards.wal import FRAME_BYTES, HEADER_BYTES

ENTRIES = 60
COVERED = 10
FLIPS = 20

_WRITER = """
import os, random, sys
from pathlib import Path
from mindgrid.shards.clock import Instant
from mindgrid.shards.journal import Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock
rng = random.Random(7)
journal = Journal(FolderLock(Path(sys.argv[1])), 1)
for seq in range(1, int(sys.argv[2]) + 1):
    payload = rng.randbytes(rng.choice([20, 2000, 9000]))
    journal.append(Entry(seq, seq, 1, payload), [Transaction(f"t{seq}", seq, Instant(seq), b"r")])
    if seq == 2 * int(sys.argv[3]):
        journal.commit_manifest(b"manifest" * 100, int(sys.argv[3]))
        journal.trim_transactions(Instant(5))
        if sys.argv[4] == "spread":
            journal.checkpoint_wal()
if sys.argv[4] == "main":
    journal.checkpoint_wal()
os._exit(0)  # as a kill would: the WAL stays
"""


@dataclass(frozen=True)
class State:
    """All that a journal answers."""

    manifest: bytes | None
    entries: tuple[Entry, ...]
    transactions: tuple[Transaction, ...]


def read(folder: Path) -> State:
    with FolderLock(folder) as lock:
        journal = Journal(lock, 1)
        state = State(journal.manifest, tuple(journal.replay()), tuple(journal.transactions()))
        journal.append(Entry(journal.last_seq + 1, journal.last_seq + 1, 1, b"goes on"))
        journal.close()
    return state


@pytest.fixture(scope="module", params=["wal", "spread", "main"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A killed writer's folder, its data in the WAL, in the main file, or half in each."""
    folder = tmp_path_factory.mktemp(str(request.param))
    command = [sys.executable, "-c", _WRITER, str(folder), str(ENTRIES), str(COVERED)]
    subprocess.run([*command, str(request.param)], check=True)
    return folder


@pytest.fixture(scope="module")
def once_in_wal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_wal")
    command = [sys.executable, "-c", _WRITER, str(folder), str(ENTRIES), str(COVERED), "wal"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def in_wal(once_in_wal: Path, tmp_path: Path) -> Path:
    """A killed writer's folder of one's own, with everything in its WAL."""
    return copy(once_in_wal, tmp_path / "in_wal")


def copy(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    (to / "journal.sqlite-shm").unlink(missing_ok=True)
    return to


def change(path: Path, act: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    act(data)
    path.write_bytes(data)


def flip(path: Path, place: int, mask: int = 0xFF) -> None:
    def act(data: bytearray) -> None:
        data[place] ^= mask

    change(path, act)


def frames(path: Path) -> int:
    return (path.stat().st_size - HEADER_BYTES) // FRAME_BYTES


def test_a_flipped_byte_anywhere_is_corruption_or_harmless(written: Path, tmp_path: Path) -> None:
    whole = read(copy(written, tmp_path / "whole"))
    assert len(whole.entries) == ENTRIES - COVERED
    assert len(whole.transactions) == ENTRIES - 4
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    found = {"Corruption": 0, "harmless": 0}
    named: set[str] = set()
    for name in ("journal.sqlite", "journal.sqlite-wal", "journal.mark"):
        for _ in range(FLIPS):
            folder = copy(written, tmp_path / "flipped")
            size = (folder / name).stat().st_size
            if not size:
                break
            place, mask = rng.randrange(size), 1 << rng.randrange(8)
            flip(folder / name, place, mask)
            try:
                state = read(folder)
            except Corruption as error:
                named.add(Path(error.path).name)
                found["Corruption"] += 1
            else:
                assert state == whole, f"{seed=} {name} {place=} {mask=}"
                found["harmless"] += 1
    assert found["Corruption"] >= FLIPS // 4, f"{seed=} {found}"
    assert named <= {"journal.sqlite", "journal.sqlite-wal"}, f"{seed=}"


def test_every_byte_of_the_main_files_first_page_is_guarded(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    command = [sys.executable, "-c", _WRITER, str(folder), "12", "4", "main"]
    subprocess.run(command, check=True)
    whole = read(copy(folder, tmp_path / "whole"))
    # The header in full, then a sample of the schema page's rest.
    for place in [*range(100), *range(100, 4096, 61)]:
        flipped = copy(folder, tmp_path / "flipped")
        flip(flipped / "journal.sqlite", place)
        with suppress(Corruption):
            assert read(flipped) == whole, f"{place=}"


def test_a_flipped_bit_in_the_wal_is_corruption(in_wal: Path, tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    size = (in_wal / "journal.sqlite-wal").stat().st_size
    for _ in range(FLIPS):
        folder = copy(in_wal, tmp_path / "flipped")
        place = rng.randrange(size)
        flip(folder / "journal.sqlite-wal", place, 1 << rng.randrange(8))
        print(f"{seed=} {place=}")
        with pytest.raises(Corruption, match=r"journal\.sqlite-wal"):
            read(folder)


@pytest.mark.parametrize("field", [0, 4, 8, 12, 16, 20, 24, 24 + 4095])
@pytest.mark.parametrize("back", [1, 2, 30])
def test_a_flip_in_any_field_of_a_frame_is_corruption(in_wal: Path, back: int, field: int) -> None:
    path = in_wal / "journal.sqlite-wal"
    flip(path, HEADER_BYTES + (frames(path) - back) * FRAME_BYTES + field)
    with pytest.raises(Corruption):
        read(in_wal)


def test_a_cleanly_torn_end_yields_the_prefix(
    in_wal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = read(copy(in_wal, tmp_path / "whole"))
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    size = (in_wal / "journal.sqlite-wal").stat().st_size
    cuts = [rng.randrange(size * 2 // 3, size) for _ in range(20)]
    for place in [*cuts, size - 1, size - FRAME_BYTES]:
        for zeros in (False, True):
            folder = copy(in_wal, tmp_path / "torn")

            def tear(data: bytearray, place: int = place, zeros: bool = zeros) -> None:
                data[place:] = bytes(3 * FRAME_BYTES) if zeros else b""

            change(folder / "journal.sqlite-wal", tear)
            caplog.clear()
            state = read(folder)
            kept = len(state.entries)
            assert state.entries == whole.entries[:kept], f"{seed=} {place=}"
            assert len(whole.entries) * 0.4 < kept < len(whole.entries), f"{seed=} {place=}"
            assert "acknowledged transactions are lost" in caplog.text


def test_a_wal_cut_to_nothing_is_reported(in_wal: Path, caplog: pytest.LogCaptureFixture) -> None:
    (in_wal / "journal.sqlite-wal").unlink()
    assert read(in_wal).entries == ()
    assert "acknowledged transactions are lost" in caplog.text


def test_a_commit_torn_by_a_power_cut_is_dropped(in_wal: Path, tmp_path: Path) -> None:
    """The mark says it was never acknowledged: pages of it reached the disk in any order."""
    before = tmp_path / "before"
    shutil.copytree(in_wal, before)
    whole = read(copy(in_wal, tmp_path / "whole"))
    with FolderLock(before) as lock:
        # Reopen, write one commit, take the mark from before it and the log from after it.
        journal = Journal(lock, 1)
        mark = (before / "journal.mark").read_bytes()
        start = (before / "journal.sqlite-wal").stat().st_size
        journal.append(Entry(ENTRIES + 1, ENTRIES + 1, 1, random.Random(3).randbytes(30_000)))
        torn = copy(before, tmp_path / "torn")
        journal.close()
    (torn / "journal.mark").write_bytes(mark)
    count = (frames(torn / "journal.sqlite-wal")) - (start - HEADER_BYTES) // FRAME_BYTES
    assert count > 6
    for missing in range(count):
        folder = copy(torn, tmp_path / "case")
        offset = start + missing * FRAME_BYTES

        def lose(data: bytearray, offset: int = offset) -> None:
            data[offset : offset + FRAME_BYTES] = bytes(FRAME_BYTES)

        change(folder / "journal.sqlite-wal", lose)
        assert read(folder) == whole, f"frame {missing} of the last commit was never written"


def test_the_same_loss_is_corruption_once_the_commit_was_acknowledged(in_wal: Path) -> None:
    path = in_wal / "journal.sqlite-wal"
    offset = HEADER_BYTES + (frames(path) - 2) * FRAME_BYTES

    def lose(data: bytearray) -> None:
        data[offset : offset + FRAME_BYTES] = bytes(FRAME_BYTES)

    change(path, lose)
    with pytest.raises(Corruption, match="acknowledged"):
        read(in_wal)


def test_without_its_mark_a_bad_end_is_corruption(in_wal: Path) -> None:
    (in_wal / "journal.mark").unlink()
    path = in_wal / "journal.sqlite-wal"
    flip(path, path.stat().st_size - 10)
    with pytest.raises(Corruption, match=r"journal\.mark"):
        read(in_wal)


def test_without_its_mark_a_sound_journal_opens(in_wal: Path) -> None:
    (in_wal / "journal.mark").unlink()
    assert len(read(in_wal).entries) == ENTRIES - COVERED
    assert (in_wal / "journal.mark").exists()


def test_refusing_a_damaged_journal_changes_nothing(written: Path, tmp_path: Path) -> None:
    folder = copy(written, tmp_path / "flipped")
    flip(folder / "journal.sqlite", 5000)
    names = ("journal.sqlite", "journal.sqlite-wal", "journal.mark")
    before = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    try:
        read(folder)
    except Corruption:
        assert {name: (folder / name).read_bytes() for name in before} == before


def test_results_and_manifest_are_guarded_as_entries_are(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        journal = Journal(lock, 1)
        journal.append(Entry(1, 1, 1, b"p"), [Transaction("findable-id", 1, Instant(1), b"told")])
        journal.commit_manifest(b"findable manifest", 0)
        journal.close()
    for needle in (b"findable-id", b"told", b"findable manifest"):
        folder = copy(tmp_path, tmp_path.parent / "flipped")
        flip(folder / "journal.sqlite", (folder / "journal.sqlite").read_bytes().index(needle))
        with pytest.raises(Corruption):
            read(folder)
