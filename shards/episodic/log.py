"""The durable driver: one episodic log in one folder.

    submit ─► a group: plan ─► journal (one fsync) ─► apply ─► answer, wake who waits
                                          │
              maintenance: seal ─► merge ─► manifest, journal trimmed

The writer numbers events while it plans a group; the journal refuses the group if a later epoch
owns the folder (`shards.journal`, Fencing). So cursors have no holes and are never given twice.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa

from mindgrid.shards.clock import NEVER, Clock, Instant
from mindgrid.shards.episodic.checks import answer_removed, check_log_repeat
from mindgrid.shards.episodic.commits import (
    LogCommit,
    Told,
    decode_commits,
    decode_told,
    digest,
    encode_commits,
)
from mindgrid.shards.episodic.ids import KEY_BYTES, cursor_of, event_id
from mindgrid.shards.episodic.maintenance import (
    LogMaintenance,
    LogManifest,
    decode_manifest,
    encode_manifest,
)
from mindgrid.shards.episodic.plan import LogPlan, LogPlanner
from mindgrid.shards.episodic.rules import retention, stored
from mindgrid.shards.episodic.runs import Run
from mindgrid.shards.episodic.store import LogStore
from mindgrid.shards.episodic.types import (
    Append,
    Appended,
    EventPage,
    EventRange,
    ExpireEvents,
    LogCommand,
    LogConfig,
    LogResult,
    LogStatus,
)
from mindgrid.shards.errors import Corruption, Exhausted, InvalidRequest, MindgridError, Unavailable
from mindgrid.shards.files import create_folder, remove_orphans
from mindgrid.shards.folders import check_folders
from mindgrid.shards.groups import Groups, Pending, Workers
from mindgrid.shards.journal import JOURNAL_NAME, Entry, Journal, Transaction
from mindgrid.shards.lock import FolderLock
from mindgrid.shards.sizes import values_bytes
from mindgrid.shards.types import Expired

_UNSEALED_FACTOR = 4
"""Appends are refused when the journal is so many times as large as when it is to be sealed."""
_GROUP_BYTES_MAX = 64 * 2**20
"""A group ends with the command that reaches this; one SQLite blob holds 1 GB at most."""
_TRIM_EVERY_US = 60_000_000

_Pending = Pending[LogCommand]


class EventLog:
    """An `EpisodicLog` on disk. Made by `open`; one owner at a time."""

    def __init__(
        self,
        lock: FolderLock,
        journal: Journal,
        maintenance: LogMaintenance,
        store: LogStore,
        config: LogConfig,
        clock: Clock,
        workers: Workers,
    ) -> None:
        """Not for callers: see `open`."""
        self._lock = lock
        self._journal = journal
        self._maintenance = maintenance
        self._store = store
        self._config = config
        self._clock = clock
        self._groups = Groups[LogCommand](lock.folder, self, workers)
        self._name = lock.folder.name
        self._told: dict[str, Told] = {}
        self._last_trim = Instant(0)
        self._last_seal_s = time.monotonic()
        self._removed_since_s: float | None = None
        self._unsealed_bytes = 0
        """Of the journal's entries that no run holds yet; its file may be larger."""

    @classmethod
    def open(
        cls, folder: Path, config: LogConfig, epoch: int, clock: Clock, workers: Workers
    ) -> EventLog:
        """Take the folder, check every byte it names, and read its columns into RAM.

        Raises StorageLocked, Corruption, Moved (a newer epoch owns it) or Unavailable; the folder
        is then as it was, and free.
        """
        create_folder(folder)
        lock = FolderLock(folder)
        try:
            journal = Journal(lock, epoch, _check_folders)
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
        config: LogConfig,
        clock: Clock,
        workers: Workers,
    ) -> EventLog:
        folder = lock.folder
        current = _manifest_in(journal)
        if current is None:
            # Before the first event has an id.
            current = LogManifest(secrets.token_bytes(KEY_BYTES).hex())
            journal.commit_manifest(encode_manifest(current), 0)
        named = {name for name, _ in current.folders}
        remove_orphans(folder, named | {path.name for path in folder.iterdir() if path.is_file()})
        store = LogStore(config, bytes.fromhex(current.key))
        store.columns.start(current.first)
        store.runs = tuple(Run(folder / info.folder, info) for info in current.runs)
        for run in store.runs:
            _add_columns(store, run, current.first)
        for run in store.runs:
            for cursor, at in zip(*run.tombstones(), strict=True):
                store.columns.tombstone((cursor,), at)
        if store.columns.last != current.last:
            problem = f"its runs end at cursor {store.columns.last}, not at {current.last}"
            raise Corruption(str(folder), problem)
        store.sealed_to, store.last_seq = current.last, current.covered_seq
        store.last_commit = Instant(current.last_commit)
        keeper = LogMaintenance(folder, config, journal, store, current)
        log = cls(lock, journal, keeper, store, config, clock, workers)
        log._replay()
        return log

    def _replay(self) -> None:
        for entry in self._journal.replay():
            self._unsealed_bytes += len(entry.payload)
            try:
                group = decode_commits(entry.payload)
            except msgspec.MsgspecError as error:
                problem = f"entry {entry.first_seq} cannot be read: {error}"
                raise Corruption(str(self._lock.folder / JOURNAL_NAME), problem) from error
            with self._store.lock:
                self._store.apply([one for one in group if one.seq > self._store.last_seq])
        for transaction in self._journal.transactions():
            self._told[transaction.id] = decode_told(transaction.result)
        # What was removed in the last life may not have left the disk.
        if self._store.columns.first > 1:
            self._removed_since_s = time.monotonic()

    @property
    def counters(self) -> dict[str, int]:
        """How often each path was taken since the log was opened."""
        return dict(self._store.counters)

    def submit(self, command: LogCommand) -> Future[LogResult]:
        """See `EpisodicLog.submit`."""
        limit = _UNSEALED_FACTOR * self._config.journal_bytes_max
        full = self._unsealed_bytes >= limit
        refusal = Exhausted(f"the unsealed journal of log {self._name}", limit) if full else None
        return self._groups.enqueue(command, refusal)

    def read(self, range: EventRange, limit: int) -> EventPage:
        """See `EpisodicLog.read`."""
        return self._store.read(range, limit)

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """See `EpisodicLog.watch`."""
        return self._store.watchers.add(watcher)

    def status(self) -> LogStatus:
        """See `EpisodicLog.status`."""
        store, journal = self._store, self._journal.status()
        with store.lock:
            return LogStatus(
                events=len(store.columns),
                last_cursor=store.columns.last,
                unsealed_events=len(store.unsealed()[2]),
                runs=len(store.runs),
                journal_groups=journal.entries,
                journal_bytes=journal.bytes,
                last_commit=store.last_commit,
            )

    def close(self) -> None:
        """See `EpisodicLog.close`."""
        self._groups.close()
        self._journal.close()
        self._lock.release()

    def tend(self) -> None:
        """Apply the retention, and start maintenance if any is due; hosts call this every few s."""
        for command in retention(self._config, self._clock.now(), self._store.columns.last):
            if self._removes_any(command):
                self.submit(command)
        if self._due() or self._purge_due():
            self._groups.start_maintenance()

    def maintain(self) -> None:
        """Seal and merge what is due, in this thread, unless another does so already."""
        self._groups.maintain()

    def compact(self) -> None:
        """Remove every byte of removed events from the disk."""
        with self._groups.maintaining():
            self._maintenance.compact()

    def take(self, queue: deque[_Pending]) -> list[_Pending]:
        """See `Work.take`."""
        group: list[_Pending] = []
        events = size = 0
        while queue and events < self._config.group_events_max and size < _GROUP_BYTES_MAX:
            command = queue[0].request
            # It asks the columns which events it is about, so it comes first in its group.
            if group and isinstance(command, ExpireEvents):
                break
            group.append(queue.popleft())
            if isinstance(command, Append):
                events += max(1, len(command.drafts))
                size += sum(map(values_bytes, command.drafts))
        return group

    def commit(self, group: list[_Pending]) -> None:
        """See `Work.commit`."""
        planned = self._planned(group)
        commits = [one.commit for _, one in planned if isinstance(one, LogPlan) and one.commit]
        failure: MindgridError | None = None
        if commits:
            try:
                self._append(commits)
            except Unavailable as error:
                if not self._journal.is_usable:
                    raise
                # The disk is full: nothing was written, and reads go on.
                commits, failure = [], error
            else:
                with self._store.lock:
                    self._store.apply(commits)
        for commit in commits:
            if commit.transaction_id:
                self._told[commit.transaction_id] = decode_told(commit.result)
        for pending, plan in planned:
            outcome: LogResult | MindgridError
            if isinstance(plan, LogPlan):
                outcome = failure or self._result(pending.request, plan)
            else:
                outcome = plan
            if isinstance(outcome, MindgridError):
                pending.done.set_exception(outcome)
            else:
                pending.done.set_result(outcome)
        self._forget_told()
        if any(commit.removed_until for commit in commits) and self._removed_since_s is None:
            self._removed_since_s = time.monotonic()
        if self._due():
            self._groups.start_maintenance()

    def _planned(self, group: list[_Pending]) -> list[tuple[_Pending, LogPlan | MindgridError]]:
        store = self._store
        planned: list[tuple[_Pending, LogPlan | MindgridError]] = []
        with store.lock:
            find = partial(cursor_of, store.key)
            planner = LogPlanner(store.columns, store.last_seq + 1, find)
            at = Instant(max(self._clock.now(), store.last_commit))
            in_group: dict[str, Told] = {}
            for pending in group:
                command = pending.request
                id = command.transaction_id
                first = in_group.get(id) or self._told.get(id)
                try:
                    if first is not None:
                        check_log_repeat(command, first.request == digest(command))
                        planned.append((pending, LogPlan(None, first)))
                        continue
                    plan = planner.plan(command, at)
                except MindgridError as error:
                    planned.append((pending, error))
                    continue
                if id and plan.commit is not None:
                    in_group[id] = plan.told
                planned.append((pending, plan))
        return planned

    def _append(self, commits: list[LogCommit]) -> None:
        payload = encode_commits(commits)
        transactions = [
            Transaction(commit.transaction_id, commit.seq, Instant(commit.at), commit.result)
            for commit in commits
            if commit.transaction_id
        ]
        events = sum(len(commit.events) for commit in commits)
        entry = Entry(commits[0].seq, commits[-1].seq, events, payload)
        self._journal.append(entry, transactions)
        self._unsealed_bytes += len(payload)

    def _result(self, command: LogCommand, plan: LogPlan) -> LogResult | InvalidRequest:
        told = plan.told
        if not isinstance(command, Append):
            return Expired(told.affected, told.at)
        assert told.cursors is not None
        # What was written just now is as its draft says; all else is read.
        new_from = told.fresh_from if plan.commit is not None else NEVER
        older = [cursor for cursor in told.cursors if cursor < new_from]
        events = self._store.events_at(older) if older else {}
        for cursor, draft in zip(told.cursors, command.drafts, strict=True):
            if cursor in events:
                continue
            if cursor < told.fresh_from:
                return answer_removed(command, cursor)
            # New, or written by this transaction before and removed since.
            events[cursor] = stored(draft, event_id(self._store.key, cursor), cursor, told.at)
        return Appended(tuple(events[cursor] for cursor in told.cursors), told.at)

    def _forget_told(self) -> None:
        """Drop results that are older than a retry may be; the journal's copies now and then."""
        now = self._clock.now()
        horizon = Instant(now - int(self._config.transactions_kept_s * 1e6))
        while self._told:
            id, told = next(iter(self._told.items()))
            if told.at >= horizon:
                break
            del self._told[id]
        if now - self._last_trim > _TRIM_EVERY_US:
            self._last_trim = now
            self._journal.trim_transactions(horizon)

    def failed(self, error: MindgridError) -> None:
        """See `Work.failed`."""
        with self._store.lock:
            self._store.failure = self._store.failure or error
            self._store.watchers.call()

    def can_go_on(self) -> bool:
        """See `Work.can_go_on`."""
        return self._journal.is_usable

    def maintain_once(self) -> bool:
        """See `Work.maintain_once`."""
        if self._due():
            return self._seal()
        if self._purge_due():
            self._maintenance.compact()
            self._removed_since_s = None
            return True
        return self._maintenance.merge()

    def _seal(self) -> bool:
        sealed_bytes = self._unsealed_bytes
        sealed = self._maintenance.seal()
        self._unsealed_bytes -= sealed_bytes
        self._last_seal_s = time.monotonic()
        return sealed

    def _due(self) -> bool:
        store = self._store
        unsealed = store.columns.last - store.sealed_to
        # Few events are cheap to keep and to replay; a run of them would only be merged soon.
        worth = unsealed >= max(1, self._config.seal_events // 8)
        old = time.monotonic() - self._last_seal_s >= self._config.seal_after_s
        return (
            unsealed >= self._config.seal_events
            or (worth and old)
            or self._unsealed_bytes >= self._config.journal_bytes_max
        )

    def _purge_due(self) -> bool:
        """Return whether bytes of removed events have been on disk for long enough."""
        since_s = self._removed_since_s
        return since_s is not None and time.monotonic() - since_s >= self._config.purge_after_s

    def _removes_any(self, command: ExpireEvents) -> bool:
        window = EventRange(
            before_cursor=command.before_cursor,
            before_time=command.before_time,
            include_deleted=True,
        )
        with self._store.lock:
            return bool(len(self._store.columns.select(window, 1)))


def _add_columns(store: LogStore, run: Run, first: int) -> None:
    """Read into RAM what of a run lives there, for its events from the cursor `first` on."""
    table = run.table(first)
    if not table.num_rows:
        return
    names = ("type", "role", "session_id", "dedup_key")
    strings = [table.column(name).combine_chunks() for name in names]
    store.columns.add(table.column("timestamp").cast(pa.int64()).to_numpy(), *strings)


def _check_folders(journal: Journal) -> None:
    manifest = _manifest_in(journal)
    check_folders(journal, manifest.folders if manifest is not None else ())


def _manifest_in(journal: Journal) -> LogManifest | None:
    if journal.manifest is None:
        return None
    return decode_manifest(journal.manifest, journal.folder / JOURNAL_NAME)
