"""The `lance` driver: one durable shard of a semantic namespace.

    submit ─► queue ─► one group: plan ─► journal (one fsync) ─► apply ─► answer
                                                     │
                      maintenance: seal ─► merge ─► index ─► manifest, journal trimmed

Commits that arrive while a group is made durable wait and go together in the next one. A group is
planned and applied under the store's lock; the disk is waited for outside of it, so searches go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from mindgrid.shards import commits, manifest
from mindgrid.shards.checks import check_repeat
from mindgrid.shards.clock import Clock, Instant
from mindgrid.shards.config import ShardConfig
from mindgrid.shards.driver import Found, ShardStatus
from mindgrid.shards.errors import Corruption, Exhausted, MindgridError, Unavailable
from mindgrid.shards.files import create_folder, remove_orphans
from mindgrid.shards.folders import check_folders
from mindgrid.shards.groups import Groups, Pending, Workers
from mindgrid.shards.journal import JOURNAL_NAME, Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock
from mindgrid.shards.maintenance import Maintenance
from mindgrid.shards.manifest import Manifest
from mindgrid.shards.plan import Planned, Planner
from mindgrid.shards.segments import Segment, change_columns
from mindgrid.shards.sizes import draft_bytes
from mindgrid.shards.store import Store
from mindgrid.shards.transactions import (
    Choose,
    Chosen,
    Decide,
    Decided,
    Doubts,
    Prepare,
    Reply,
    Request,
)
from mindgrid.shards.types import (
    Answer,
    Command,
    Delete,
    Deleted,
    Draft,
    Expire,
    Expired,
    Query,
    Result,
    Scan,
    Scanned,
    Selection,
    Stamp,
    Upsert,
    Upserted,
    Want,
)

_UNSEALED_FACTOR = 4
"""Writes are refused when the journal is so many times as large as when it is to be sealed."""
_GROUP_BYTES_MAX = 64 * 2**20
"""A group ends with the command that reaches this; one SQLite blob holds 1 GB at most."""
_QUIET_SHARE = 1 / 12
"""Of `seal_after_s`: after so long without a write a tail is sealed before its time."""
_Pending = Pending[Command | Request]
"""Its future is of the Result of a Command, or the Reply to a Request."""


class LanceShard:
    """A `SemanticShard` on disk. Made by `open`; one owner at a time."""

    def __init__(
        self,
        lock: FolderLock,
        journal: Journal,
        store: Store,
        maintenance: Maintenance,
        config: ShardConfig,
        clock: Clock,
        workers: Workers,
    ) -> None:
        """Not for callers: see `open`."""
        self._lock = lock
        self._journal = journal
        self._store = store
        self._maintenance = maintenance
        self._config = config
        self._clock = clock
        self._groups = Groups[Command | Request](lock.folder, self, workers)
        self._name = lock.folder.name
        self._results: dict[str, tuple[Instant, Result]] = {}
        self._next_number = maintenance.manifest.next_number
        self._commits_from_s = time.monotonic() + config.skew_max_s
        self._last_seal_s = self._last_write_s = time.monotonic()
        self._last_trim = Instant(0)
        self._erased_since_s: float | None = None
        self._unsealed_bytes = 0
        """Of the journal's entries that no segment holds yet; its file may be larger."""

    @classmethod
    def open(
        cls, folder: Path, config: ShardConfig, epoch: int, clock: Clock, workers: Workers
    ) -> LanceShard:
        """Take the folder, check every byte it names, and read it into RAM.

        Raises StorageLocked, Corruption, Moved (a newer epoch owns it) or Unavailable; the folder
        is then as it was, and free.
        """
        create_folder(folder)
        lock = FolderLock(folder)
        try:
            journal = Journal(lock, epoch, _check_named)
            try:
                return cls._load(lock, journal, config, clock, workers)
            except BaseException:
                journal.close()
                raise
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _load(
        cls,
        lock: FolderLock,
        journal: Journal,
        config: ShardConfig,
        clock: Clock,
        workers: Workers,
    ) -> LanceShard:
        folder = lock.folder
        current = _manifest_in(journal)
        named = {name for name, _ in current.folders}
        remove_orphans(folder, named | {path.name for path in folder.iterdir() if path.is_file()})
        store = Store(config)
        dimensions = config.space.dimensions
        store.segments = tuple(
            Segment(folder / info.folder, info, dimensions, store.analyzer)
            for info in current.segments
        )
        for segment in store.segments:
            if segment.info.rows:
                store.rows.add(segment.columns())
        for segment in store.segments:
            store.rows.load_changes(*change_columns(segment.changes()))
        store.rows.erase(current.erased)
        store.rows.last_commit = current.last_commit
        store.last_seq = current.covered_seq
        store.history_floor = Instant(current.floor)
        store.doubts.decisions.update(current.decisions)
        store.relayout()
        keeper = Maintenance(folder, config, journal, store, clock, current)
        if current.index is not None and (loaded := keeper.load_index(current.index)):
            store.index, store.indexed = loaded
        shard = cls(lock, journal, store, keeper, config, clock, workers)
        shard._replay(current)
        return shard

    def _replay(self, current: Manifest) -> None:
        for entry in self._journal.replay(self._journal.trimmed_seq):
            if entry.last_seq > current.covered_seq:
                self._unsealed_bytes += len(entry.payload)
            try:
                group, vectors = commits.decode_group(entry.payload, self._config.space.dimensions)
            except (msgspec.MsgspecError, ValueError) as error:
                problem = f"entry {entry.first_seq} cannot be read: {error}"
                raise Corruption(str(self._lock.folder / JOURNAL_NAME), problem) from error
            at = 0
            for commit in group:
                if commit.seq > current.covered_seq:
                    self._store.apply([commit], vectors[at : at + len(commit.rows)])
                    self._next_number = commit.first_number + len(commit.rows)
                else:
                    self._store.recall(commit)
                at += len(commit.rows)
        for transaction in self._journal.transactions():
            result = commits.decode_result(transaction.result)
            self._results[transaction.id] = (transaction.time, result)
        store = self._store
        store.floor = Instant(max(store.floor, store.rows.last_commit, store.doubts.latest))

    @property
    def counters(self) -> dict[str, int]:
        """How often each path was taken since the shard was opened."""
        return dict(self._store.counters)

    def submit(self, command: Command) -> Future[Result]:
        """See `SemanticShard.submit`."""
        return self._groups.enqueue(command, self._refusal())

    def transact(self, request: Request) -> Future[Reply]:
        """See `SemanticShard.transact`."""
        return self._groups.enqueue(request, self._refusal())

    def doubts(self) -> Doubts:
        """See `SemanticShard.doubts`."""
        if self._store.doubts.are_none:
            return Doubts()  # Asked every second of every shard: without the lock.
        with self._store.lock:
            return self._store.doubts.copy()

    def _refusal(self) -> Exhausted | None:
        limit = _UNSEALED_FACTOR * self._config.journal_bytes_max
        if self._unsealed_bytes < limit:
            return None
        return Exhausted(f"the unsealed journal of shard {self._name}", limit)

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        """See `SemanticShard.search`."""
        try:
            return self._store.search(queries, stamp)
        except MindgridError as error:
            return [error for _ in queries]

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        """See `SemanticShard.get`."""
        try:
            return self._store.get(ids, selection, want, stamp)
        except MindgridError as error:
            return error

    def scan(self, scan: Scan, stamp: Stamp) -> Scanned | MindgridError:
        """See `SemanticShard.scan`."""
        try:
            return self._store.scan(scan, stamp)
        except MindgridError as error:
            return error

    def wait_settled(self, instant: Instant, wait_s: float) -> None:
        """See `SemanticShard.wait_settled`."""
        store = self._store
        with store.lock:
            store.lock.wait_for(
                lambda: store.failure is not None or not store.doubts.concern(instant), wait_s
            )

    def status(self) -> ShardStatus:
        """See `SemanticShard.status`."""
        store, journal = self._store, self._journal.status()
        with store.lock:
            return ShardStatus(
                rows=len(store.rows),
                records=store.rows.records,
                tail_rows=len(store.tail_rows),
                segments=len(store.segments),
                indexed_rows=store.indexed,
                journal_groups=journal.entries,
                journal_bytes=journal.bytes,
                last_commit=Instant(store.rows.last_commit),
            )

    def close(self) -> None:
        """See `SemanticShard.close`."""
        self._groups.close()
        self._journal.close()
        self._lock.release()

    def tend(self) -> None:
        """Start maintenance in the background if any is due; hosts call this every few seconds."""
        if self._due() or self._purge_due():
            self._groups.start_maintenance()

    def maintain(self) -> None:
        """Seal, merge and index what is due, in this thread, unless another does so already."""
        self._groups.maintain()

    def compact(self) -> None:
        """Remove every byte of hard-deleted records, and all that is older than the history."""
        with self._groups.maintaining():
            self._maintenance.compact()

    def take(self, queue: deque[_Pending]) -> list[_Pending]:
        """See `Work.take`."""
        group: list[_Pending] = []
        rows = size = 0
        while queue and rows < self._config.group_rows_max and size < _GROUP_BYTES_MAX:
            if group and _expires(queue[0].request):
                break
            pending = queue.popleft()
            drafts = _drafts(pending.request)
            rows += max(1, len(drafts))
            size += sum(map(draft_bytes, drafts))
            group.append(pending)
        return group

    def commit(self, group: list[_Pending]) -> None:
        """See `Work.commit`."""
        wait_s = self._commits_from_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        store = self._store
        answers: list[tuple[_Pending, Result | Reply | MindgridError]] = []
        planned: list[Planned] = []
        with store.lock:
            planner = Planner(
                store.rows, store.doubts.copy(), store.last_seq + 1, self._next_number
            )
            known: dict[str, Result] = {}
            for pending in group:
                now = Instant(max(self._clock.now(), store.floor + 1))
                try:
                    earlier = self._earlier(pending.request, known)
                    if earlier is not None:
                        answers.append((pending, earlier))
                        continue
                    plan = planner.plan(pending.request, now)
                except MindgridError as error:
                    answers.append((pending, error))
                    continue
                answers.append((pending, plan.result))
                if plan.commit is None:
                    continue
                store.floor = Instant(max(store.floor, plan.commit.at))
                if plan.commit.transaction_id:
                    known[plan.commit.transaction_id] = _told(plan.result)
                planned.append(plan)
            if planned:
                # Who reads before the end of a promise waits for it anyway.
                times = [one.at for one in _commits(planned) if one.at and not one.resolves]
                store.in_flight = Instant(min(times)) if times else None
        try:
            if planned:
                self._append(planned)
                with store.lock:
                    store.apply(
                        _commits(planned), [vector for plan in planned for vector in plan.vectors]
                    )
                    self._next_number = planner.next_number
        except BaseException as error:
            if not (isinstance(error, Unavailable) and self._journal.is_usable):
                # Before the reads that wait for this group go on: the disk may hold it or not.
                with store.lock:
                    store.failure = _unknown_outcome(self._name, error)
                raise
            # The disk is full: nothing was written, and reads go on.
            planned = []
            answers = [
                (pending, answer if self._is_settled(pending, answer) else error)
                for pending, answer in answers
            ]
        finally:
            with store.lock:
                store.in_flight = None
                store.lock.notify_all()
        for plan in planned:
            if plan.commit is not None and plan.commit.transaction_id:
                at = Instant(plan.commit.at)
                self._results[plan.commit.transaction_id] = (at, _told(plan.result))
        for pending, answer in answers:
            if isinstance(answer, MindgridError):
                pending.done.set_exception(answer)
            else:
                pending.done.set_result(answer)
        self._forget_results()
        self._last_write_s = time.monotonic()
        if self._due():
            self._groups.start_maintenance()

    def _earlier(
        self, request: Command | Request, known: Mapping[str, Result]
    ) -> Result | Decided | None:
        """Return what the transaction was told before, in this group or an earlier one."""
        command = request.command if isinstance(request, Decide) else request
        if not isinstance(command, Upsert | Delete | Expire):
            return None
        first = known.get(command.transaction_id) or self._remembered(command.transaction_id)
        if first is None:
            return None
        if not isinstance(request, Decide):
            check_repeat(command, first)
            return first
        check_repeat(command, first, drafts=len(request.order))
        assert not isinstance(first, Deleted)
        return Decided(None, first)

    def _is_settled(self, pending: _Pending, answer: Result | Reply | MindgridError) -> bool:
        """Return whether this answer says nothing of what was to be written."""
        return isinstance(answer, MindgridError | Chosen) or bool(
            self._earlier(pending.request, {})
        )

    def _append(self, planned: list[Planned]) -> None:
        group = _commits(planned)
        payload = commits.encode_group(group, [v for plan in planned for v in plan.vectors])
        rows = sum(len(commit.rows) for commit in group)
        transactions = [
            Transaction(commit.transaction_id, commit.seq, Instant(commit.at), commit.result)
            for commit in group
            if commit.transaction_id
        ]
        self._journal.append(Entry(group[0].seq, group[-1].seq, rows, payload), transactions)
        self._unsealed_bytes += len(payload)

    def _remembered(self, transaction_id: str) -> Result | None:
        found = self._results.get(transaction_id)
        return found[1] if found else None

    def _forget_results(self) -> None:
        """Drop results that are older than a retry may be; the journal's copies now and then."""
        now = self._clock.now()
        horizon = Instant(now - int(self._config.transactions_kept_s * 1e6))
        if not self._store.doubts.are_none:
            # Seldom: nearly every commit is spared the lock.
            with self._store.lock:
                self._store.doubts.forget_given_up(horizon)
        while self._results:
            transaction_id, (at, _) = next(iter(self._results.items()))
            if at >= horizon:
                break
            del self._results[transaction_id]
        if now - self._last_trim > 60_000_000:
            self._last_trim = now
            self._journal.trim_transactions(horizon)

    def failed(self, error: MindgridError) -> None:
        """See `Work.failed`."""
        with self._store.lock:
            self._store.failure = self._store.failure or error
            self._store.lock.notify_all()

    def can_go_on(self) -> bool:
        """See `Work.can_go_on`."""
        return self._journal.is_usable

    def _due(self) -> bool:
        tail, now, after_s = len(self._store.tail_rows), time.monotonic(), self._config.seal_after_s
        # A small tail is cheap to keep and to replay; a segment of it would only be merged soon.
        worth = tail >= max(1, self._config.seal_rows // 8)
        old = now - self._last_seal_s >= after_s
        # Whoever has loaded searches next, and each search compares every row of the tail.
        quiet = now - self._last_write_s >= after_s * _QUIET_SHARE
        return (
            tail >= self._config.seal_rows
            or (worth and (old or quiet))
            or self._unsealed_bytes >= self._config.journal_bytes_max
        )

    def _purge_due(self) -> bool:
        """Return whether bytes of hard-deleted records have been on disk for long enough."""
        if not self._store.rows.erased:
            self._erased_since_s = None
            return False
        if self._erased_since_s is None:
            self._erased_since_s = time.monotonic()
        return time.monotonic() - self._erased_since_s >= self._config.purge_after_s

    def maintain_once(self) -> bool:
        """See `Work.maintain_once`."""
        if self._due():
            return self._seal()
        if self._purge_due():
            self._maintenance.compact()
            # What was erased meanwhile waits its own time.
            self._erased_since_s = None
            return True
        # Searches gain more from an index than from fewer segments.
        return self._maintenance.index() or self._maintenance.merge()

    def _seal(self) -> bool:
        sealed_bytes = self._unsealed_bytes
        sealed = self._maintenance.seal()
        self._unsealed_bytes -= sealed_bytes
        self._last_seal_s = time.monotonic()
        return sealed


def _expires(request: Command | Request) -> bool:
    """Return whether it asks the rows which records it is about."""
    command = request.command if isinstance(request, Choose | Prepare | Decide) else request
    return isinstance(command, Expire)


def _drafts(request: Command | Request) -> tuple[Draft, ...]:
    command = request.command if isinstance(request, Prepare | Decide) else request
    return command.drafts if isinstance(command, Upsert) else ()


def _commits(planned: Sequence[Planned]) -> list[commits.Commit]:
    return [plan.commit for plan in planned if plan.commit is not None]


def _told(result: Result | Reply) -> Result:
    """Return what the caller of a transaction is told."""
    told = result.result if isinstance(result, Decided) else result
    assert isinstance(told, Upserted | Deleted | Expired)
    return told


def _check_named(journal: Journal) -> None:
    check_folders(journal, _manifest_in(journal).folders)


def _manifest_in(journal: Journal) -> Manifest:
    if journal.manifest is None:
        return Manifest()
    return manifest.decode(journal.manifest, journal.folder / JOURNAL_NAME)


def _unknown_outcome(name: str, error: BaseException) -> MindgridError:
    if isinstance(error, MindgridError):
        return error
    return Unavailable(name, f"a commit failed: {error!r}")
