"""Tail: replay, the live edge, filters, and subscribers that fall behind or leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.support.log_callers import EPISODIC, Desk, LogCaller
from tests.support.streams import Stream

from mindgrid.api import episodic
from mindgrid.cluster import tails


def test_a_tail_begins_at_the_live_edge(log: LogCaller) -> None:
    log.fill(5)
    tail = log.tail(afterCursor="2")
    log.append("new")
    assert tail.cursors(1) == [6]
    log.fill(3)
    assert tail.cursors(3) == [7, 8, 9]
    assert tail.is_quiet()


def test_an_event_of_a_tail_is_the_one_that_range_returns(log: LogCaller) -> None:
    tail = log.tail()
    told = log.append("hi", role="user", sessionId="s", source="x", metadata={"k": "v"})
    assert tail.next() == [told] == log.range()


def test_replay_goes_over_into_live_without_gap_or_repeat(log: LogCaller) -> None:
    log.fill(2_500)
    tail = log.replay(after=7)
    assert tail.cursors(2_493) == list(range(8, 2_501))
    log.fill(30)
    assert tail.cursors(30) == list(range(2_501, 2_531))


def test_what_is_appended_during_a_replay_comes_once_and_in_order(log: LogCaller) -> None:
    log.fill(2_500)
    tail = log.replay()
    tail.stream.stall()
    log.fill(1_000)
    tail.stream.go_on()
    assert tail.cursors(3_500) == list(range(1, 3_501))
    log.fill(30)
    assert tail.cursors(30) == list(range(3_501, 3_531))
    assert tail.is_quiet(0.1)


def test_replay_of_an_empty_log_waits_for_its_first_event(log: LogCaller) -> None:
    tail = log.replay()
    assert tail.is_quiet()
    log.append()
    assert tail.cursors(1) == [1]


def test_replay_from_beyond_the_end_hands_out_only_what_lies_behind_its_cursor(
    log: LogCaller,
) -> None:
    log.fill(2)
    tail = log.replay(after=4)
    log.fill(5)
    assert tail.cursors(3) == [5, 6, 7]


@pytest.mark.parametrize("after", [999, 2**64 - 1])
def test_a_tail_from_beyond_the_end_leaves_the_others_theirs(log: LogCaller, after: int) -> None:
    log.fill(1)
    log.replay(after=after).is_quiet()
    live, replayed = log.tail(), log.replay()
    assert replayed.cursors(1) == [1]
    log.fill(3)
    assert live.cursors(3) == replayed.cursors(3) == [2, 3, 4]


def test_filters_run_at_the_server_in_replay_and_live(log: LogCaller) -> None:
    def some() -> None:
        log.append(sessionId="a", role="user")
        log.append(sessionId="a", role="tool")
        log.append(sessionId="b", role="user")
        log.append(sessionId="a", role="user", type="note")

    some()
    tails = {
        "session": log.replay(sessionId="a"),
        "role": log.replay(role="user"),
        "type": log.replay(type="note"),
        "all": log.replay(sessionId="a", role="user", type="message"),
    }
    some()
    assert tails["session"].cursors(6) == [1, 2, 4, 5, 6, 8]
    assert tails["role"].cursors(6) == [1, 3, 4, 5, 7, 8]
    assert tails["type"].cursors(2) == [4, 8]
    assert tails["all"].cursors(2) == [1, 5]
    assert all(tail.is_quiet(0.1) for tail in tails.values())


def test_tombstones_are_hidden_from_the_replay_unless_asked_for(log: LogCaller) -> None:
    first = log.append("v1")
    log.append("v2", supersedes=[first["id"]])
    assert log.replay().cursors(1) == [2]
    both = log.replay(includeDeleted=True).next(2)
    assert [int(event["cursor"]) for event in both] == [1, 2]
    assert "deletedAt" in both[0]


def test_superseding_is_not_told_to_tails_again(log: LogCaller) -> None:
    tail = log.tail()
    first = log.append("v1")
    log.append("v2", supersedes=[first["id"]])
    assert tail.cursors(2) == [1, 2]
    assert tail.is_quiet()


def test_a_repeat_by_dedup_key_is_not_told_again(log: LogCaller) -> None:
    tail = log.tail()
    for _ in range(3):
        log.append(dedupKey="once")
    log.append()
    assert tail.cursors(2) == [1, 2]


def test_a_subscriber_that_stops_reading_is_detached_and_resumes_where_it_was(
    desk: Desk, log: LogCaller
) -> None:
    tail = log.tail()
    log.fill(10)
    assert tail.cursors(10) == list(range(1, 11))
    tail.stream.stall()
    for _ in range(8):
        log.fill(300)
    assert desk.tails(log) == 0, "it is detached though it does not read"
    tail.stream.go_on()
    got: list[int] = []
    while b'"error"' not in (line := desk.run(tail.stream.line()) or b"")[:8]:
        got.append(int(json.loads(line)["result"]["cursor"]))
    error = json.loads(line)["error"]
    last = got[-1] if got else 10
    assert error["code"] == 8
    assert f"last cursor sent is {last}" in error["message"]
    rest = log.replay(after=last)
    assert got + rest.cursors(2_410 - last) == list(range(11, 2_411))


def test_a_subscriber_may_be_as_far_behind_as_its_buffer_is_long(
    desk: Desk, log: LogCaller
) -> None:
    tail = log.tail()
    tail.stream.stall()
    log.fill(1_000)
    log.fill(24)
    assert desk.tails(log) == 1
    tail.stream.go_on()
    assert tail.cursors(1_024) == list(range(1, 1_025))


@pytest.mark.parametrize(
    "event", [{"text": "x" * 3_000}, {"metadata": {"k": "v" * 3_000}}, {"source": "s" * 3_000}]
)
def test_a_subscriber_may_be_behind_by_so_many_bytes_whatever_they_are_part_of(
    desk: Desk, log: LogCaller, monkeypatch: pytest.MonkeyPatch, event: dict[str, Any]
) -> None:
    monkeypatch.setattr(tails, "BUFFER_BYTES", 10_000)
    tail = log.tail()
    tail.stream.stall()
    # One is on its way to the client already, and three fit.
    sent = 0
    while desk.tails(log) and sent < 20:
        log.append(**event)
        sent += 1
    assert 4 < sent < 20
    tail.stream.go_on()
    assert "more than 10000 bytes behind" in tail.error()["message"]


def test_no_event_is_too_large_for_a_subscriber_that_reads(
    log: LogCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "BUFFER_BYTES", 10_000)
    tail = log.tail()
    for n in range(3):
        log.append("x" * 50_000)
        assert tail.cursors(1) == [n + 1]


def test_a_slow_subscriber_delays_no_other(log: LogCaller) -> None:
    slow, quick = log.tail(), log.tail()
    slow.stream.stall()
    for n in range(4):
        log.fill(1_000)
        assert quick.cursors(1_000) == list(range(1_000 * n + 1, 1_000 * n + 1_001))
    slow.stream.go_on()
    assert slow.error()["code"] == 8


def test_a_client_that_leaves_is_forgotten(desk: Desk, log: LogCaller) -> None:
    tails = [log.tail() for _ in range(20)]
    assert desk.tails(log) == 20
    log.append()
    assert [tail.cursors(1) for tail in tails] == [[1]] * 20
    for tail in tails:
        tail.leave()
    assert desk.tails(log) == 0


def test_a_client_that_leaves_before_its_answer_begins_is_forgotten(
    desk: Desk, log: LogCaller
) -> None:
    log.append()

    async def leave() -> None:
        stream = Stream(desk.door, f"{EPISODIC}/Tail", {"namespace": log.namespace})
        stream.stall()
        while not desk.tails(log):
            await asyncio.sleep(0)
        await stream.leave(goes_on=False)

    desk.run(asyncio.wait_for(leave(), 20))
    assert desk.tails(log) == 0


def test_an_idle_tail_says_that_it_is_still_there(
    desk: Desk, log: LogCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodic, "IDLE_S", 0.05)
    tail = log.tail()
    assert [desk.run(tail.stream.line()) for _ in range(3)] == [b"", b"", b""]
    log.append()
    assert tail.cursors(1) == [1]


def test_an_unknown_namespace_is_told_before_the_stream(log: LogCaller) -> None:
    log.namespace = "nowhere"
    for method in ("Tail", "Range"):
        assert "episodic/nowhere" in log.refused(method, 404, 5)
