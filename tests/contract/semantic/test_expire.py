"""Expire: one bounded statement over what a filter matches, the oldest first."""

from __future__ import annotations

import pytest
from tests.support.callers import FUTURE, PAST, Caller, record

FOOD, CODE = {"topic": "food"}, {"topic": "code"}
THEN = "2015-01-01T00:00:00Z"


def write_mixed(notes: Caller) -> None:
    """Write a record in every state, all but one about food."""
    notes.upsert(
        record("live", metadata=FOOD),
        record("ending", metadata=FOOD, validTo=FUTURE),
        record("not yet", metadata=FOOD, validFrom=FUTURE),
        record("ended", metadata=FOOD, validFrom=PAST, validTo=THEN),
        record("gone", metadata=FOOD, deletedAt=PAST),
        record("code", metadata=CODE),
    )


def test_invalidate_ends_what_would_be_valid_for_longer(notes: Caller) -> None:
    write_mixed(notes)
    assert notes.expire("INVALIDATE", topic="food") == 3
    assert notes.found() == ["code"]
    ends = {notes.stored(id)["validTo"] for id in ("live", "ending", "not yet")}
    assert len(ends) == 1, "all at one instant"
    assert notes.stored("ended")["validTo"] == THEN
    assert "validTo" not in notes.stored("gone")
    assert notes.found(includeInvalidated=True, filter=FOOD) == [
        *("ended", "ending", "gone", "live", "not yet")
    ]
    assert notes.expire("INVALIDATE", topic="food") == 0


def test_soft_delete_tombstones_what_has_no_tombstone(notes: Caller) -> None:
    write_mixed(notes)
    assert notes.expire("SOFT_DELETE", topic="food") == 4
    assert notes.found() == ["code"]
    assert notes.stored("gone")["deletedAt"] == PAST
    assert "validTo" not in notes.stored("live")
    assert notes.expire("SOFT_DELETE", topic="food") == 0
    notes.upsert(record("live", metadata=FOOD))
    assert notes.found() == ["code", "live"]


def test_hard_delete_removes_every_match(notes: Caller) -> None:
    write_mixed(notes)
    assert notes.expire("HARD_DELETE", topic="food") == 5
    assert notes.found(includeInvalidated=True) == ["code"]
    assert notes.expire("HARD_DELETE", topic="food") == 0
    assert notes.upsert(record("live")) == [1]


def test_an_empty_filter_matches_all_and_an_unknown_value_nothing(notes: Caller) -> None:
    write_mixed(notes)
    assert notes.expire("SOFT_DELETE", topic="travel") == 0
    assert notes.expire("SOFT_DELETE", unheard="food") == 0
    assert notes.expire("SOFT_DELETE", topic="food", lang="en") == 0
    assert notes.expire("HARD_DELETE") == 6


@pytest.mark.parametrize("action", ["INVALIDATE", "SOFT_DELETE", "HARD_DELETE"])
def test_max_rows_takes_the_oldest_created_and_ties_by_id(notes: Caller, action: str) -> None:
    ages = {"d": 2013, "b": 2012, "c": 2012, "a": 2012, "e": 2011, "f": 2014}
    for id, year in ages.items():
        notes.upsert(record(id, metadata=FOOD, createdAt=f"{year}-01-01T00:00:00Z"))
    notes.upsert(record("other", metadata=CODE, createdAt=PAST), record("e", metadata=FOOD))
    assert notes.expire(action, 1, topic="food") == 1
    assert notes.found(filter=FOOD) == ["a", "b", "c", "d", "f"]
    assert notes.expire(action, 2, topic="food") == 2
    assert notes.found(filter=FOOD) == ["c", "d", "f"]
    assert notes.expire(action, 100, topic="food") == 3
    assert notes.found() == ["other"]


def test_what_names_no_action_or_no_bound_is_refused(notes: Caller) -> None:
    write_mixed(notes)
    for action in ({}, {"action": 0}, {"action": "EXPIRE_ACTION_UNSPECIFIED"}, {"action": 4}):
        assert "action: is" in notes.refused("Expire", filter=FOOD, maxRows=1, **action)
    for bound in ({}, {"maxRows": 0}):
        words = notes.refused("Expire", filter=FOOD, action="EXPIRE_ACTION_INVALIDATE", **bound)
        assert "max_rows: is 0" in words
    assert notes.found() == ["code", "ending", "live"]
