"""Expire: which records it takes, in which order, and what it leaves; on every driver."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.clocks import START, TurnedClock
from tests.support.shards import DIMENSIONS, SMALL, open_here

from mindgrid.shards.clock import Instant
from mindgrid.shards.driver import Found, SemanticShard
from mindgrid.shards.errors import InvalidRequest
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.types import (
    Delete,
    Draft,
    Expire,
    ExpireAction,
    Expired,
    Record,
    Selection,
    Stamp,
    Upsert,
    Want,
)


class Store:
    """A shard of one driver under a clock that stands still."""

    def __init__(self, shard: SemanticShard, clock: TurnedClock) -> None:
        self.shard, self.clock = shard, clock

    def upsert(self, *drafts: Draft) -> None:
        self.shard.submit(Upsert("", drafts)).result()
        self.clock.turn(1_000)

    def expire(self, action: ExpireAction, max_rows: int = 100, **equals: str) -> int:
        result = self.shard.submit(Expire("", equals, action, max_rows)).result()
        assert isinstance(result, Expired)
        return result.affected

    def record(self, id: str, **selection: object) -> Record | None:
        selected = replace(Selection(include_invalidated=True), **selection)
        found = self.shard.get([id], selected, Want.VALUES, Stamp(self.clock.now()))
        assert isinstance(found, Found)
        return found.records[0]

    def live(self, *ids: str) -> list[str]:
        found = self.shard.get(ids, Selection(), Want.ID, Stamp(self.clock.now()))
        assert isinstance(found, Found)
        return [record.id for record in found.records if record is not None]


@pytest.fixture(params=["memory", "lance", "lance sealed"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    clock = TurnedClock()
    if request.param == "memory":
        yield Store(MemoryShard(SMALL, clock), clock)
        return
    config = dataclasses.replace(SMALL, seal_rows=1) if "sealed" in request.param else SMALL
    with tempfile.TemporaryDirectory() as folder:
        shard = open_here(Path(folder) / "s0", config=config, clock=clock)
        yield Store(shard, clock)
        shard.close()


def draft(id: str, **more: object) -> Draft:
    vector = np.ones(DIMENSIONS, np.float32)
    return replace(Draft(id, f"content of {id}", vector, metadata={"topic": "food"}), **more)


def test_invalidate_ends_what_would_be_valid_for_longer(store: Store) -> None:
    past, future = Instant(START - 1_000), Instant(START + 10**8)
    store.upsert(
        draft("open"),
        draft("ending", valid_to=future),
        draft("ended", valid_to=past),
        draft("not yet", valid_from=future),
        draft("gone", deleted_at=past),
        draft("other", metadata={"topic": "travel"}),
        draft("none", metadata={}),
    )
    now = store.clock.now()
    assert store.expire(ExpireAction.INVALIDATE, topic="food") == 3
    ends = {
        id: record.valid_to
        for id in ("open", "ending", "ended", "not yet", "gone")
        if (record := store.record(id))
    }
    assert ends == {"open": now, "ending": now, "ended": past, "not yet": now, "gone": None}
    assert store.live("open", "ending", "other", "none") == ["other", "none"]
    assert store.expire(ExpireAction.INVALIDATE, topic="food") == 0, "there is nothing left to end"
    before = store.record("open", known_at=Instant(now - 1))
    assert before is not None
    assert before.valid_to is None


def test_soft_delete_tombstones_what_has_no_tombstone(store: Store) -> None:
    past = Instant(START - 1_000)
    store.upsert(draft("a"), draft("ended", valid_to=past), draft("gone", deleted_at=past))
    now = store.clock.now()
    assert store.expire(ExpireAction.SOFT_DELETE, topic="food") == 2
    for id, at in (("a", now), ("ended", now), ("gone", past)):
        record = store.record(id)
        assert record is not None
        assert record.deleted_at == at
        assert record.version == 1
    store.upsert(draft("a"))
    assert store.live("a", "ended", "gone") == ["a"]


def test_hard_delete_removes_tombstones_too_and_at_every_instant(store: Store) -> None:
    store.upsert(draft("a"), draft("b"))
    store.upsert(draft("a"))
    store.shard.submit(Delete("", "b")).result()
    store.clock.turn(1_000)
    earlier = Instant(store.clock.now() - 1)
    assert store.expire(ExpireAction.HARD_DELETE) == 2
    for id in ("a", "b"):
        assert store.record(id) is None
        assert store.record(id, known_at=earlier) is None
    store.upsert(draft("a"))
    record = store.record("a")
    assert record is not None
    assert record.version == 1, "the counter went with the record"


@pytest.mark.parametrize("action", ExpireAction)
def test_the_oldest_created_go_first_and_ties_by_id(store: Store, action: ExpireAction) -> None:
    for id, created in (("d", 3), ("b", 2), ("c", 2), ("a", 2), ("e", 1)):
        store.upsert(draft(id, created_at=Instant(START - 1_000 + created)))
    store.upsert(draft("e"))  # written anew, and as old as before
    for left in (["a", "b", "c", "d"], ["b", "c", "d"], ["c", "d"]):
        assert store.expire(action, 1, topic="food") == 1
        assert store.live("a", "b", "c", "d", "e") == left
    assert store.expire(action, 5, topic="food") == 2


def test_an_empty_filter_matches_all_and_an_unknown_value_nothing(store: Store) -> None:
    store.upsert(draft("a"), draft("b", metadata={}))
    assert store.expire(ExpireAction.SOFT_DELETE, topic="unheard") == 0
    assert store.expire(ExpireAction.SOFT_DELETE, unheard="food") == 0
    assert store.expire(ExpireAction.SOFT_DELETE) == 2


def test_a_filter_looks_at_the_newest_version_only(store: Store) -> None:
    store.upsert(draft("a"))
    store.upsert(draft("a", metadata={"topic": "travel"}))
    assert store.expire(ExpireAction.HARD_DELETE, topic="food") == 0
    assert store.expire(ExpireAction.HARD_DELETE, topic="travel") == 1


def test_a_repeat_returns_the_first_result_and_touches_nothing_more(store: Store) -> None:
    store.upsert(draft("a"))
    command = Expire("t", {"topic": "food"}, ExpireAction.SOFT_DELETE, 10)
    first = store.shard.submit(command).result()
    store.upsert(draft("b"))
    assert store.shard.submit(command).result() == first
    assert store.live("b") == ["b"]
    with pytest.raises(InvalidRequest, match="another request"):
        store.shard.submit(Delete("t", "b")).result()


def test_the_result_is_known_after_a_restart() -> None:
    clock = TurnedClock()
    command = Expire("t", {}, ExpireAction.SOFT_DELETE, 10)
    with tempfile.TemporaryDirectory() as folder:
        shard = open_here(Path(folder) / "s0", clock=clock)
        shard.submit(Upsert("", (draft("a"), draft("b")))).result()
        first = shard.submit(command).result()
        shard.close()
        shard = open_here(Path(folder) / "s0", 2, clock=clock)
        assert shard.submit(command).result() == first
        assert Store(shard, clock).live("a", "b") == []
        shard.close()
