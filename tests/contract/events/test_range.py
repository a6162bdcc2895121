"""Range: bounds, windows of time, equalities, order, limits, tombstones and pages."""

from __future__ import annotations

import itertools
import json

import pytest
from tests.support.callers import FUTURE, PAST, instant
from tests.support.log_callers import EPISODIC, Desk, Json, LogCaller

PAGE = 1_000
"""So many events a host returns at once."""


def append_mixed(log: LogCaller) -> list[Json]:
    """Append each pairing of two sessions, roles and types twice, and return the events."""
    kinds = itertools.product(("a", "b"), ("user", "tool"), ("message", "note"))
    return [
        log.append(sessionId=session, role=role, type=type)
        for session, role, type in list(kinds) * 2
    ]


def cursors_until_the_end(
    desk: Desk, log: LogCaller, meanwhile: int, **bounds: object
) -> list[int]:
    """Return the cursors of a range while so many events are appended, once it has begun."""
    stream = desk.stream(f"{EPISODIC}/Range", {"namespace": log.namespace, **bounds}).stream
    stream.stall()
    log.fill(meanwhile)
    stream.go_on()
    found = []
    while (line := desk.run(stream.line())) is not None:
        found.append(int(json.loads(line)["result"]["cursor"]))
    return found


def test_a_log_that_was_never_written_to_has_an_empty_range(log: LogCaller) -> None:
    assert log.range() == log.range(reverse=True, includeDeleted=True) == []


def test_a_range_without_bounds_is_the_whole_log_in_its_order(log: LogCaller) -> None:
    told = [log.append(f"payload {n}") for n in range(100)]
    assert log.range() == told
    assert log.range(afterCursor=0, beforeCursor="0", limit=0, sessionId="", role="") == told


def test_both_cursor_bounds_are_exclusive(log: LogCaller) -> None:
    log.fill(20)
    assert log.cursors(afterCursor=5, beforeCursor=9) == [6, 7, 8]
    assert log.cursors(afterCursor=17) == [18, 19, 20]
    assert log.cursors(beforeCursor=4) == [1, 2, 3]
    assert log.cursors(afterCursor=5, beforeCursor=6) == []
    assert log.cursors(afterCursor=9, beforeCursor=5) == []
    assert log.cursors(afterCursor=20) == []


def test_a_cursor_may_be_as_large_as_the_wire_can_say(log: LogCaller) -> None:
    log.fill(3)
    most = str(2**64 - 1)
    assert log.cursors(afterCursor=most) == []
    assert log.cursors(beforeCursor=most) == log.cursors(limit=2**32 - 1) == [1, 2, 3]
    assert log.cursors(beforeCursor=most, reverse=True) == [3, 2, 1]


def test_both_time_bounds_are_exclusive(log: LogCaller) -> None:
    events = [log.append() for _ in range(20)]
    after, before = events[4]["timestamp"], events[12]["timestamp"]
    between = [
        int(event["cursor"])
        for event in events
        if instant(after) < instant(event["timestamp"]) < instant(before)
    ]
    assert between, "the clock goes on between two calls"
    assert log.cursors(afterTime=after, beforeTime=before) == between
    assert log.cursors(afterTime=after, beforeTime=after) == []
    assert log.cursors(afterTime=before, beforeTime=after) == []
    assert log.cursors(afterTime=PAST, beforeTime=FUTURE) == list(range(1, 21))
    assert log.cursors(afterTime=FUTURE) == log.cursors(beforeTime=PAST) == []


def test_cursor_and_time_bounds_are_anded(log: LogCaller) -> None:
    events = [log.append() for _ in range(20)]
    after, before = events[4]["timestamp"], events[12]["timestamp"]
    window = log.cursors(afterTime=after, beforeTime=before)
    inside = [cursor for cursor in window if 7 < cursor < 11]
    bounds = {"afterTime": after, "beforeTime": before, "afterCursor": 7, "beforeCursor": 11}
    assert log.cursors(**bounds) == inside == [8, 9, 10]
    assert log.cursors(**bounds, reverse=True) == [10, 9, 8]
    assert log.cursors(afterTime=after, beforeCursor=window[0]) == []


def test_equalities_are_anded_and_an_empty_one_is_none(log: LogCaller) -> None:
    events = append_mixed(log)
    fields = ("sessionId", "role", "type")
    for wanted in itertools.product(("", "a", "never"), ("", "tool"), ("", "note")):
        equalities = dict(zip(fields, wanted, strict=True))
        assert log.range(**equalities) == [
            event
            for event in events
            if all(not value or event[field] == value for field, value in equalities.items())
        ]


def test_equalities_are_anded_with_the_window(log: LogCaller) -> None:
    events = append_mixed(log)
    assert log.cursors(sessionId="a", afterCursor=2, beforeCursor=11) == [3, 4, 9, 10]
    assert log.cursors(sessionId="a", role="tool", reverse=True) == [12, 11, 4, 3]
    assert log.cursors(role="user", beforeTime=events[8]["timestamp"]) == [1, 2, 5, 6]
    assert log.cursors(type="note", afterCursor=2, limit=3) == [4, 6, 8]


def test_a_session_of_three_is_found_among_thousands(log: LogCaller) -> None:
    for _ in range(3):
        log.fill(PAGE - 1, sessionId="crowd")
        log.append(sessionId="rare", role="user")
    assert log.cursors(sessionId="rare") == [PAGE, 2 * PAGE, 3 * PAGE]
    assert log.cursors(sessionId="rare", reverse=True, limit=2) == [3 * PAGE, 2 * PAGE]
    assert log.cursors(sessionId="crowd", afterCursor=PAGE - 2, limit=2) == [PAGE - 1, PAGE + 1]
    assert len(log.cursors(sessionId="crowd")) == 3 * PAGE - 3


def test_a_reversed_range_falls(log: LogCaller) -> None:
    log.fill(20)
    assert log.cursors(reverse=True) == list(range(20, 0, -1))
    assert log.cursors(reverse=True, afterCursor=3, beforeCursor=7) == [6, 5, 4]
    assert log.cursors(reverse=True, limit=2) == [20, 19]


def test_a_limit_counts_events_of_the_range_and_0_is_all(log: LogCaller) -> None:
    log.fill(20)
    assert log.cursors(limit=3) == [1, 2, 3]
    assert log.cursors(limit=3, afterCursor=10, beforeCursor=13) == [11, 12]
    assert log.cursors(limit=20) == log.cursors(limit=21) == log.cursors(limit=0)
    assert len(log.cursors(limit=0)) == 20


def test_ranges_and_limits_go_over_pages(log: LogCaller) -> None:
    log.fill(3 * PAGE)
    whole = list(range(1, 3 * PAGE + 1))
    assert log.cursors() == whole
    assert log.cursors(reverse=True) == whole[::-1]
    for limit in (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 7, 3 * PAGE):
        assert log.cursors(limit=limit) == whole[:limit]
        assert log.cursors(limit=limit, reverse=True) == whole[::-1][:limit]
    assert log.cursors(afterCursor=500, beforeCursor=2_600) == list(range(501, 2_600))


def test_tombstones_are_hidden_unless_asked_for(log: LogCaller) -> None:
    events = [log.append() for _ in range(6)]
    log.append(supersedes=[events[4]["id"]])
    log.expire("SOFT_DELETE", beforeCursor=3)
    assert log.cursors() == [3, 4, 6, 7]
    assert log.cursors(limit=3, reverse=True) == [7, 6, 4]
    audit = log.range(includeDeleted=True)
    assert [event["cursor"] for event in audit if "deletedAt" in event] == ["1", "2", "5"]
    assert [event | {"deletedAt": ""} for event in audit[:2]] == [
        event | {"deletedAt": ""} for event in events[:2]
    ]


def test_pages_of_tombstones_do_not_end_a_range(log: LogCaller) -> None:
    log.fill(2 * PAGE + 500)
    assert log.expire("SOFT_DELETE", 2 * PAGE + 200, beforeCursor=10_000) == 2 * PAGE + 200
    assert log.cursors() == list(range(2 * PAGE + 201, 2 * PAGE + 501))
    assert log.cursors(limit=2) == [2 * PAGE + 201, 2 * PAGE + 202]
    assert len(log.cursors(includeDeleted=True, reverse=True)) == 2 * PAGE + 500


def test_a_range_carries_payloads(log: LogCaller) -> None:
    payloads = ["", "x", "hello" * 1_000]
    told = [log.append(text) for text in payloads]
    log.fill(200)
    assert log.range(limit=3) == told
    assert "payload" not in told[0]


def test_what_is_appended_after_the_first_page_is_not_in_the_range(
    desk: Desk, log: LogCaller
) -> None:
    log.fill(2 * PAGE + 500)
    whole = list(range(1, 2 * PAGE + 501))
    assert cursors_until_the_end(desk, log, PAGE) == whole
    assert log.cursors()[-1] == 3 * PAGE + 500


def test_a_reversed_range_begins_where_the_log_ended(desk: Desk, log: LogCaller) -> None:
    log.fill(PAGE + 500)
    found = cursors_until_the_end(desk, log, 10, reverse=True)
    assert found == list(range(PAGE + 500, 0, -1))


def test_a_range_is_asked_for_in_both_spellings(log: LogCaller) -> None:
    events = [log.append(sessionId="s", role="user") for _ in range(6)]
    log.expire("SOFT_DELETE", beforeCursor=4)
    snake = {"after_cursor": 1, "before_cursor": "5", "session_id": "s", "include_deleted": True}
    camel = {"afterCursor": "1", "beforeCursor": 5, "sessionId": "s", "includeDeleted": True}
    times = [event["timestamp"] for event in (events[0], events[-1])]
    found = log.range(**snake, after_time=times[0], before_time=times[1])
    assert found == log.range(**camel, afterTime=times[0], beforeTime=times[1])
    assert [event["cursor"] for event in found] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("bound", "field"),
    [
        ({"afterCursor": "-1"}, "after_cursor"),
        ({"beforeCursor": str(2**64)}, "before_cursor"),
        ({"limit": -1}, "limit"),
        ({"limit": 2**32}, "limit"),
        ({"afterTime": "yesterday"}, "after_time"),
        ({"beforeTime": "10000-01-01T00:00:00Z"}, "before_time"),
        ({"sessionId": "s" * 513}, "session_id"),
        ({"role": 7}, "role"),
        ({"until": 7}, "until"),
    ],
)
def test_a_bound_that_means_nothing_is_refused_before_the_stream(
    log: LogCaller, bound: Json, field: str
) -> None:
    assert log.refused("Range", **bound).startswith(f"{field}: ")
