"""Turns commands into resolved commits: versions, times and targets are decided here, once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.commits import (
    NO_INSTANT,
    Change,
    Commit,
    Decides,
    RowWrite,
    bound,
    encode_result,
    note,
)
from mindgrid.shards.errors import PreconditionFailed
from mindgrid.shards.transactions import (
    Ask,
    Choose,
    Chosen,
    Decide,
    Decided,
    Doubts,
    Forget,
    Prepare,
    Reply,
    Request,
    Resolve,
    Resolved,
    ids_of,
    promised,
    proposal,
    whole,
)
from mindgrid.shards.types import (
    Command,
    Delete,
    Deleted,
    Draft,
    Expire,
    ExpireAction,
    Expired,
    Result,
    Supersession,
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

    def to_expire(self, command: Expire, now: Instant) -> list[tuple[Instant, str]]:
        """Return (created_at, id) of the records that `command` touches, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """A commit that is ready for the journal, its rows' vectors, and what its caller is told.

    Without a commit there is nothing to make durable.
    """

    commit: Commit | None
    vectors: tuple[Vector, ...]
    result: Result | Reply


class Planner:
    """Plans the commands of one group; each sees what those before it will have done.

    What chooses or expires records must be the first: which they are is asked of the rows as they
    are. Only the end of a promise may come later, for no one else touches its records.

    Nothing of it touches the shard: a command that fails leaves no trace, and a group that does
    not become durable is simply forgotten with its planner.
    """

    def __init__(self, heads: Heads, doubts: Doubts, next_seq: int, next_number: int) -> None:
        """Take what the shard holds; `doubts` is the planner's own."""
        self._heads = heads
        self._doubts = doubts
        self._overlay: dict[str, Head | None] = {}
        self.next_seq = next_seq
        self.next_number = next_number

    def plan(self, request: Command | Request, now: Instant) -> Planned:
        """Return the commit that carries out `request` at the instant `now`.

        Raises PreconditionFailed or Locked, after which the planner is as it was.
        """
        match request:
            case Upsert() | Delete() | Expire():
                commit, result = self._command(request, now)
                if request.transaction_id:
                    commit = replace(commit, result=encode_result(result))
                return self._planned(commit, request, result)
            case Choose(command):
                return Planned(None, (), Chosen(tuple(self._heads.to_expire(command, now))))
            case Prepare():
                return self._prepare(request, now)
            case Decide():
                return self._decide(request, proposal(now, request.votes))
            case Resolve(key, at):
                return self._resolve(key, at)
            case Ask(key):
                return self._ask(key, now)
            case Forget(key):
                return self._forget(key)

    def _planned(self, commit: Commit, command: Command | None, result: Result | Reply) -> Planned:
        """Count the commit; those planned after it see what it does."""
        note(self._doubts, commit)
        self.next_seq += 1
        self.next_number += len(commit.rows)
        vectors = [d.vector for d in command.drafts] if isinstance(command, Upsert) else []
        return Planned(commit, tuple(vectors), result)

    # Commits over several shards

    def _prepare(self, prepare: Prepare, now: Instant) -> Planned:
        command = prepare.command
        seen = dict(self._overlay)
        _, result = self._command(command, now)
        self._overlay = seen  # It was only tried.
        ends: list[Instant] = []
        if isinstance(command, Expire) and command.action is ExpireAction.INVALIDATE:
            heads = [self._heads.head(id) for _, id in self._heads.to_expire(command, now)]
            ends = [Instant(head.valid_to) for head in heads if head is not None]
        commit = replace(self._empty(now), prepares=prepare)
        return self._planned(commit, None, promised(now, result, ends))

    def _decide(self, decide: Decide, at: Instant) -> Planned:
        self._doubts.check_undecided(decide.key)
        commit, own = self._command(decide.command, at)
        decided = Decided(at, whole(own, decide))
        participants = tuple(shard for shard, _ in decide.votes)
        commit = replace(commit, decides=Decides(decide.key, at, decided, participants))
        if decide.command.transaction_id:
            assert decided.result is not None
            commit = replace(commit, result=encode_result(decided.result))
        return self._planned(commit, decide.command, decided)

    def _resolve(self, key: str, at: Instant | None) -> Planned:
        promise = self._doubts.promises.get(key)
        if promise is None:
            return Planned(None, (), Resolved())
        if at is None:
            return self._planned(replace(self._empty(), resolves=key), None, Resolved())
        free = self._doubts.copy()
        free.settle(key)
        locked, self._doubts = self._doubts, free
        commit, _ = self._command(promise.command, at)
        self._doubts = locked
        return self._planned(replace(commit, resolves=key), promise.command, Resolved())

    def _ask(self, key: str, now: Instant) -> Planned:
        known = self._doubts.decisions.get(key)
        if known is not None:
            return Planned(None, (), known.decided)
        given_up = Decided(None, None)
        commit = replace(self._empty(), decides=Decides(key, now, given_up, ()))
        return self._planned(commit, None, given_up)

    def _forget(self, key: str) -> Planned:
        if key not in self._doubts.decisions:
            return Planned(None, (), Resolved())
        return self._planned(replace(self._empty(), forgets=key), None, Resolved())

    def _empty(self, at: Instant = NO_INSTANT) -> Commit:
        return Commit(self.next_seq, at, "", self.next_number, [], [], [], b"")

    # Commands

    def _command(self, command: Command, now: Instant) -> tuple[Commit, Result]:
        """Return what `command` does at `now`, and note it in the overlay."""
        self._doubts.check(ids_of(command))
        if isinstance(command, Upsert):
            return self._upsert(command, now)
        if isinstance(command, Delete):
            return self._delete(command, now)
        return self._expire(command, now)

    def _head(self, id: str) -> Head | None:
        return self._overlay[id] if id in self._overlay else self._heads.head(id)

    def _upsert(self, command: Upsert, now: Instant) -> tuple[Commit, Upserted]:
        for draft in command.drafts:
            head = self._head(draft.id)
            version = head.version if head else 0
            if draft.if_version is not None and draft.if_version != version:
                raise PreconditionFailed(draft.id, draft.if_version, version)
        rows: list[RowWrite] = []
        changes: list[Change] = []
        theirs: dict[int, list[Supersession]] = {}
        for one in command.supersessions:
            theirs.setdefault(one.place, []).append(one)
        for place, draft in enumerate(command.drafts):
            changes += self._superseded(theirs.get(place, ()), now)
            row = self._row(draft, now)
            for target in draft.supersedes:
                change = self._supersede(target, draft.id, row.valid_from)
                if change:
                    changes.append(change)
            number = self.next_number + place
            self._overlay[draft.id] = Head(
                number, row.version, row.created_at, row.valid_to, row.deleted_at
            )
            rows.append(row)
        changes += self._superseded(theirs.get(len(command.drafts), ()), now)
        result = Upserted(tuple(row.version for row in rows), now)
        return self._commit(command, now, rows=rows, changes=changes), result

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

    def _superseded(self, theirs: Iterable[Supersession], now: Instant) -> Iterator[Change]:
        """Yield what drafts of other shards change."""
        for one in theirs:
            valid_from = now if one.valid_from is None else one.valid_from
            change = self._supersede(one.target, "", valid_from)
            if change:
                yield change

    def _supersede(self, target: str, by: str, valid_from: int) -> Change | None:
        head = None if target == by else self._head(target)
        if head is None or head.deleted_at != NEVER or head.valid_to <= valid_from:
            return None
        return self._change(target, head, valid_from, head.deleted_at)

    def _change(self, id: str, head: Head, valid_to: int, deleted_at: int) -> Change:
        self._overlay[id] = Head(head.number, head.version, head.created_at, valid_to, deleted_at)
        return Change(head.number, valid_to, deleted_at)

    def _delete(self, command: Delete, now: Instant) -> tuple[Commit, Deleted]:
        head = self._head(command.id)
        changes: list[Change] = []
        erased: list[str] = []
        if head is not None and command.hard:
            erased = [command.id]
            self._overlay[command.id] = None
        elif head is not None and head.deleted_at == NEVER:
            changes = [self._change(command.id, head, head.valid_to, now)]
        result = Deleted(bool(changes or erased), now)
        return self._commit(command, now, changes=changes, erased=erased), result

    def _expire(self, command: Expire, now: Instant) -> tuple[Commit, Expired]:
        ids = [id for _, id in self._heads.to_expire(command, now)]
        self._doubts.check(ids)
        assert not self._overlay.keys() & ids, "what expires records comes first in its group"
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
        commit = self._commit(command, now, changes=changes, erased=erased)
        return commit, Expired(len(ids), now)

    def _commit(
        self,
        command: Command,
        at: Instant,
        rows: Sequence[RowWrite] = (),
        changes: Sequence[Change] = (),
        erased: Sequence[str] = (),
    ) -> Commit:
        return Commit(
            seq=self.next_seq,
            at=at,
            transaction_id=command.transaction_id,
            first_number=self.next_number,
            rows=list(rows),
            changes=list(changes),
            erased=list(erased),
            result=b"",
        )
