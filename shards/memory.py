"""The `memory` driver: brute force over a dict, so plain that it is the oracle of every test."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from mindgrid.shards.analysis import analyzer_of
from mindgrid.shards.checks import check_repeat, numeric
from mindgrid.shards.clock import Clock, Instant
from mindgrid.shards.config import ShardConfig
from mindgrid.shards.driver import Found, ShardStatus
from mindgrid.shards.errors import (
    InDoubt,
    InvalidRequest,
    MindgridError,
    PreconditionFailed,
    Unavailable,
)
from mindgrid.shards.scores import WordStats, bm25, cosine
from mindgrid.shards.transactions import (
    Ask,
    Choose,
    Chosen,
    Decide,
    Decided,
    Decision,
    Doubts,
    Forget,
    Prepare,
    Promise,
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
    Mode,
    Predicate,
    PredicateOp,
    Query,
    Record,
    Result,
    Scan,
    Scanned,
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
        self._analyzer = analyzer_of(config.text_search)
        self._clock = clock
        self._lock = threading.Condition()
        self._versions: dict[str, list[_Version]] = {}
        self._transactions: dict[str, Result] = {}
        self._transaction_times: dict[str, Instant] = {}
        self._doubts = Doubts()
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

    def transact(self, request: Request) -> Future[Reply]:
        """Take a step of a commit over several shards at once; see `SemanticShard.transact`."""
        done: Future[Reply] = Future()
        with self._lock:
            try:
                done.set_result(self._take_step(request))
            except MindgridError as error:
                done.set_exception(error)
            self._lock.notify_all()
        return done

    def doubts(self) -> Doubts:
        """Return a copy; see `SemanticShard.doubts`."""
        with self._lock:
            return self._doubts.copy()

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        """Compare every visible record; see `SemanticShard.search`."""
        with self._lock:
            instant = self._read_instant(stamp)
            if self._doubts.concern(instant):
                return [InDoubt("shard", instant)] * len(queries)
            return [self._search(query, instant) for query in queries]

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        """Return the records with these ids; see `SemanticShard.get`."""
        with self._lock:
            instant = self._read_instant(stamp)
            if self._doubts.concern(instant):
                return InDoubt("shard", instant)
            try:
                known_at, as_of = _instants(selection, instant)
            except InvalidRequest as error:
                return error
            found = [self._visible(id, selection, known_at, as_of) for id in ids]
            return Found(tuple(r and _cut(r, want) for r in found), instant)

    def scan(self, scan: Scan, stamp: Stamp) -> Scanned | MindgridError:
        """Look at every record; see `SemanticShard.scan`."""
        with self._lock:
            instant = self._read_instant(stamp)
            if self._doubts.concern(instant):
                return InDoubt("shard", instant)
            try:
                known_at, as_of = _instants(scan.selection, instant)
            except InvalidRequest as error:
                return error
            visible = [
                record
                for id in sorted(self._versions)
                if (record := self._visible(id, scan.selection, known_at, as_of))
            ]
            behind = [record for record in visible if record.id > scan.after]
            page = tuple(_cut(record, scan.want) for record in behind[: scan.limit])
            more = len(behind) > len(page) > 0
            return Scanned(page, more, len(visible), instant)

    def wait_settled(self, instant: Instant, wait_s: float) -> None:
        """See `SemanticShard.wait_settled`."""
        with self._lock:
            self._lock.wait_for(lambda: not self._doubts.concern(instant), wait_s)

    def status(self) -> ShardStatus:
        """Count what the dict holds."""
        with self._lock:
            rows = sum(len(versions) for versions in self._versions.values())
            return ShardStatus(rows, len(self._versions), rows, 0, 0, 0, 0, self._last_commit)

    def close(self) -> None:
        """Refuse further work."""
        self._closed = True

    def _commit(self, command: Command) -> Result:
        earlier = self._earlier(command, None)
        if earlier is not None:
            return earlier
        now = self._next_instant()
        result = self._apply(command, now)
        self._remember(command, result)
        return result

    def _take_step(self, request: Request) -> Reply:
        now = self._next_instant()
        match request:
            case Choose(command):
                return Chosen(tuple((r.created_at, r.id) for r in self._to_expire(command, now)))
            case Prepare(key, home, command):
                before, last_commit = self._copy_of_versions(), self._last_commit
                ends = [r.valid_to for r in self._ends(command, now)]
                result = self._apply(command, now)
                self._versions, self._last_commit = before, last_commit  # It was only tried.
                self._floor = now
                self._doubts.promise(key, Promise(0, now, home, command))
                return promised(now, result, [end for end in ends if end is not None])
            case Decide(key, command, votes, order):
                earlier = self._earlier(command, len(order))
                if earlier is not None:
                    assert not isinstance(earlier, Deleted)
                    return Decided(None, earlier)
                self._doubts.check_undecided(key)
                at = proposal(now, votes)
                decided = Decided(at, whole(self._apply(command, at), request))
                assert decided.result is not None
                self._remember(command, decided.result)
                participants = tuple(shard for shard, _ in votes)
                self._doubts.decisions[key] = Decision(now, decided, participants)
                return decided
            case Resolve(key, at):
                promise = self._doubts.promises.get(key)
                if promise is not None:
                    self._doubts.settle(key)
                    if at is not None:
                        self._apply(promise.command, at)
                return Resolved()
            case Ask(key):
                given_up = Decision(now, Decided(None, None), ())
                return self._doubts.decisions.setdefault(key, given_up).decided
            case Forget(key):
                self._doubts.forget(key)
                return Resolved()

    def _copy_of_versions(self) -> dict[str, list[_Version]]:
        return {
            id: [_Version(version.committed_at, list(version.states)) for version in versions]
            for id, versions in self._versions.items()
        }

    def _next_instant(self) -> Instant:
        if self._closed:
            raise Unavailable("shard", "it is closed")
        self._forget_transactions()
        return Instant(max(self._clock.now(), self._floor + 1))

    def _earlier(self, command: Command, drafts: int | None) -> Result | None:
        first = self._transactions.get(command.transaction_id)
        if first is not None:
            check_repeat(command, first, drafts)
        return first

    def _apply(self, command: Command, now: Instant) -> Result:
        self._doubts.check(ids_of(command))
        if isinstance(command, Upsert):
            result: Result = self._upsert(command, now)
        elif isinstance(command, Delete):
            result = self._delete(command, now)
        else:
            result = self._expire(command, now)
        self._last_commit = Instant(max(self._last_commit, now))
        self._floor = Instant(max(self._floor, now))
        return result

    def _remember(self, command: Command, result: Result) -> None:
        if command.transaction_id:
            self._transactions[command.transaction_id] = result
            self._transaction_times[command.transaction_id] = result.committed_at

    def _forget_transactions(self) -> None:
        horizon = self._clock.now() - int(self._config.transactions_kept_s * 1e6)
        for transaction_id, at in list(self._transaction_times.items()):
            if at < horizon:
                del self._transactions[transaction_id], self._transaction_times[transaction_id]
        self._doubts.forget_given_up(Instant(horizon))

    def _upsert(self, command: Upsert, now: Instant) -> Upserted:
        for draft in command.drafts:
            current = self._newest(draft.id)
            version = current.version if current else 0
            if draft.if_version is not None and draft.if_version != version:
                raise PreconditionFailed(draft.id, draft.if_version, version)
        versions: list[int] = []
        for draft in command.drafts:
            self._supersede_for_others(command, len(versions), now)
            versions.append(self._write(draft, now))
        self._supersede_for_others(command, len(versions), now)
        return Upserted(tuple(versions), now)

    def _supersede_for_others(self, command: Upsert, place: int, now: Instant) -> None:
        for one in command.supersessions:
            if one.place == place:
                valid_from = now if one.valid_from is None else one.valid_from
                self._supersede(one.target, valid_from, now)

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
        records = self._to_expire(command, now)
        self._doubts.check(record.id for record in records)
        for record in records:
            if command.action is ExpireAction.INVALIDATE:
                self._change(structs.replace(record, valid_to=now), now)
            elif command.action is ExpireAction.SOFT_DELETE:
                self._change(structs.replace(record, deleted_at=now), now)
            else:
                del self._versions[record.id]
        return Expired(len(records), now)

    def _to_expire(self, command: Expire, now: Instant) -> list[Record]:
        newest = [versions[-1].states[-1][1] for versions in self._versions.values()]
        matching = [
            record
            for record in newest
            if (command.ids is None or record.id in command.ids)
            and _selects(Selection(command.equals), record)
            and _applies(command.action, record, now)
        ]
        matching.sort(key=lambda record: (record.created_at, record.id))
        return matching[: command.max_rows]

    def _ends(self, command: Upsert | Expire, now: Instant) -> list[Record]:
        if isinstance(command, Expire) and command.action is ExpireAction.INVALIDATE:
            return self._to_expire(command, now)
        return []

    def _newest(self, id: str) -> Record | None:
        versions = self._versions.get(id)
        return versions[-1].states[-1][1] if versions else None

    def _change(self, record: Record, now: Instant) -> None:
        self._versions[record.id][-1].states.append((now, record))

    def _read_instant(self, stamp: Stamp) -> Instant:
        newest = Instant(max(stamp.at, self._last_commit, self._doubts.latest))
        instant = stamp.at if stamp.exactly else newest
        self._floor = Instant(max(self._floor, instant))
        return instant

    def _search(self, query: Query, instant: Instant) -> Answer | MindgridError:
        try:
            known_at, as_of = _instants(query.selection, instant)
        except InvalidRequest as error:
            return error
        stats = query.stats
        if query.mode is Mode.SPARSE and stats is None:
            stats = self._word_stats(query.text, known_at)
            if query.top_k == 0:
                return Answer((), instant, exact=True, scanned=0, stats=stats)
        records = [
            record
            for id in self._versions
            if (record := self._visible(id, query.selection, known_at, as_of))
        ]
        if query.mode is Mode.SPARSE:
            assert stats is not None
            scored = self._by_words(query.text, stats, records)
        else:
            scored = [(cosine(r.vector[None, :], query.vector)[0], r) for r in records]
        scored.sort(key=lambda pair: (-pair[0], pair[1].id))
        hits = tuple(
            Hit(record.id, float(score), _cut(record, query.want) if query.want else None)
            for score, record in scored[: query.top_k]
        )
        return Answer(hits, instant, exact=True, scanned=len(records))

    def _word_stats(self, text: str, known_at: Instant) -> WordStats:
        """Count over the newest row of each id, whatever its validity."""
        newest = [self._known(id, known_at) for id in self._versions]
        documents = [self._analyzer.document(r.content) for r in newest if r is not None]
        frequencies = [
            sum(term in document.terms for document in documents)
            for term in dict.fromkeys(self._analyzer.query(text))
        ]
        length = sum(document.length for document in documents)
        return WordStats(len(documents), length, tuple(frequencies))

    def _by_words(
        self, text: str, stats: WordStats, records: Sequence[Record]
    ) -> list[tuple[np.float32, Record]]:
        weights = stats.weights(self._analyzer.query(text))
        scored: list[tuple[np.float32, Record]] = []
        for record in records:
            document = self._analyzer.document(record.content)
            found = [term for term in weights if term in document.terms]
            if found:
                parts = bm25(
                    np.array([document.terms.count(term) for term in found]),
                    np.full(len(found), document.length, np.int32),
                    np.array([weights[term] for term in found]),
                    stats.mean_length,
                )
                score = 0.0
                for part in parts.tolist():  # `sum` compensates in later Pythons.
                    score += part
                scored.append((np.float32(score), record))
        return scored

    def _known(self, id: str, known_at: Instant) -> Record | None:
        versions = [v for v in self._versions.get(id, ()) if v.committed_at <= known_at]
        return versions[-1].known_at(known_at) if versions else None

    def _visible(
        self, id: str, selection: Selection, known_at: Instant, as_of: Instant
    ) -> Record | None:
        record = self._known(id, known_at)
        if record is None:
            return None
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
    if not want & Want.VALUES:
        record = structs.replace(record, content="", metadata={}, source="", supersedes=())
    return structs.replace(
        record,
        payload=record.payload if want & Want.PAYLOAD else b"",
        vector=record.vector if want & Want.VECTOR else NO_VECTOR,
    )
