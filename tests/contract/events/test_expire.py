"""Expire: what its bounds take, what each action does, what is counted, and what is refused."""

from __future__ import annotations

import pytest
from tests.support.callers import FUTURE, PAST, instant
from tests.support.log_callers import Desk, Json, LogCaller

BOUNDED: Json = {"beforeCursor": "5", "maxRows": 10}
SOFT: Json = {"action": "EXPIRE_ACTION_SOFT_DELETE"}


def test_a_soft_delete_tombstones_and_retains(log: LogCaller) -> None:
    events = [log.append(f"payload {n}") for n in range(6)]
    assert log.expire("SOFT_DELETE", beforeCursor=4) == 3
    assert log.cursors() == [4, 5, 6]
    kept = log.range(includeDeleted=True)
    tombstones = {event.pop("deletedAt") for event in kept[:3]}
    assert len(tombstones) == 1, "all at one instant"
    assert instant(tombstones.pop()) >= instant(events[-1]["timestamp"])
    assert kept == events


def test_a_hard_delete_removes(log: LogCaller) -> None:
    log.fill(6)
    assert log.expire("HARD_DELETE", beforeCursor=4) == 3
    assert log.cursors(includeDeleted=True) == [4, 5, 6]


def test_a_hard_delete_removes_tombstones_too(log: LogCaller) -> None:
    first = log.append()
    log.fill(5)
    log.append(supersedes=[first["id"]])
    assert log.expire("SOFT_DELETE", 2, beforeCursor=5) == 2
    assert log.expire("HARD_DELETE", beforeCursor=5) == 4
    assert log.cursors(includeDeleted=True) == [5, 6, 7]


def test_the_oldest_go_first_up_to_max_rows(log: LogCaller) -> None:
    log.fill(20)
    assert log.expire("SOFT_DELETE", 3, beforeCursor=15) == 3
    assert log.cursors() == list(range(4, 21))
    assert log.expire("HARD_DELETE", 5, beforeCursor=15) == 5
    assert log.cursors(includeDeleted=True) == list(range(6, 21))
    assert log.expire("SOFT_DELETE", 100, beforeCursor=15) == 9
    assert log.cursors() == [15, 16, 17, 18, 19, 20]


def test_only_changes_are_counted(log: LogCaller) -> None:
    events = [log.append() for _ in range(6)]
    log.append(supersedes=[events[0]["id"], events[3]["id"]])
    first_tombstones = [event.get("deletedAt") for event in log.range(includeDeleted=True)]
    # What is tombstoned takes no place of max_rows.
    assert log.expire("SOFT_DELETE", 2, beforeCursor=6) == 2
    assert log.cursors() == [5, 6, 7]
    assert log.expire("SOFT_DELETE", 2, beforeCursor=6) == 1
    assert log.expire("SOFT_DELETE", 2, beforeCursor=6) == 0
    tombstones = [event.get("deletedAt") for event in log.range(includeDeleted=True)]
    assert [tombstones[n] for n in (0, 3)] == [first_tombstones[n] for n in (0, 3)]
    assert log.expire("HARD_DELETE", 100, beforeCursor=6) == 5
    assert log.expire("HARD_DELETE", 100, beforeCursor=6) == 0


def test_before_time_is_exclusive(log: LogCaller) -> None:
    events = [log.append() for _ in range(10)]
    before = events[5]["timestamp"]
    older = sum(instant(event["timestamp"]) < instant(before) for event in events)
    assert log.expire("SOFT_DELETE", beforeTime=PAST) == 0
    assert log.expire("SOFT_DELETE", beforeTime=before) == older
    assert log.cursors() == list(range(older + 1, 11))
    assert log.expire("HARD_DELETE", beforeTime=FUTURE) == 10
    assert log.cursors(includeDeleted=True) == []


def test_both_bounds_hold_where_both_are_given(log: LogCaller) -> None:
    events = [log.append() for _ in range(10)]
    assert log.expire("HARD_DELETE", beforeCursor=4, beforeTime=FUTURE) == 3
    assert log.expire("HARD_DELETE", beforeCursor=9, beforeTime=PAST) == 0
    assert log.expire("HARD_DELETE", beforeCursor=100, beforeTime=events[4]["timestamp"]) == 1
    assert log.cursors() == [5, 6, 7, 8, 9, 10]


def test_an_expiry_reaches_as_far_as_max_rows_whatever_lies_where(log: LogCaller) -> None:
    log.fill(2_500)
    assert log.expire("SOFT_DELETE", 1_200, beforeCursor=2_001) == 1_200
    assert log.expire("HARD_DELETE", 1_500, beforeCursor=2_001) == 1_500
    assert log.cursors(includeDeleted=True) == list(range(1_501, 2_501))
    assert log.expire("HARD_DELETE", 100_000, beforeCursor=2_001) == 500
    assert log.cursors() == list(range(2_001, 2_501))


def test_cursors_go_on_after_everything_was_removed(log: LogCaller) -> None:
    log.fill(200)
    assert log.expire("HARD_DELETE", 1_000, beforeCursor=str(2**64 - 1)) == 200
    assert log.cursors(includeDeleted=True) == []
    assert log.append()["cursor"] == "201"
    assert log.expire("HARD_DELETE", beforeTime=FUTURE) == 1
    log.fill(2)
    assert log.cursors() == [202, 203]


def test_a_log_of_which_nothing_is_old_enough_stays(log: LogCaller) -> None:
    assert log.expire("HARD_DELETE", beforeCursor=5) == 0
    log.fill(3)
    assert log.expire("HARD_DELETE", beforeCursor=1) == 0
    assert log.cursors() == [1, 2, 3]


def test_an_expiry_is_of_one_namespace(desk: Desk, log: LogCaller) -> None:
    other = desk.log()
    log.fill(5)
    other.fill(5)
    assert log.expire("HARD_DELETE", beforeTime=FUTURE) == 5
    assert other.cursors() == [1, 2, 3, 4, 5]


def test_a_repeated_expiry_is_answered_and_not_done_again(log: LogCaller) -> None:
    log.fill(10)
    assert log.expire("HARD_DELETE", 2, beforeCursor=9, transactionId="t") == 2
    assert log.expire("HARD_DELETE", 2, beforeCursor=9, transactionId="t") == 2
    assert log.cursors() == list(range(3, 11))
    # Without an id each is one of its own.
    assert [log.expire("HARD_DELETE", 2, beforeCursor=9) for _ in range(2)] == [2, 2]
    assert log.cursors() == [7, 8, 9, 10]


def test_actions_go_by_the_numbers_of_this_block(log: LogCaller) -> None:
    log.fill(4)
    assert log.call("Expire", action=1, beforeCursor=3, maxRows=10) == {"affected": "2"}
    assert log.cursors(includeDeleted=True) == [1, 2, 3, 4]
    assert log.call("Expire", action=2, before_cursor=3, max_rows=10) == {"affected": "2"}
    assert log.cursors(includeDeleted=True) == [3, 4]


@pytest.mark.parametrize(
    "action", [None, 0, "EXPIRE_ACTION_UNSPECIFIED", 3, -1, "EXPIRE_ACTION_INVALIDATE", "soft"]
)
def test_what_names_no_action_of_this_block_is_refused(log: LogCaller, action: object) -> None:
    log.fill(3)
    named: Json = {} if action is None else {"action": action}
    assert log.refused("Expire", **BOUNDED, **named).startswith("action: ")
    assert log.cursors() == [1, 2, 3]


@pytest.mark.parametrize(
    ("bounds", "field"),
    [
        ({"maxRows": 10}, "before_cursor"),
        ({"maxRows": 10, "beforeCursor": 0}, "before_cursor"),
        ({"beforeCursor": 5}, "max_rows"),
        ({"beforeCursor": 5, "maxRows": 0}, "max_rows"),
        ({"beforeTime": FUTURE}, "max_rows"),
        ({"beforeCursor": 5, "maxRows": -1}, "max_rows"),
        ({"beforeCursor": "-5", "maxRows": 1}, "before_cursor"),
        ({"beforeTime": "0000-01-01T00:00:00Z", "maxRows": 1}, "before_time"),
    ],
)
def test_what_names_no_bound_or_no_max_rows_is_refused(
    log: LogCaller, bounds: Json, field: str
) -> None:
    log.fill(3)
    assert log.refused("Expire", **SOFT, **bounds).startswith(f"{field}: ")
    assert log.cursors() == [1, 2, 3]


def test_where_a_log_begins_and_ends_can_be_asked(log: LogCaller) -> None:
    assert log.extent() == (1, 0)
    log.fill(300)
    assert log.extent() == (1, 300)
    log.expire("SOFT_DELETE", beforeCursor=50)
    assert log.extent() == (1, 300)
    log.expire("HARD_DELETE", 10, beforeCursor=50)
    assert log.extent() == (11, 300)
    log.expire("HARD_DELETE", 1_000, beforeTime=FUTURE)
    assert log.extent() == (301, 300)
    last = log.extent()[1]
    assert log.append(expectedCursor=last)["cursor"] == "301"
    assert log.extent() == (301, 301)
