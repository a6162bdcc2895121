"""What readers of a log see: columns, the newest events in RAM, and sealed runs.

One lock guards it. A read holds it to choose cursors and to note where their values are; payloads
are read outside of it, from runs that never change.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mindgrid.shards.clock import NEVER, Instant
from mindgrid.shards.episodic.columns import LogColumns
from mindgrid.shards.episodic.commits import EventWrite, LogCommit
from mindgrid.shards.episodic.ids import event_id
from mindgrid.shards.episodic.runs import Run, Values
from mindgrid.shards.episodic.types import Event, EventPage, EventRange, LogConfig
from mindgrid.shards.episodic.watchers import Watchers
from mindgrid.shards.errors import MindgridError
from mindgrid.shards.sizes import values_bytes

Int64s = NDArray[np.int64]

PAGE_BYTES = 4 * 1024 * 1024
"""A page ends with the event that reaches this."""


class LogStore:
    """The readable state of one log. Who writes to it holds the lock."""

    def __init__(self, config: LogConfig, key: bytes) -> None:
        self._config = config
        self.key = key
        self.lock = threading.Lock()
        self.watchers = Watchers()
        self.columns = LogColumns()
        self.runs: tuple[Run, ...] = ()
        self.sealed_to = 0
        """The newest cursor that is in a run, or was removed before it came into one."""
        self.last_seq = 0
        self.last_commit = Instant(0)
        self.failure: MindgridError | None = None
        """Why nothing more is read or written."""
        self.counters: Counter[str] = Counter()
        self.tombstones: dict[int, int] = {}
        """Those that no run has yet: cursors, and when."""
        self._recent: list[EventWrite] = []
        """The newest events, all that are not sealed among them."""
        self._recent_bytes = 0

    @property
    def recent_first(self) -> int:
        """The oldest cursor in RAM."""
        return self.columns.last + 1 - len(self._recent)

    def apply(self, commits: Sequence[LogCommit]) -> None:
        """Make durable commits visible and wake who waits for them."""
        for commit in commits:
            self._add(commit)
            for cursor in commit.tombstones:
                if self.columns.is_live(cursor):
                    self.tombstones[cursor] = commit.at
            self.columns.tombstone(commit.tombstones, commit.at)
            if commit.removed_until:
                self._remove_until(commit.removed_until)
            self.last_seq = commit.seq
            self.last_commit = Instant(max(self.last_commit, commit.at))
        self.forget_recent()
        self.watchers.call()

    def _add(self, commit: LogCommit) -> None:
        events = commit.events
        if not events:
            return
        assert commit.first_cursor == self.columns.last + 1
        self.columns.add(
            np.full(len(events), commit.at),
            pa.array([one.type for one in events], pa.string()),
            pa.array([one.role for one in events], pa.string()),
            pa.array([one.session_id for one in events], pa.string()),
            pa.array([one.dedup_key for one in events], pa.string()),
        )
        self._recent += events
        self._recent_bytes += sum(map(values_bytes, events))

    def _remove_until(self, cursor: int) -> None:
        gone = max(0, cursor + 1 - self.recent_first)
        self.columns.remove_until(cursor)
        self._drop_recent(gone)
        self.sealed_to = max(self.sealed_to, cursor)
        self.tombstones = {at: when for at, when in self.tombstones.items() if at > cursor}

    def forget_recent(self) -> None:
        """Leave sealed events to their runs, but for the newest that followers may ask for."""
        sealed = max(0, self.sealed_to + 1 - self.recent_first)
        config = self._config
        over = len(self._recent) - config.recent_events
        # By an eighth at least, for each time moves the whole list.
        if over >= config.recent_events // 8:
            self._drop_recent(min(sealed, over))
        elif sealed and self._recent_bytes > config.recent_bytes:
            self._drop_recent(min(sealed, max(1, len(self._recent) // 8)))

    def _drop_recent(self, count: int) -> None:
        self._recent_bytes -= sum(map(values_bytes, self._recent[:count]))
        del self._recent[:count]

    def unsealed(self) -> tuple[int, list[int], list[EventWrite]]:
        """Return the first cursor that is in no run, and from it on timestamps and events."""
        first = max(self.sealed_to + 1, self.columns.first)
        events = self._recent[first - self.recent_first :]
        timestamps = self.columns.timestamps.view()[first - self.columns.first :]
        return first, timestamps.tolist(), events

    def read(self, range: EventRange, limit: int) -> EventPage:
        """See `EpisodicLog.read`."""
        assert limit > 0
        with self.lock:
            if self.failure is not None:
                raise self.failure
            cursors = self.columns.select(range, limit + 1)
            more = len(cursors) > limit
            reader = _Reader(self, cursors[:limit])
            first, last = self.columns.first, self.columns.last
        events: list[Event] = []
        size = 0
        for event in reader:
            events.append(event)
            size += values_bytes(event)
            if size >= PAGE_BYTES:
                break
        return EventPage(tuple(events), more or len(events) < len(reader), first, last)

    def sources(self, cursors: Int64s) -> _Sources:
        """Return where the values of these events are, in order."""
        firsts = [run.info.first for run in self.runs]
        places = np.searchsorted(firsts, cursors, side="right") - 1
        runs: list[Run | None] = [self.runs[at] for at in places.tolist()] if firsts else []
        recent_first = self.recent_first
        recent: list[EventWrite] = []
        for at in np.flatnonzero(cursors >= recent_first).tolist():
            recent.append(self._recent[int(cursors[at]) - recent_first])
            if runs:
                runs[at] = None
        return _Sources(cursors.tolist(), runs or [None] * len(cursors), recent)

    def events_at(self, cursors: Sequence[int]) -> dict[int, Event]:
        """Return the events that are there under these cursors."""
        with self.lock:
            held = sorted({cursor for cursor in cursors if self.columns.holds(cursor)})
            reader = _Reader(self, np.array(held, np.int64))
        return dict(zip(held, reader, strict=True))


class _Reader:
    """Chosen events, read one by one without the lock, and only once; made under it."""

    def __init__(self, store: LogStore, cursors: Int64s) -> None:
        columns = store.columns
        places = cursors - columns.first
        self._key = store.key
        self._cursors: list[int] = cursors.tolist()
        self._timestamps = columns.timestamps.view()[places].tolist()
        self._deleted = columns.deleted.view()[places].tolist()
        self._names = [
            [column.names[code] for code in column.view()[places].tolist()]
            for column in (columns.types, columns.roles, columns.sessions)
        ]
        self._sources = store.sources(cursors)

    def __len__(self) -> int:
        return len(self._cursors)

    def __iter__(self) -> Iterator[Event]:
        for cursor, timestamp, deleted, type, role, session_id, value in zip(
            self._cursors, self._timestamps, self._deleted, *self._names, self._sources, strict=True
        ):
            yield Event(
                event_id(self._key, cursor),
                cursor,
                Instant(timestamp),
                type,
                value.payload,
                value.metadata,
                role,
                session_id,
                value.supersedes,
                value.source,
                None if deleted == NEVER else Instant(deleted),
            )


class _Sources:
    """Where the values of chosen events are: each in one of the runs, or in RAM."""

    def __init__(
        self, cursors: list[int], runs: list[Run | None], recent: list[EventWrite]
    ) -> None:
        """Take the cursors with the run of each, None for those that are in `recent`, in order."""
        self._cursors = cursors
        self._runs = runs
        self._recent = iter(recent)

    def __iter__(self) -> Iterator[EventWrite | Values]:
        placed = zip(self._runs, self._cursors, strict=True)
        for run, part in itertools.groupby(placed, key=itemgetter(0)):
            cursors = [cursor for _, cursor in part]
            if run is None:
                yield from itertools.islice(self._recent, len(cursors))
            else:
                yield from run.read(cursors)
