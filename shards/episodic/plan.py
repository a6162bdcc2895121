"""A command becomes a resolved commit: dedup keys, cursors and bounds are looked up here, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mindgrid.shards.clock import Instant
from mindgrid.shards.episodic.columns import LogColumns
from mindgrid.shards.episodic.commits import EventWrite, LogCommit, Told, digest, encode_told
from mindgrid.shards.episodic.types import (
    Append,
    EventAction,
    EventDraft,
    EventRange,
    ExpireEvents,
    LogCommand,
)
from mindgrid.shards.errors import CursorMismatch


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The commit of a command, None if there is nothing to keep, and what its caller is told.

    A result that a transaction id is to remember is something to keep.
    """

    commit: LogCommit | None
    told: Told


@dataclass(slots=True)
class LogPlanner:
    """Plans the commands of one group, none of which is applied yet; under the log's lock.

    An `ExpireEvents` looks at the columns, so nothing may be planned before it in its group.
    """

    columns: LogColumns
    seq: int
    """Of the next commit."""
    cursor_of: Callable[[str], int | None]
    """The cursor in an id of this log."""
    last_cursor: int = field(init=False)
    _removed_until: int = 0
    _keys: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_cursor = self.columns.last

    def plan(self, command: LogCommand, at: Instant) -> LogPlan:
        """Return the plan of a command that takes place at `at`; raises CursorMismatch."""
        if isinstance(command, ExpireEvents):
            return self._expire(command, at)
        return self._append(command, at)

    def _append(self, command: Append, at: Instant) -> LogPlan:
        first = self.last_cursor + 1
        cursors: list[int] = []
        fresh: list[EventDraft] = []
        keys: dict[str, int] = {}
        for draft in command.drafts:
            cursor = self._known(draft.dedup_key, keys)
            if cursor is None:
                cursor = first + len(fresh)
                fresh.append(draft)
                if draft.dedup_key:
                    keys[draft.dedup_key] = cursor
            cursors.append(cursor)
        expected = command.expected_cursor
        if fresh and expected is not None and expected != self.last_cursor:
            raise CursorMismatch(expected, self.last_cursor)
        told = Told(at, _request(command), cursors, first)
        if not fresh and not command.transaction_id:
            return LogPlan(None, told)
        superseded = (self.cursor_of(id) for draft in fresh for id in draft.supersedes)
        tombstones = sorted({cursor for cursor in superseded if cursor is not None})
        self._keys.update(keys)
        self.last_cursor += len(fresh)
        commit = self._commit(command, told, list(map(_write, fresh)), tombstones)
        return LogPlan(commit, told)

    def _known(self, dedup_key: str, keys: Mapping[str, int]) -> int | None:
        """Return the cursor of the event that holds a key, in this command or before it."""
        if not dedup_key:
            return None
        cursor = keys.get(dedup_key) or self._keys.get(dedup_key)
        if cursor is None:
            cursor = self.columns.with_key(dedup_key)
        return cursor if cursor is not None and cursor > self._removed_until else None

    def _expire(self, command: ExpireEvents, at: Instant) -> LogPlan:
        assert self.last_cursor == self.columns.last
        hard = command.action is EventAction.HARD_DELETE
        window = EventRange(
            before_cursor=command.before_cursor,
            before_time=command.before_time,
            include_deleted=hard,
        )
        chosen = self.columns.select(window, command.max_rows).tolist()
        told = Told(at, _request(command), None, affected=len(chosen))
        if not chosen:
            return LogPlan(self._commit(command, told) if command.transaction_id else None, told)
        if not hard:
            return LogPlan(self._commit(command, told, (), chosen), told)
        # The oldest of all events are always the first ones: none before the last is kept.
        self._removed_until = chosen[-1]
        return LogPlan(self._commit(command, told, removed_until=chosen[-1]), told)

    def _commit(
        self,
        command: LogCommand,
        told: Told,
        events: Sequence[EventWrite] = (),
        tombstones: Sequence[int] = (),
        removed_until: int = 0,
    ) -> LogCommit:
        commit = LogCommit(
            seq=self.seq,
            at=told.at,
            transaction_id=command.transaction_id,
            first_cursor=self.last_cursor + 1 - len(events),
            events=list(events),
            tombstones=list(tombstones),
            removed_until=removed_until,
            result=encode_told(told) if command.transaction_id else b"",
        )
        self.seq += 1
        return commit


def _request(command: LogCommand) -> bytes:
    """Return the digest that a repeat is compared with; none of what is never remembered."""
    return digest(command) if command.transaction_id else b""


def _write(draft: EventDraft) -> EventWrite:
    return EventWrite(
        draft.type,
        draft.payload,
        dict(draft.metadata),
        draft.role,
        draft.session_id,
        draft.dedup_key,
        draft.supersedes,
        draft.source,
    )
