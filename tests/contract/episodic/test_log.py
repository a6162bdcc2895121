"""What an episodic log promises, for each driver."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.clocks import START, TurnedClock
from tests.support.logs import SMALL, OpenLog, append, events, expire, memory_log, open_log, pages

from mindgrid.shards.clock import Clock, Instant
from mindgrid.shards.episodic.types import (
    Append,
    Appended,
    EpisodicLog,
    EventAction,
    EventDraft,
    EventRange,
    ExpireEvents,
    LogConfig,
)
from mindgrid.shards.errors import CursorMismatch, InvalidRequest

SOFT, HARD = EventAction.SOFT_DELETE, EventAction.HARD_DELETE
DRIVERS: dict[str, OpenLog] = {"memory": memory_log, "lance": open_log}


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture(params=DRIVERS)
def opener(request: pytest.FixtureRequest) -> OpenLog:
    return DRIVERS[request.param]


@pytest.fixture
def log(opener: OpenLog, tmp_path: Path, clock: Clock) -> Iterator[EpisodicLog]:
    made = opener(tmp_path / "log", SMALL, clock)
    yield made
    made.close()


def said(n: int, **more: object) -> EventDraft:
    return EventDraft("message", f"payload {n}".encode(), **more)  # type: ignore[arg-type]


def fill(log: EpisodicLog, count: int, clock: TurnedClock | None = None) -> None:
    for n in range(count):
        append(log, said(n))
        if clock is not None:
            clock.turn(10)


def cursors(log: EpisodicLog, **bounds: object) -> list[int]:
    return [event.cursor for event in events(log, EventRange(**bounds))]  # type: ignore[arg-type]


# Append


def test_cursors_start_at_1_and_rise_by_1(log: EpisodicLog) -> None:
    assert [append(log, said(n))[0].cursor for n in range(20)] == list(range(1, 21))


def test_an_event_comes_back_as_it_was_written(log: EpisodicLog) -> None:
    draft = EventDraft(
        "tool_call", b"\x00hi", {"k": "v", "ü": ""}, "assistant", "sess-1", "key", (), "corr-7"
    )
    (told,) = append(log, draft)
    assert events(log) == [told]
    assert uuid.UUID(told.id).version == 8
    assert told.timestamp == START
    assert told.deleted_at is None
    assert (told.type, told.payload, told.metadata) == ("tool_call", b"\x00hi", {"k": "v", "ü": ""})
    assert (told.role, told.session_id, told.source) == ("assistant", "sess-1", "corr-7")
    fill(log, 30)
    assert events(log)[0] == told


def test_ids_differ_between_events_and_logs(opener: OpenLog, tmp_path: Path, clock: Clock) -> None:
    ids: set[str] = set()
    for name in ("a", "b"):
        log = opener(tmp_path / name, SMALL, clock)
        ids.update(event.id for event in append(log, *(said(n) for n in range(10))))
        log.close()
    assert len(ids) == 20


def test_timestamps_never_decrease(log: EpisodicLog, clock: TurnedClock) -> None:
    fill(log, 3, clock)
    clock.turn(-1_000)
    (late,) = append(log, said(3))
    assert late.timestamp == START + 20
    assert events(log)[-1].timestamp == START + 20


def test_a_batch_gets_one_run_of_cursors_or_none(log: EpisodicLog) -> None:
    assert [event.cursor for event in append(log, said(0), said(1), said(2))] == [1, 2, 3]
    with pytest.raises(CursorMismatch):
        append(log, said(3), said(4), expected=1)
    assert cursors(log) == [1, 2, 3]
    assert append(log) == []


def test_an_append_goes_only_where_the_log_ends_as_expected(log: EpisodicLog) -> None:
    append(log, said(0), expected=0)
    append(log, said(1), expected=1)
    with pytest.raises(
        CursorMismatch, match="expected_cursor is 1, but the log's last cursor is 2"
    ):
        append(log, said(2), expected=1)
    with pytest.raises(CursorMismatch):
        append(log, said(2), expected=0)
    expire(log, ExpireEvents(HARD, 10, before_cursor=100))
    append(log, said(2), expected=2)
    assert cursors(log) == [3]


# Idempotency


def test_a_repeated_dedup_key_returns_the_stored_event(log: EpisodicLog) -> None:
    (first,) = append(log, said(0, dedup_key="k"))
    fill(log, 20)
    (again,) = append(log, EventDraft("other", b"else", role="tool", dedup_key="k"), expected=99)
    assert again == first
    assert cursors(log) == list(range(1, 22))


def test_a_repeat_returns_the_tombstone_too(log: EpisodicLog, clock: TurnedClock) -> None:
    (first,) = append(log, said(0, dedup_key="k"))
    clock.turn(5)
    append(log, said(1, supersedes=(first.id,)))
    (again,) = append(log, said(2, dedup_key="k"))
    assert (again.cursor, again.deleted_at) == (1, START + 5)


def test_keys_in_one_batch_count_from_the_first_on(log: EpisodicLog) -> None:
    append(log, said(0, dedup_key="old"))
    told = append(log, said(1, dedup_key="k"), said(2, dedup_key="old"), said(3, dedup_key="k"))
    assert [event.cursor for event in told] == [2, 1, 2]
    assert told[2].payload == b"payload 1"
    # Only what is written needs the log to end as expected.
    append(log, said(4, dedup_key="k"), expected=0)
    with pytest.raises(CursorMismatch):
        append(log, said(4, dedup_key="k"), said(5), expected=0)


def test_a_key_is_free_only_once_its_event_is_removed(log: EpisodicLog) -> None:
    append(log, said(0, dedup_key="k"))
    expire(log, ExpireEvents(SOFT, 1, before_cursor=2))
    assert append(log, said(1, dedup_key="k"))[0].cursor == 1
    expire(log, ExpireEvents(HARD, 1, before_cursor=2))
    assert append(log, said(2, dedup_key="k"))[0].cursor == 2


def test_a_repeated_transaction_is_told_its_first_result(log: EpisodicLog) -> None:
    first = log.submit(Append((said(0), said(1)), None, "t")).result()
    fill(log, 20)
    again = log.submit(Append((said(0), said(1)), 77, "t")).result()
    assert again == first
    assert isinstance(first, Appended)
    gone = log.submit(ExpireEvents(HARD, 1, 100, None, "e")).result()
    assert log.submit(ExpireEvents(HARD, 1, 100, None, "e")).result() == gone
    # What it wrote is told even where it was removed since.
    assert log.submit(Append((said(0), said(1)), None, "t")).result() == first
    for other in (Append((said(0),), None, "t"), ExpireEvents(HARD, 1, 9, None, "t")):
        with pytest.raises(InvalidRequest, match="transaction_id: 't' was used"):
            log.submit(other).result()


def test_a_transaction_that_changed_nothing_is_remembered_too(log: EpisodicLog) -> None:
    assert expire(log, ExpireEvents(SOFT, 1, 100, None, "e")) == 0
    fill(log, 2)
    assert expire(log, ExpireEvents(SOFT, 1, 100, None, "e")) == 0
    assert cursors(log) == [1, 2]


# Revision


def test_superseding_tombstones_earlier_events(log: EpisodicLog, clock: TurnedClock) -> None:
    one, two = append(log, said(0), said(1))
    clock.turn(5)
    (third,) = append(log, said(2, supersedes=(one.id, "nobody", str(uuid.uuid4()))))
    assert third.supersedes[0] == one.id
    assert cursors(log) == [2, 3]
    shown = events(log, EventRange(include_deleted=True))
    assert [event.deleted_at for event in shown] == [START + 5, None, None]
    clock.turn(5)
    append(log, said(3, supersedes=(one.id, two.id)))
    shown = events(log, EventRange(include_deleted=True))
    # The first tombstone stays.
    assert [event.deleted_at for event in shown] == [START + 5, START + 10, None, None]


def test_an_id_of_another_log_supersedes_nothing(
    opener: OpenLog, tmp_path: Path, clock: Clock, log: EpisodicLog
) -> None:
    other = opener(tmp_path / "other", SMALL, clock)
    (theirs,) = append(other, said(0))
    append(log, said(0))
    append(log, said(1, supersedes=(theirs.id,)))
    assert cursors(log) == [1, 2]
    other.close()


# Range


def test_bounds_are_exclusive_and_anded(log: EpisodicLog, clock: TurnedClock) -> None:
    fill(log, 20, clock)
    assert cursors(log, after_cursor=5, before_cursor=9) == [6, 7, 8]
    assert cursors(log, after_cursor=5, before_cursor=6) == []
    assert cursors(log, after_time=START + 30, before_time=START + 70) == [5, 6, 7]
    assert cursors(log, after_cursor=5, before_time=START + 70) == [6, 7]
    assert cursors(log, after_cursor=2**64 - 1) == []
    assert cursors(log, before_cursor=2**64 - 1) == list(range(1, 21))
    assert cursors(log, before_cursor=1) == []


def test_a_range_falls_with_reverse(log: EpisodicLog) -> None:
    fill(log, 20)
    assert cursors(log, reverse=True) == list(range(20, 0, -1))
    assert cursors(log, reverse=True, after_cursor=3, before_cursor=7) == [6, 5, 4]
    assert [e.cursor for e in log.read(EventRange(reverse=True), 2).events] == [20, 19]


def test_equalities_are_anded(log: EpisodicLog) -> None:
    for n in range(24):
        draft = EventDraft(
            "message" if n % 2 else "tool_call",
            role="user" if n % 3 else "assistant",
            session_id=f"s{n % 4}",
        )
        append(log, draft)
    assert cursors(log, session_id="s1") == [2, 6, 10, 14, 18, 22]
    assert cursors(log, session_id="s1", role="assistant") == [10, 22]
    assert cursors(log, session_id="s1", role="user", type="message") == [2, 6, 14, 18]
    assert cursors(log, session_id="s1", type="tool_call") == []
    assert cursors(log, session_id="never") == []
    assert cursors(log, session_id="s1", after_cursor=6, before_cursor=18) == [10, 14]


def test_pages_are_as_long_as_asked_and_say_whether_more_follow(log: EpisodicLog) -> None:
    fill(log, 20)
    for page in (1, 3, 5, 19, 20, 21):
        parts = pages(log, page=page)
        assert [event.cursor for part in parts for event in part] == list(range(1, 21))
        assert all(len(part) == page for part in parts[:-1])
        back = pages(log, EventRange(reverse=True), page)
        assert [event.cursor for part in back for event in part] == list(range(20, 0, -1))
    assert log.read(EventRange(), 1).last_cursor == 20


def test_large_events_make_short_pages(log: EpisodicLog) -> None:
    large = EventDraft("blob", bytes(3 * 1024 * 1024))
    for _ in range(3):
        append(log, large)
    assert [len(event.payload) for event in events(log)] == [3 * 1024 * 1024] * 3


@pytest.mark.parametrize(
    "large",
    [EventDraft("blob", bytes(2**20)), EventDraft("blob", b"", metadata={"text": "a" * 2**20})],
    ids=["payload", "metadata"],
)
def test_a_page_of_a_durable_log_ends_with_the_event_that_fills_it(
    tmp_path: Path, clock: TurnedClock, large: EventDraft
) -> None:
    log = open_log(tmp_path / "log", SMALL, clock)
    append(log, *[EventDraft("small")] * 600)
    for _ in range(40):
        append(log, large)
    page = log.read(EventRange(), 1_000)
    assert len(page.events) == 604
    assert page.more
    assert len(events(log)) == 640
    log.close()


# Expire


def test_soft_deletes_hide_the_oldest_live_events(log: EpisodicLog, clock: TurnedClock) -> None:
    fill(log, 20, clock)
    assert expire(log, ExpireEvents(SOFT, 3, before_cursor=10)) == 3
    assert expire(log, ExpireEvents(SOFT, 3, before_cursor=5)) == 1
    assert expire(log, ExpireEvents(SOFT, 3, before_cursor=5)) == 0
    assert cursors(log) == list(range(5, 21))
    assert cursors(log, include_deleted=True) == list(range(1, 21))
    assert events(log, EventRange(include_deleted=True))[0].deleted_at == START + 200


def test_hard_deletes_remove_the_oldest_tombstoned_ones_too(log: EpisodicLog) -> None:
    fill(log, 20)
    expire(log, ExpireEvents(SOFT, 2, before_cursor=10))
    assert expire(log, ExpireEvents(HARD, 5, before_cursor=10)) == 5
    assert cursors(log, include_deleted=True) == list(range(6, 21))
    assert expire(log, ExpireEvents(HARD, 100, before_cursor=10)) == 4
    assert cursors(log) == list(range(10, 21))


def test_both_bounds_hold(log: EpisodicLog, clock: TurnedClock) -> None:
    fill(log, 20, clock)
    assert expire(log, ExpireEvents(HARD, 100, 10, Instant(START + 50))) == 5
    assert expire(log, ExpireEvents(SOFT, 100, 8, Instant(START + 100))) == 2
    assert expire(log, ExpireEvents(HARD, 100, 0, Instant(START + 50))) == 0
    assert cursors(log) == list(range(8, 21))


def test_cursors_go_on_after_the_last_event_is_removed(log: EpisodicLog) -> None:
    fill(log, 20)
    assert expire(log, ExpireEvents(HARD, 100, before_cursor=100)) == 20
    assert events(log, EventRange(include_deleted=True)) == []
    assert log.read(EventRange(), 1).last_cursor == 20
    assert append(log, said(0))[0].cursor == 21
    assert cursors(log) == [21]


def test_retention_keeps_the_newest_and_the_young(
    opener: OpenLog, tmp_path: Path, clock: TurnedClock
) -> None:
    log = opener(tmp_path / "kept", LogConfig(retention_events=5), clock)
    fill(log, 12)
    _tend(log)
    assert cursors(log) == [8, 9, 10, 11, 12]
    log.close()
    log = opener(tmp_path / "young", LogConfig(retention_age_s=1.0), clock)
    fill(log, 3)
    clock.turn(600_000)
    fill(log, 3)
    clock.turn(600_000)
    _tend(log)
    assert cursors(log) == [4, 5, 6]
    log.close()


def _tend(log: EpisodicLog) -> None:
    log.tend()  # type: ignore[attr-defined]


# Following


def test_watchers_are_called_at_each_commit_until_they_leave(log: EpisodicLog) -> None:
    seen: list[str] = []
    leave = log.watch(lambda: seen.append("one"))
    log.watch(lambda: seen.append("two"))
    append(log, said(0))
    assert seen == ["one", "two"]
    leave()
    append(log, said(1), said(2))
    assert seen == ["one", "two", "two"]
    leave()
