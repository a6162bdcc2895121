"""The `memory` driver: a list of events, so plain that it is the oracle of every test."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from msgspec.structs import replace

from mindgrid.shards.clock import Clock, Instant
from mindgrid.shards.episodic.checks import answer_removed, check_log_repeat
from mindgrid.shards.episodic.ids import KEY_BYTES, cursor_of, event_id
from mindgrid.shards.episodic.rules import retention, stored
from mindgrid.shards.episodic.types import (
    Append,
    Appended,
    Event,
    EventAction,
    EventDraft,
    EventPage,
    EventRange,
    ExpireEvents,
    LogCommand,
    LogConfig,
    LogResult,
    LogStatus,
)
from mindgrid.shards.episodic.watchers import Watchers
from mindgrid.shards.errors import CursorMismatch, MindgridError
from mindgrid.shards.types import Expired


class MemoryLog:
    """An `EpisodicLog` without a disk; what it holds is lost with it."""

    def __init__(self, config: LogConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._key = secrets.token_bytes(KEY_BYTES)
        self._lock = threading.Lock()
        self._watchers = Watchers()
        self._events: list[Event] = []
        self._dedup: dict[str, int] = {}
        self._last_cursor = 0
        self._last_commit = Instant(0)
        """When anything last changed: no later commit has an earlier time."""
        self._changed = False
        self._results: dict[str, tuple[LogCommand, LogResult, int]] = {}

    def submit(self, command: LogCommand) -> Future[LogResult]:
        """See `EpisodicLog.submit`."""
        done: Future[LogResult] = Future()
        with self._lock:
            try:
                done.set_result(self._commit(command))
            except MindgridError as error:
                done.set_exception(error)
            self._watchers.call()
        return done

    def read(self, range: EventRange, limit: int) -> EventPage:
        """See `EpisodicLog.read`."""
        assert limit > 0
        with self._lock:
            found = [event for event in self._events if _is_in(range, event)]
            if range.reverse:
                found.reverse()
            first = self._events[0].cursor if self._events else self._last_cursor + 1
            return EventPage(tuple(found[:limit]), len(found) > limit, first, self._last_cursor)

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """See `EpisodicLog.watch`."""
        return self._watchers.add(watcher)

    def status(self) -> LogStatus:
        """See `EpisodicLog.status`."""
        with self._lock:
            return LogStatus(len(self._events), self._last_cursor, 0, 0, 0, 0, self._last_commit)

    def tend(self) -> None:
        """Remove what the retention no longer keeps; hosts call this every few seconds."""
        with self._lock:
            for command in retention(self._config, self._clock.now(), self._last_cursor):
                self._commit(command)

    def close(self) -> None:
        """See `EpisodicLog.close`."""

    def _commit(self, command: LogCommand) -> LogResult:
        if command.transaction_id in self._results:
            return self._again(command)
        at = Instant(max(self._clock.now(), self._last_commit))
        self._changed = False
        result: LogResult
        fresh_from = self._last_cursor + 1
        if isinstance(command, Append):
            fresh = [one for one in command.drafts if one.dedup_key not in self._dedup]
            expected = command.expected_cursor
            if fresh and expected is not None and expected != self._last_cursor:
                raise CursorMismatch(expected, self._last_cursor)
            cursors = [self._append(draft, at) for draft in command.drafts]
            there = {event.cursor: event for event in self._events}
            result = Appended(tuple(there[cursor] for cursor in cursors), at)
        else:
            result = Expired(self._expire(command, at), at)
        if command.transaction_id or self._changed:
            self._last_commit = at
        if command.transaction_id:
            self._results[command.transaction_id] = command, result, fresh_from
        return result

    def _again(self, command: LogCommand) -> LogResult:
        """Return the first result, with its events as they are now.

        One that the transaction wrote itself is told as it was, if it was removed since.
        """
        first, result, fresh_from = self._results[command.transaction_id]
        if isinstance(first, Append) and isinstance(command, Append):
            first = replace(first, expected_cursor=command.expected_cursor)
        check_log_repeat(command, first == command)
        if not isinstance(result, Appended):
            return result
        there = {event.cursor: event for event in self._events}
        for event in result.events:
            if event.cursor not in there and event.cursor < fresh_from:
                raise answer_removed(command, event.cursor)
        events = (there.get(event.cursor, event) for event in result.events)
        return Appended(tuple(events), result.committed_at)

    def _append(self, draft: EventDraft, at: Instant) -> int:
        if draft.dedup_key in self._dedup:
            return self._dedup[draft.dedup_key]
        self._changed = True
        self._last_cursor += 1
        cursor = self._last_cursor
        self._tombstone([cursor_of(self._key, id) for id in draft.supersedes], at)
        self._events.append(stored(draft, event_id(self._key, cursor), cursor, at))
        if draft.dedup_key:
            self._dedup[draft.dedup_key] = cursor
        return cursor

    def _tombstone(self, cursors: Sequence[int | None], at: Instant) -> None:
        self._events = [
            replace(event, deleted_at=at)
            if event.cursor in cursors and event.deleted_at is None
            else event
            for event in self._events
        ]

    def _expire(self, command: ExpireEvents, at: Instant) -> int:
        chosen = [
            event.cursor
            for event in self._events
            if (not command.before_cursor or event.cursor < command.before_cursor)
            and (command.before_time is None or event.timestamp < command.before_time)
            and (command.action is EventAction.HARD_DELETE or event.deleted_at is None)
        ][: command.max_rows]
        if command.action is EventAction.SOFT_DELETE:
            self._tombstone(chosen, at)
        else:
            self._events = [event for event in self._events if event.cursor not in chosen]
            self._dedup = {key: at for key, at in self._dedup.items() if at not in chosen}
        self._changed = bool(chosen)
        return len(chosen)


def _is_in(range: EventRange, event: Event) -> bool:
    return (
        event.cursor > range.after_cursor
        and (not range.before_cursor or event.cursor < range.before_cursor)
        and (range.after_time is None or event.timestamp > range.after_time)
        and (range.before_time is None or event.timestamp < range.before_time)
        and range.session_id in ("", event.session_id)
        and range.role in ("", event.role)
        and range.type in ("", event.type)
        and (range.include_deleted or event.deleted_at is None)
    )
