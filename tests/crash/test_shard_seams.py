"""Where commits, seals, merges and purges meet, nothing is lost and no shard is stuck."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.support.clocks import TurnedClock
from tests.support.shards import Here

from mindgrid.shards import faults
from mindgrid.shards.config import History, ShardConfig
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import MindgridError, Unavailable
from mindgrid.shards.groups import Workers
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import Delete, Draft, Query, Selection, Space, Stamp, Upsert, Want

HOUR = 3_600_000_000
CONFIG = ShardConfig(
    space=Space("fake", "fake", "", 4),
    history=History(age_s=0.0),
    seal_rows=24,
    seal_after_s=3600.0,
    exact_rows_max=16,
    index_rows_min=48,
    merge_fanout=3,
    skew_max_s=0.0,
)


@pytest.fixture
def workers() -> Workers:
    """Every step in the test's own thread."""
    return Workers(Here(), Here())


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    yield
    faults.set_hook(None)


def open_shard(folder: Path, workers: Workers, clock: TurnedClock, epoch: int = 1) -> LanceShard:
    return LanceShard.open(folder, CONFIG, epoch, clock, workers)


def draft(id: str, seed: int = 0, supersedes: tuple[str, ...] = ()) -> Draft:
    vector = np.random.default_rng(seed).normal(size=4).astype(np.float32)
    return Draft(id, f"text of {id}", vector, supersedes=supersedes)


def write(shard: LanceShard, *drafts: Draft) -> None:
    shard.submit(Upsert("", drafts)).result(10)


def versions(shard: LanceShard, clock: TurnedClock, *ids: str) -> list[int]:
    selection = Selection(include_invalidated=True)
    found = shard.get(ids, selection, Want.VALUES, Stamp(clock.now()))
    assert isinstance(found, Found)
    return [record.version if record else 0 for record in found.records]


def killed(folder: Path) -> Path:
    """Return a copy of the folder as a kill at this moment would leave it."""
    copy = folder.with_name(f"{folder.name}-killed")
    shutil.copytree(folder, copy)
    return copy


def test_a_merge_keeps_a_row_that_the_journal_still_changes(
    tmp_path: Path, workers: Workers
) -> None:
    clock = TurnedClock()
    shard = open_shard(tmp_path / "s", workers, clock)
    for number in range(3):
        write(shard, *(draft(f"r{number}-{j}") for j in range(24)), draft("a", number))
        shard.maintain()
    clock.turn(1)
    write(shard, draft("c", supersedes=("a",)))
    write(shard, draft("a"))
    clock.turn(HOUR)
    shard._maintenance.merge(dead_share=0)
    again = open_shard(killed(tmp_path / "s"), workers, clock, 2)
    assert versions(again, clock, "a", "c", "r0-0") == [4, 1, 1]
    again.close()
    shard.close()


def test_a_shard_whose_every_record_was_purged_opens_again(
    tmp_path: Path, workers: Workers
) -> None:
    clock = TurnedClock()
    shard = open_shard(tmp_path / "s", workers, clock)
    ids = [f"r{number}" for number in range(60)]
    write(shard, *(draft(id, seed) for seed, id in enumerate(ids)))
    shard.maintain()
    assert shard.status().indexed_rows == 60
    for id in ids:
        shard.submit(Delete("", id, hard=True)).result(10)
    shard.compact()
    for opened in (shard, open_shard(killed(tmp_path / "s"), workers, clock, 2)):
        assert versions(opened, clock, *ids) == [0] * 60
        assert opened.search([Query(np.ones(4, np.float32))], Stamp(clock.now()))[0].hits == ()  # type: ignore[union-attr]
        write(opened, draft("new"))
        assert versions(opened, clock, "new") == [1]
        opened.close()


def test_a_caller_that_gives_up_cancels_nothing_and_wedges_nothing(tmp_path: Path) -> None:
    clock = TurnedClock()
    pool = ThreadPoolExecutor(1)
    shard = open_shard(tmp_path / "s", Workers(pool, pool), clock)
    writes = [shard.submit(Upsert("", (draft("a", seed),))) for seed in range(20)]
    assert not any(one.cancel() for one in writes)
    assert [one.result(10).committed_at > 0 for one in writes] == [True] * 20
    assert versions(shard, clock, "a") == [20]
    shard.close()
    pool.shutdown()


def test_after_a_failed_switch_the_shard_gives_up_and_writes_no_further_segment(
    tmp_path: Path, workers: Workers
) -> None:
    clock = TurnedClock()
    shard = open_shard(tmp_path / "s", workers, clock)
    write(shard, *(draft(f"r{j}") for j in range(20)))

    def full(name: str) -> None:
        if name == "journal.manifest.before_commit":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    faults.set_hook(full)
    shard._config = dataclasses.replace(CONFIG, seal_rows=8)
    for _ in range(3):
        shard.maintain()
    faults.set_hook(None)
    assert len([p for p in (tmp_path / "s").iterdir() if p.is_dir()]) == 1
    answer = shard.search([Query(np.ones(4, np.float32))], Stamp(clock.now()))[0]
    assert isinstance(answer, Unavailable)
    shard.close()
    again = open_shard(tmp_path / "s", workers, clock, 2)
    assert versions(again, clock, *(f"r{j}" for j in range(20))) == [1] * 20
    again.close()


def test_a_segment_that_cannot_be_written_costs_no_answer(tmp_path: Path, workers: Workers) -> None:
    clock = TurnedClock()
    shard = open_shard(tmp_path / "s", workers, clock)
    write(shard, *(draft(f"r{j}") for j in range(20)))
    shard._config = dataclasses.replace(CONFIG, seal_rows=8)
    (tmp_path / "s").chmod(0o755)

    def full(name: str) -> None:
        if name == "seal.written":
            raise Unavailable("storage", "the disk is full")

    faults.set_hook(full)
    shard.maintain()
    faults.set_hook(None)
    answer = shard.search([Query(np.ones(4, np.float32))], Stamp(clock.now()))[0]
    assert not isinstance(answer, MindgridError)
    write(shard, draft("later"))
    assert versions(shard, clock, "r0", "later") == [1, 1]
    shard.close()


def test_a_tail_to_which_nothing_is_added_any_more_is_sealed_soon(
    tmp_path: Path, workers: Workers
) -> None:
    config = dataclasses.replace(CONFIG, seal_after_s=1.2)
    with closing(LanceShard.open(tmp_path, config, 1, TurnedClock(), workers)) as shard:
        write(shard, *[draft(f"r{n}") for n in range(3)])
        shard.tend()
        assert shard.status().tail_rows == 3
        time.sleep(0.15)
        shard.tend()
        assert shard.status().tail_rows == 0
        write(shard, draft("alone"))
        time.sleep(0.15)
        shard.tend()
        assert shard.status().tail_rows == 1, "too few to be worth a segment"
