"""Turns commands into resolved commits: versions, times and targets are decided here, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.commits import Change, Commit, RowWrite, bound, encode_result
from mindgrid.shards.errors import PreconditionFailed
from mindgrid.shards.types import (
    Command,
    Delete,
    Deleted,
    Draft,
    Expire,
    ExpireAction,
    Expired,
    Result,
    Upsert,
    Upserted,
    Vector,
)


@dataclass(frozen=True, slots=True)
class Head:
    """The newest row of an id, as far as the next write of the id cares."""

    number: int
    version: int
    created_at: int
    valid_to: int
    deleted_at: int


class Heads(Protocol):
    """Where the newest row of an id is looked up."""

    def head(self, id: str) -> Head | None:
        """Return the id's newest row, None where it has none or was hard-deleted."""
        ...

    def to_expire(self, command: Expire, now: Instant) -> list[str]:
        """Return the ids of the records that `command` touches, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """A commit that is ready for the journal, its rows' vectors, and what its caller is told."""

    commit: Commit
    vectors: tuple[Vector, ...]
    result: Result


class Planner:
    """Plans the commands of one group; each sees what those before it will have done.

    An Expire must be the first: which records it touches is asked of the rows as they are.

    Nothing of it touches the shard: a command that fails leaves no trace, and a group that does
    not become durable is simply forgotten with its planner.
    """

    def __init__(self, heads: Heads, next_seq: int, next_number: int) -> None:
        self._heads = heads
        self._overlay: dict[str, Head | None] = {}
        self.next_seq = next_seq
        self.next_number = next_number

    def plan(self, command: Command, now: Instant) -> Planned:
        """Return the commit that carries out `command` at the instant `now`.

        Raises PreconditionFailed, after which the planner is as it was.
        """
        if isinstance(command, Upsert):
            return self._upsert(command, now)
        if isinstance(command, Delete):
            return self._delete(command, now)
        return self._expire(command, now)

    def _head(self, id: str) -> Head | None:
        return self._overlay[id] if id in self._overlay else self._heads.head(id)

    def _upsert(self, command: Upsert, now: Instant) -> Planned:
        for draft in command.drafts:
            head = self._head(draft.id)
            version = head.version if head else 0
            if draft.if_version is not None and draft.if_version != version:
                raise PreconditionFailed(draft.id, draft.if_version, version)
        first_number = self.next_number
        rows: list[RowWrite] = []
        changes: list[Change] = []
        for draft in command.drafts:
            row = self._row(draft, now)
            for target in draft.supersedes:
                change = self._supersede(target, draft.id, row.valid_from)
                if change:
                    changes.append(change)
            self._overlay[draft.id] = Head(
                self.next_number, row.version, row.created_at, row.valid_to, row.deleted_at
            )
            self.next_number += 1
            rows.append(row)
        result = Upserted(tuple(row.version for row in rows), now)
        commit = self._commit(command, result, first_number, rows, changes, [])
        return Planned(commit, tuple(draft.vector for draft in command.drafts), result)

    def _row(self, draft: Draft, now: Instant) -> RowWrite:
        head = self._head(draft.id)
        first_created = now if draft.created_at is None else draft.created_at
        return RowWrite(
            id=draft.id,
            content=draft.content,
            payload=draft.payload,
            metadata=dict(draft.metadata),
            created_at=head.created_at if head else first_created,
            valid_from=now if draft.valid_from is None else draft.valid_from,
            valid_to=bound(draft.valid_to),
            deleted_at=bound(draft.deleted_at),
            supersedes=list(draft.supersedes),
            source=draft.source,
            version=head.version + 1 if head else 1,
        )

    def _supersede(self, target: str, by: str, valid_from: int) -> Change | None:
        head = None if target == by else self._head(target)
        if head is None or head.deleted_at != NEVER or head.valid_to <= valid_from:
            return None
        return self._change(target, head, valid_from, head.deleted_at)

    def _change(self, id: str, head: Head, valid_to: int, deleted_at: int) -> Change:
        self._overlay[id] = Head(head.number, head.version, head.created_at, valid_to, deleted_at)
        return Change(head.number, valid_to, deleted_at)

    def _delete(self, command: Delete, now: Instant) -> Planned:
        head = self._head(command.id)
        changes: list[Change] = []
        erased: list[str] = []
        if head is not None and command.hard:
            erased = [command.id]
            self._overlay[command.id] = None
        elif head is not None and head.deleted_at == NEVER:
            changes = [self._change(command.id, head, head.valid_to, now)]
        result = Deleted(bool(changes or erased), now)
        commit = self._commit(command, result, self.next_number, [], changes, erased)
        return Planned(commit, (), result)

    def _expire(self, command: Expire, now: Instant) -> Planned:
        assert not self._overlay, "an Expire comes first in its group"
        ids = self._heads.to_expire(command, now)
        erased = ids if command.action is ExpireAction.HARD_DELETE else []
        changes: list[Change] = []
        for id in ids:
            head = self._heads.head(id)
            assert head is not None
            if command.action is ExpireAction.INVALIDATE:
                changes.append(self._change(id, head, now, head.deleted_at))
            elif command.action is ExpireAction.SOFT_DELETE:
                changes.append(self._change(id, head, head.valid_to, now))
            else:
                self._overlay[id] = None
        result = Expired(len(ids), now)
        commit = self._commit(command, result, self.next_number, [], changes, erased)
        return Planned(commit, (), result)

    def _commit(
        self,
        command: Command,
        result: Result,
        first_number: int,
        rows: list[RowWrite],
        changes: list[Change],
        erased: list[str],
    ) -> Commit:
        seq = self.next_seq
        self.next_seq += 1
        return Commit(
            seq=seq,
            at=result.committed_at,
            transaction_id=command.transaction_id,
            first_number=first_number,
            rows=rows,
            changes=changes,
            erased=erased,
            result=encode_result(result) if command.transaction_id else b"",
        )
