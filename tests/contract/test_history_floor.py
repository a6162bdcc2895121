"""`known_at` reaches back as far as the history does, and says how far that is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.support.clocks import TurnedClock
from tests.support.shards import DIMENSIONS, SMALL, do, open_here

from mindgrid.shards.clock import Instant, spelled
from mindgrid.shards.config import History
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import InvalidRequest
from mindgrid.shards.types import Draft, Selection, Stamp, Upsert, Want

DAY = 86_400_000_000


def draft(content: str) -> Draft:
    return Draft("a", content, np.ones(DIMENSIONS, np.float32))


def test_an_instant_before_the_floor_is_refused_and_the_floor_named(tmp_path: Path) -> None:
    clock = TurnedClock()
    config = dataclasses.replace(SMALL, seal_rows=1, history=History(age_s=86_400.0))
    shard = open_here(tmp_path / "s0", config=config, clock=clock)
    written: list[Instant] = []
    for content in ("first", "second", "third"):
        do(shard, Upsert("", (draft(content),)))
        written.append(clock.now())
        clock.turn(DAY)

    def known(at: Instant) -> str | InvalidRequest:
        found = shard.get(["a"], Selection(known_at=at), Want.VALUES, Stamp(clock.now()))
        if isinstance(found, InvalidRequest):
            return found
        assert isinstance(found, Found)
        assert found.records[0] is not None
        return found.records[0].content

    clock.turn(DAY // 2)
    shard.compact()
    floor = Instant(clock.now() - DAY)
    refused = known(written[0])
    assert isinstance(refused, InvalidRequest)
    assert refused.field == "known_at"
    assert f"lies before {spelled(floor)}" in refused.problem
    assert known(floor) == "third"
    shard.close()


@pytest.mark.parametrize("history", [History(age_s=None), History(age_s=30 * 86_400.0)])
def test_nothing_younger_than_the_history_is_forgotten(tmp_path: Path, history: History) -> None:
    clock = TurnedClock()
    config = dataclasses.replace(SMALL, seal_rows=1, history=history)
    shard = open_here(tmp_path / "s0", config=config, clock=clock)
    written: dict[str, Instant] = {}
    for content in ("first", "second", "third"):
        do(shard, Upsert("", (draft(content),)))
        written[content] = clock.now()
        clock.turn(DAY)
    shard.compact()
    for content, at in written.items():
        found = shard.get(["a"], Selection(known_at=at), Want.VALUES, Stamp(clock.now()))
        assert isinstance(found, Found)
        assert found.records[0] is not None
        assert found.records[0].content == content
    shard.close()
