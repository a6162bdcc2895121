"""Damage to a stored shard shows: it is named or harmless, never served, and never made worse."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
from tests.support.shards import Stored, contents, opened_state, store

from mindgrid.shards.errors import Corruption
from mindgrid.shards.wal import FRAME_BYTES

FLIPS = 20
JOURNAL = {"journal.sqlite", "journal.sqlite-wal", "journal.mark"}
OWN = {"LOCK", "journal.sqlite-shm"}
"""Files that hold nothing: the text of an error, and SQLite's index of the WAL."""

SEALED = {
    "rows: manifest": r"segment-\w+/rows\.lance/_versions/\d+\.manifest",
    "rows: version hint": r"segment-\w+/rows\.lance/_versions/latest_version_hint\.json",
    "rows: transaction": r"segment-\w+/rows\.lance/_transactions/.*\.txn",
    "rows: data": r"segment-\w+/rows\.lance/data/.*\.lance",
    "changes: manifest": r"segment-\w+/changes\.lance/_versions/\d+\.manifest",
    "changes: version hint": r"segment-\w+/changes\.lance/_versions/latest_version_hint\.json",
    "changes: transaction": r"segment-\w+/changes\.lance/_transactions/.*\.txn",
    "changes: data": r"segment-\w+/changes\.lance/data/.*\.lance",
    "vectors.f32": r"segment-\w+/vectors\.f32",
    "squares.f64": r"segment-\w+/squares\.f64",
    "words.bin": r"segment-\w+/words\.bin",
    "values.arrow": r"segment-\w+/values\.arrow",
    "ivf.faiss": r"index-\w+/ivf\.faiss",
    "ivf.json": r"index-\w+/ivf\.json",
    "numbers.npy": r"index-\w+/numbers\.npy",
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A shard with everything in it that a shard can have, as a kill leaves it."""
    folder = tmp_path_factory.mktemp("damage")
    return store(folder / "live", folder / "killed")


@pytest.fixture
def seed() -> int:
    drawn = random.randrange(10**9)
    print(f"seed={drawn}")
    return drawn


def copy(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    (to / "journal.sqlite-shm").unlink(missing_ok=True)
    return to


def files_of(folder: Path, kind: str) -> list[Path]:
    found = [folder / name for name in contents(folder) if re.fullmatch(SEALED[kind], name)]
    assert found, f"the stored shard has no file of the kind {kind}"
    return found


def flip(path: Path, place: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)


def assert_refused_and_kept(folder: Path, damaged: Path) -> None:
    """Check that the shard does not open, and that this neither changes nor deletes anything."""
    before = contents(folder, OWN)
    with pytest.raises(Corruption) as refusal:
        opened_state(folder)
    assert refusal.value.path == str(damaged)
    assert str(damaged) in str(refusal.value)
    assert contents(folder, OWN) == before


def test_every_kind_of_file_is_put_to_the_test(stored: Stored) -> None:
    names = set(contents(stored.folder, OWN))
    matched = {n for n in names if any(re.fullmatch(p, n) for p in SEALED.values())}
    assert names - matched == JOURNAL
    assert opened_state(copy(stored.folder, stored.folder.with_name("whole"))) == stored.whole


@pytest.mark.parametrize("kind", SEALED)
def test_a_flipped_bit_in_a_sealed_file_is_corruption_that_names_it(
    stored: Stored, tmp_path: Path, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    shard, sibling = tmp_path / "s0", tmp_path / "s1"
    copy(stored.folder, sibling)
    copy(stored.folder, shard)
    for _ in range(FLIPS):
        damaged = rng.choice(files_of(shard, kind))
        place, mask = rng.randrange(damaged.stat().st_size), 1 << rng.randrange(8)
        print(f"{damaged.name} {place=} {mask=}")
        flip(damaged, place, mask)
        assert_refused_and_kept(shard, damaged)
        flip(damaged, place, mask)
    assert opened_state(shard) == stored.whole, "with the bits put back, all is there"
    flip(damaged, place, mask)
    assert_refused_and_kept(shard, damaged)
    assert opened_state(sibling) == stored.whole, "the shard beside it is none the worse"


@pytest.mark.parametrize("kind", SEALED)
def test_a_sealed_file_that_is_missing_or_cut_is_corruption_that_names_it(
    stored: Stored, tmp_path: Path, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    shard = copy(stored.folder, tmp_path / "s0")
    damaged = rng.choice(files_of(shard, kind))
    whole = damaged.read_bytes()
    for cut in {0, 1, len(whole) // 2, rng.randrange(len(whole)), len(whole) - 1}:
        damaged.write_bytes(whole[:cut])
        assert_refused_and_kept(shard, damaged)
    damaged.write_bytes(whole + b"\0")
    assert_refused_and_kept(shard, damaged)
    damaged.unlink()
    assert_refused_and_kept(shard, damaged)
    damaged.write_bytes(whole)
    assert opened_state(shard) == stored.whole


def test_a_missing_folder_is_corruption(stored: Stored, tmp_path: Path) -> None:
    for pattern in ("segment-*", "index-*"):
        shard = copy(stored.folder, tmp_path / "s0")
        gone = sorted(shard.glob(pattern))[0]
        shutil.rmtree(gone)
        with pytest.raises(Corruption, match=f"{gone}.* is damaged: the file is missing"):
            opened_state(shard)


def test_a_file_of_another_segment_does_not_pass_for_the_missing_one(
    stored: Stored, tmp_path: Path
) -> None:
    shard = copy(stored.folder, tmp_path / "s0")
    one, other, *_ = files_of(shard, "rows: manifest")
    one.write_bytes(other.read_bytes())
    assert_refused_and_kept(shard, one)


@pytest.mark.parametrize("name", sorted(JOURNAL))
def test_a_flipped_bit_in_the_journal_is_corruption_or_harmless(
    stored: Stored, tmp_path: Path, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    found = 0
    named: set[str] = set()
    for _ in range(FLIPS):
        shard = copy(stored.folder, tmp_path / "s0")
        place, mask = rng.randrange((shard / name).stat().st_size), 1 << rng.randrange(8)
        print(f"{place=} {mask=}")
        flip(shard / name, place, mask)
        before = contents(shard, OWN)
        try:
            assert opened_state(shard) == stored.whole
        except Corruption as error:
            found += 1
            named.add(Path(error.path).name)
            assert contents(shard, OWN) == before, "refusing it changed something"
    assert named <= JOURNAL
    if name == "journal.sqlite-wal":
        assert found == FLIPS


def test_a_journal_without_its_main_file_is_corruption(stored: Stored, tmp_path: Path) -> None:
    shard = copy(stored.folder, tmp_path / "s0")
    (shard / "journal.sqlite").unlink()
    before = contents(shard, OWN)
    with pytest.raises(Corruption, match=r"journal\.sqlite is damaged: the file is missing"):
        opened_state(shard)
    assert contents(shard, OWN) == before


def test_without_its_mark_a_sound_shard_is_served_whole(stored: Stored, tmp_path: Path) -> None:
    shard = copy(stored.folder, tmp_path / "s0")
    (shard / "journal.mark").unlink()
    assert opened_state(shard) == stored.whole


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal"])
def test_a_cut_journal_is_corruption_or_what_the_shard_was_at_some_commit(
    stored: Stored, tmp_path: Path, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    data = (stored.folder / name).read_bytes()
    late = [len(data) - FRAME_BYTES * n for n in range(1, 8)]
    served = []
    for cut in [0, 1, *(rng.randrange(len(data)) for _ in range(5)), *late, len(data) - 1]:
        print(f"{cut=} of {len(data)}")
        shard = copy(stored.folder, tmp_path / "s0")
        (shard / name).write_bytes(data[:cut])
        before = contents(shard, OWN)
        try:
            served.append(opened_state(shard).now)
        except Corruption:
            # Put back what was lost, and all is there: nothing else was touched.
            assert contents(shard, OWN) == before
            (shard / name).write_bytes(data)
            assert opened_state(shard) == stored.whole
    assert all(answers in [state.now for state in stored.states] for answers in served)
    assert served or name == "journal.sqlite", "a cleanly torn end of the log yields the prefix"


def test_a_lost_log_does_not_take_the_sealed_rows_with_it(stored: Stored, tmp_path: Path) -> None:
    """Whoever copies a shard's folder without the -wal would else lose every segment too."""
    shard = copy(stored.folder, tmp_path / "s0")
    log = shard / "journal.sqlite-wal"
    log.write_bytes(b"")
    before = contents(shard, OWN)
    for _ in range(2):
        with pytest.raises(Corruption, match=r"34 acknowledged transactions.*segment-") as refusal:
            opened_state(shard)
        assert refusal.value.path == str(log)
        assert contents(shard, OWN) == before
        log.unlink()
    log.write_bytes((stored.folder / log.name).read_bytes())
    assert opened_state(shard) == stored.whole
