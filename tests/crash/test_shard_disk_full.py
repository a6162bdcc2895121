"""A disk that fills up under a shard: a clear error, and nothing is lost or there twice."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.disks import fill, free_bytes, small_disk
from tests.support.shards import SMALL, do, open_here

from mindgrid.shards.clock import SystemClock
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import Unavailable
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import (
    Answer,
    Draft,
    Query,
    Selection,
    Space,
    Stamp,
    Upsert,
    Vector,
    Want,
)

DISK_BYTES = 64 << 20
BATCH = 64
NEVER_SEALED = dataclasses.replace(
    SMALL, space=Space("fake", "fake", "", 64), seal_rows=10**6, index_rows_min=10**6
)
SEALED = dataclasses.replace(NEVER_SEALED, seal_rows=4 * BATCH, merge_fanout=64)
MERGED = dataclasses.replace(SEALED, merge_fanout=2)
INDEXED = dataclasses.replace(SEALED, index_rows_min=256)
ADVICE = "the disk is full; free space on it"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


def vector(number: int) -> Vector:
    return np.random.default_rng(number).normal(size=64).astype(np.float32)


def write(shard: LanceShard, number: int) -> None:
    """Write batch `number`, 64 records of 4 KB each."""
    rng = np.random.default_rng(number)
    drafts = tuple(
        Draft(f"r{n:06}", f"content {n}", vector(n), payload=rng.bytes(4096))
        for n in range(number * BATCH, (number + 1) * BATCH)
    )
    do(shard, Upsert(f"tx{number}", drafts))


def write_until_refused(shard: LanceShard) -> tuple[int, str]:
    """Write on; return how many batches were acknowledged, and the error's words."""
    batches = 0
    while True:
        try:
            write(shard, batches)
        except Unavailable as error:
            return batches, str(error)
        batches += 1


def assert_reads(shard: LanceShard, batches: int) -> None:
    """Check that each acknowledged record is there once, and the nearest to its own vector."""
    now = Stamp(SystemClock().now())
    ids = [f"r{n:06}" for n in range(batches * BATCH)]
    found = shard.get(ids, Selection(), Want.VALUES, now)
    assert isinstance(found, Found), found
    assert [record and record.version for record in found.records] == [1] * len(ids)
    for exact in (False, True):
        for n in (0, len(ids) // 2, len(ids) - 1):
            (answer,) = shard.search([Query(vector(n), 3, want=Want.PAYLOAD, exact=exact)], now)
            assert isinstance(answer, Answer), answer
            assert answer.hits[0].id == ids[n]
            assert len({hit.id for hit in answer.hits}) == 3


def assert_whole_after_reopening(folder: Path, batches: int) -> None:
    """Check what was acknowledged; then that the shard writes, seals, merges and indexes again."""
    config = dataclasses.replace(MERGED, index_rows_min=256)
    shard = open_here(folder, 9, config)
    assert_reads(shard, batches)
    assert shard.status().rows == batches * BATCH, "nothing of a refused batch is there"
    write(shard, batches)
    shard.maintain()
    shard.compact()
    assert_reads(shard, batches + 1)
    shard.close()


def test_upserts_on_a_full_disk_are_unavailable_and_none_that_was_acknowledged_is_lost(
    disk: Path,
) -> None:
    folder = disk / "s0"
    shard = open_here(folder, 1, NEVER_SEALED)
    ballast = fill(disk, 24 << 20)
    batches, words = write_until_refused(shard)
    assert batches > 10
    assert ADVICE in words
    for _ in range(3):
        assert_reads(shard, batches)
        assert shard.status().rows == batches * BATCH
        with pytest.raises(Unavailable, match=ADVICE):
            write(shard, batches)
    ballast.write_bytes(bytes(ballast.stat().st_size - (1 << 20)))
    write(shard, batches)
    batches += 1
    assert_reads(shard, batches)
    fill(disk / "s0")
    shard.close()
    for _ in range(2):
        with pytest.raises(Unavailable, match=ADVICE):
            open_here(folder, 2, NEVER_SEALED)
    ballast.unlink()
    (folder / ballast.name).unlink()
    assert_whole_after_reopening(folder, batches)


def prepare(disk: Path, batches: int) -> tuple[Path, LanceShard]:
    folder = disk / "s0"
    shard = open_here(folder, 1, NEVER_SEALED)
    for number in range(batches):
        write(shard, number)
    return folder, shard


@pytest.mark.parametrize("left", [0, 16 << 10, 200 << 10, 1 << 20])
def test_a_seal_that_does_not_fit_is_put_off_and_reads_go_on(
    disk: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder, shard = prepare(disk, 8)
    shard.close()
    shard = open_here(folder, 2, SEALED)
    ballast = fill(disk, left)
    for _ in range(3):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            shard.maintain()
        assert ADVICE in caplog.text
        assert_reads(shard, 8)
        assert free_bytes(disk) >= left // 2, "what was half-written takes the room that is left"
    ballast.unlink()
    shard.close()
    assert_whole_after_reopening(folder, 8)


@pytest.mark.parametrize("left", [0, 16 << 10, 200 << 10, 1 << 20])
def test_a_merge_that_does_not_fit_is_put_off_and_reads_go_on(
    disk: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = disk / "s0"
    shard = open_here(folder, 1, SEALED)
    for number in range(12):
        write(shard, number)
    assert shard.status().segments == 3
    shard.close()
    shard = open_here(folder, 2, MERGED)
    ballast = fill(disk, left)
    for _ in range(3):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            shard.maintain()
        assert ADVICE in caplog.text
        assert_reads(shard, 12)
        assert free_bytes(disk) >= left // 2
    ballast.unlink()
    shard.close()
    assert_whole_after_reopening(folder, 12)


@pytest.mark.parametrize("left", [0, 4 << 10, 16 << 10])
def test_an_index_that_does_not_fit_is_put_off_and_reads_go_on(
    disk: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = disk / "s0"
    shard = open_here(folder, 1, SEALED)
    for number in range(12):
        write(shard, number)
    shard.close()
    shard = open_here(folder, 2, INDEXED)
    ballast = fill(disk, left)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            shard.maintain()
        assert ADVICE in caplog.text
        assert shard.status().indexed_rows == 0
        assert_reads(shard, 12)
    ballast.unlink()
    shard.close()
    shard = open_here(folder, 3, INDEXED)
    shard.maintain()
    assert shard.status().indexed_rows == 12 * BATCH
    assert_reads(shard, 12)
    shard.close()
    assert_whole_after_reopening(folder, 12)


def test_a_compaction_that_does_not_fit_says_so_and_may_be_tried_again(disk: Path) -> None:
    folder, shard = prepare(disk, 8)
    ballast = fill(disk, 100 << 10)
    for _ in range(2):
        with pytest.raises(Unavailable, match=ADVICE):
            shard.compact()
        assert_reads(shard, 8)
    ballast.unlink()
    shard.compact()
    assert_reads(shard, 8)
    write(shard, 8)
    shard.close()
    assert_whole_after_reopening(folder, 9)


def test_a_new_shard_on_a_full_disk_says_so(disk: Path) -> None:
    ballast = fill(disk)
    with pytest.raises(Unavailable, match=ADVICE):
        open_here(disk / "s0", 1, SEALED)
    ballast.unlink()
    shard = open_here(disk / "s0", 1, SEALED)
    write(shard, 0)
    assert_reads(shard, 1)
    shard.close()
