"""Two axes of time: a thousand random points of a random history read as brute force reads them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mindgrid.shards.clock import Instant
from mindgrid.shards.groups import Workers
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.shard import LanceShard
from mindgrid.shards.types import (
    Command,
    Delete,
    Draft,
    Expire,
    ExpireAction,
    Mode,
    Query,
    Scan,
    Selection,
    Stamp,
    Upsert,
    Want,
)
from tests.simulation.test_shard_history import CONFIG, outcome, page_view, view
from tests.support.clocks import TurnedClock
from tests.support.histories import DIMENSIONS, TEXTS

POINTS = 1_000
ALL = Want.VALUES | Want.PAYLOAD | Want.VECTOR


def command(rng: random.Random, now: int) -> Command:
    ids = [f"r{n}" for n in range(40)]
    match rng.randrange(10):
        case 0:
            return Delete("", rng.choice(ids), hard=rng.random() < 0.3)
        case 1:
            action = rng.choice([ExpireAction.INVALIDATE, ExpireAction.SOFT_DELETE])
            return Expire("", {"k": rng.choice("ab")}, action, 3)
    ends = [None, None, Instant(now + rng.randrange(-50_000, 200_000))]
    drafts = [
        Draft(
            rng.choice(ids),
            rng.choice(TEXTS),
            np.array([rng.choice((-1, 1, 2)) for _ in range(DIMENSIONS)], np.float32),
            payload=rng.randbytes(4),
            metadata={"k": rng.choice("ab")},
            valid_from=rng.choice([None, None, Instant(now + rng.randrange(-90_000, 90_000))]),
            valid_to=rng.choice(ends),
            supersedes=tuple(rng.sample(ids, rng.randrange(3))),
        )
        for _ in range(rng.randrange(1, 5))
    ]
    return Upsert("", tuple(drafts))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_known_at_and_as_of_at_random_points_equal_brute_force(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    clock = TurnedClock()
    start = clock.now()
    oracle = MemoryShard(CONFIG, clock)
    with ThreadPoolExecutor(1) as commits, ThreadPoolExecutor(1) as maintenance:
        workers = Workers(commits, maintenance)
        shard = LanceShard.open(tmp_path / "shard", CONFIG, 1, clock, workers)
        for step in range(250):
            clock.turn(rng.randrange(1_000, 9_000))
            written = command(rng, clock.now())
            assert outcome(shard, written) == outcome(oracle, written)
            if step % 20 == 19:
                shard.maintain()
            if step % 90 == 89:
                shard.compact()
                shard.close()
                shard = LanceShard.open(tmp_path / "shard", CONFIG, 1 + step, clock, workers)
        clock.turn(10_000)
        seen = set()
        for _ in range(POINTS):
            known_at = Instant(rng.randrange(start, clock.now()))
            as_of = Instant(rng.randrange(start - 100_000, clock.now() + 200_000))
            selection = Selection(known_at=known_at, as_of=as_of)
            stamp = Stamp(clock.now())
            page = Scan(selection, limit=100, want=ALL)
            found = page_view(shard.scan(page, stamp))
            assert found == page_view(oracle.scan(page, stamp)), f"seed {seed}: {selection}"
            vector = np.array([rng.choice((-1, 1)) for _ in range(DIMENSIONS)], np.float32)
            queries = [
                Query(vector, 7, selection, ALL, exact=True),
                Query(top_k=7, selection=selection, text="an apple pie", mode=Mode.SPARSE),
            ]
            answers = zip(shard.search(queries, stamp), oracle.search(queries, stamp), strict=True)
            for answer, expected in answers:
                assert not isinstance(answer, Exception)
                assert not isinstance(expected, Exception)
                assert view(answer) == view(expected), f"seed {seed}: {selection}"
            seen.add(repr(found))
        assert len(seen) > POINTS / 4, "the points must differ, or they prove little"
        shard.close()
