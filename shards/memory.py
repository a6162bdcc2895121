"""The `memory` driver: brute force over a dict, so plain that it is the oracle of every test."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from msgspec import structs

from mindgrid.shards.checks import check_repeat, numeric
from mindgrid.shards.clock import Clock, Instant
from mindgrid.shards.config import ShardConfig
from mindgrid.shards.driver import Found, ShardStatus
from mindgrid.shards.errors import InvalidRequest, MindgridError, PreconditionFailed, Unavailable
from mindgrid.shards.scores import cosine
from mindgrid.shards.types import (
    NO_VECTOR,
    Answer,
    Command,
    Delete,
    Deleted,
    Draft,
    Expire,
    ExpireAction,
    Expired,
    Hit,
    Predicate,
    PredicateOp,
    Query,
    Record,
    Result,
    Selection,
    Stamp,
    Upsert,
    Upserted,
    Want,
)


@dataclass(slots=True)
class _Version:
    """One write of a record, and every state of it since: (known from, record), newest last."""

    committed_at: Instant
    states: list[tuple[Instant, Record]] = field(default_factory=list)

    def known_at(self, instant: Instant) -> Record:
        return next(record for since, record in reversed(self.states) if since <= instant)


class MemoryShard:
    """A `SemanticShard` that keeps every version of every record in a dict and scans it."""

    def __init__(self, config: ShardConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._versions: dict[str, list[_Version]] = {}
        self._transactions: dict[str, Result] = {}
        self._transaction_times: dict[str, Instant] = {}
        self._last_commit = Instant(0)
        self._floor = Instant(0)
        self._closed = False

    def submit(self, command: Command) -> Future[Result]:
        """Apply `command` at once; see `SemanticShard.submit`."""
        done: Future[Result] = Future()
        with self._lock:
            try:
                done.set_result(self._commit(command))
            except MindgridError as error:
                done.set_exception(error)
        return done

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        """Compare every visible record; see `SemanticShard.search`."""
        with self._lock:
            instant = self._read_instant(stamp)
            return [self._search(query, instant) for query in queries]

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        """Return the records with these ids; see `SemanticShard.get`."""
        with self._lock:
            instant = self._read_instant(stamp)
            try:
                known_at, as_of = _instants(selection, instant)
            except InvalidRequest as error:
                return error
            found = [self._visible(id, selection, known_at, as_of) for id in ids]
            return Found(tuple(r and _cut(r, want) for r in found), instant)

    def status(self) -> ShardStatus:
        """Count what the dict holds."""
        with self._lock:
            rows = sum(len(versions) for versions in self._versions.values())
            return ShardStatus(rows, len(self._versions), rows, 0, 0, 0, 0, self._last_commit)

    def close(self) -> None:
        """Refuse further work."""
        self._closed = True

    def _commit(self, command: Command) -> Result:
        if self._closed:
            raise Unavailable("shard", "it is closed")
        self._forget_transactions()
        if command.transaction_id in self._transactions:
            first = self._transactions[command.transaction_id]
            check_repeat(command, first)
            return first
        now = Instant(max(self._clock.now(), self._floor + 1))
        if isinstance(command, Upsert):
            result: Result = self._upsert(command, now)
        elif isinstance(command, Delete):
            result = self._delete(command, now)
        else:
            result = self._expire(command, now)
        self._floor = self._last_commit = now
        if command.transaction_id:
            self._transactions[command.transaction_id] = result
            self._transaction_times[command.transaction_id] = now
        return result

    def _forget_transactions(self) -> None:
        horizon = self._clock.now() - int(self._config.transactions_kept_s * 1e6)
        for transaction_id, at in list(self._transaction_times.items()):
            if at < horizon:
                del self._transactions[transaction_id], self._transaction_times[transaction_id]

    def _upsert(self, command: Upsert, now: Instant) -> Upserted:
        for draft in command.drafts:
            current = self._newest(draft.id)
            version = current.version if current else 0
            if draft.if_version is not None and draft.if_version != version:
                raise PreconditionFailed(draft.id, draft.if_version, version)
        return Upserted(tuple(self._write(draft, now) for draft in command.drafts), now)

    def _write(self, draft: Draft, now: Instant) -> int:
        current = self._newest(draft.id)
        first_created = draft.created_at if draft.created_at is not None else now
        record = Record(
            id=draft.id,
            content=draft.content,
            vector=draft.vector,
            payload=draft.payload,
            metadata=dict(draft.metadata),
            created_at=current.created_at if current else first_created,
            valid_from=draft.valid_from if draft.valid_from is not None else now,
            valid_to=draft.valid_to,
            deleted_at=draft.deleted_at,
            supersedes=draft.supersedes,
            source=draft.source,
            version=current.version + 1 if current else 1,
        )
        for target in draft.supersedes:
            if target != draft.id:
                self._supersede(target, record.valid_from, now)
        self._versions.setdefault(draft.id, []).append(_Version(now, [(now, record)]))
        return record.version

    def _supersede(self, target: str, valid_from: Instant, now: Instant) -> None:
        current = self._newest(target)
        if current is None or current.deleted_at is not None:
            return
        if current.valid_to is None or current.valid_to > valid_from:
            self._change(structs.replace(current, valid_to=valid_from), now)

    def _delete(self, command: Delete, now: Instant) -> Deleted:
        current = self._newest(command.id)
        if current is None:
            return Deleted(False, now)
        if command.hard:
            del self._versions[command.id]
            return Deleted(True, now)
        if current.deleted_at is not None:
            return Deleted(False, now)
        self._change(structs.replace(current, deleted_at=now), now)
        return Deleted(True, now)

    def _expire(self, command: Expire, now: Instant) -> Expired:
        newest = [versions[-1].states[-1][1] for versions in self._versions.values()]
        matching = [
            record
            for record in newest
            if _selects(Selection(command.equals), record) and _applies(command.action, record, now)
        ]
        matching.sort(key=lambda record: (record.created_at, record.id))
        for record in matching[: command.max_rows]:
            if command.action is ExpireAction.INVALIDATE:
                self._change(structs.replace(record, valid_to=now), now)
            elif command.action is ExpireAction.SOFT_DELETE:
                self._change(structs.replace(record, deleted_at=now), now)
            else:
                del self._versions[record.id]
        return Expired(min(len(matching), command.max_rows), now)

    def _newest(self, id: str) -> Record | None:
        versions = self._versions.get(id)
        return versions[-1].states[-1][1] if versions else None

    def _change(self, record: Record, now: Instant) -> None:
        self._versions[record.id][-1].states.append((now, record))

    def _read_instant(self, stamp: Stamp) -> Instant:
        instant = stamp.at if stamp.exactly else Instant(max(stamp.at, self._last_commit))
        self._floor = Instant(max(self._floor, instant))
        return instant

    def _search(self, query: Query, instant: Instant) -> Answer | MindgridError:
        try:
            known_at, as_of = _instants(query.selection, instant)
        except InvalidRequest as error:
            return error
        records = [
            record
            for id in self._versions
            if (record := self._visible(id, query.selection, known_at, as_of))
        ]
        scored = [(cosine(record.vector[None, :], query.vector)[0], record) for record in records]
        scored.sort(key=lambda pair: (-pair[0], pair[1].id))
        hits = tuple(
            Hit(record.id, float(score), _cut(record, query.want) if query.want else None)
            for score, record in scored[: query.top_k]
        )
        return Answer(hits, instant, exact=True, scanned=len(records))

    def _visible(
        self, id: str, selection: Selection, known_at: Instant, as_of: Instant
    ) -> Record | None:
        versions = [v for v in self._versions.get(id, ()) if v.committed_at <= known_at]
        if not versions:
            return None
        record = versions[-1].known_at(known_at)
        valid = (
            record.deleted_at is None
            and record.valid_from <= as_of
            and (record.valid_to is None or as_of < record.valid_to)
        )
        shown = (valid or selection.include_invalidated) and _selects(selection, record)
        return record if shown else None


def _instants(selection: Selection, instant: Instant) -> tuple[Instant, Instant]:
    if selection.known_at is not None and selection.known_at > instant:
        raise InvalidRequest("known_at", "lies in the future of the store")
    known_at = instant if selection.known_at is None else selection.known_at
    return known_at, known_at if selection.as_of is None else selection.as_of


def _applies(action: ExpireAction, record: Record, now: Instant) -> bool:
    if action is ExpireAction.HARD_DELETE:
        return True
    if record.deleted_at is not None:
        return False
    longer = record.valid_to is None or record.valid_to > now
    return longer or action is ExpireAction.SOFT_DELETE


def _selects(selection: Selection, record: Record) -> bool:
    after, before = selection.created_after, selection.created_before
    return (
        all(record.metadata.get(key) == value for key, value in selection.equals.items())
        and all(_matches(predicate, record) for predicate in selection.predicates)
        and (after is None or record.created_at > after)
        and (before is None or record.created_at < before)
    )


def _matches(predicate: Predicate, record: Record) -> bool:
    stored = record.metadata.get(predicate.key)
    if stored is None:
        return False
    if predicate.op is PredicateOp.EQ:
        return stored == predicate.values[0]
    if predicate.op is PredicateOp.NEQ:
        return stored != predicate.values[0]
    if predicate.op is PredicateOp.IN:
        return stored in predicate.values
    value, bound = numeric(stored), numeric(predicate.values[0])
    assert bound is not None, "checks.py refuses a bound that is no number"
    if value is None:
        return False
    return {
        PredicateOp.GT: value > bound,
        PredicateOp.GTE: value >= bound,
        PredicateOp.LT: value < bound,
        PredicateOp.LTE: value <= bound,
    }[predicate.op]


def _cut(record: Record, want: Want) -> Record:
    """Return the record without the parts that were not asked for."""
    return structs.replace(
        record,
        payload=record.payload if want & Want.PAYLOAD else b"",
        vector=record.vector if want & Want.VECTOR else NO_VECTOR,
    )
