"""The values that cross an episodic log's surface, and what a log can do, whoever keeps it.

A log is one sequence of events. An event's cursor says where it stands: the first has 1, each next
one more, and no cursor is ever given twice, whatever is removed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from msgspec import field

from mindgrid.shards.clock import Instant
from mindgrid.shards.types import Expired, Value


class EventDraft(Value, frozen=True):
    """An event as a writer hands it in; the log sets id, cursor and timestamp.

    `supersedes` names earlier events by their ids: those that are there and not tombstoned are
    tombstoned in the same commit. An empty `dedup_key` stands for none.
    """

    type: str
    payload: bytes = b""
    metadata: Mapping[str, str] = field(default_factory=dict)
    role: str = ""
    session_id: str = ""
    dedup_key: str = ""
    supersedes: tuple[str, ...] = ()
    source: str = ""


class Event(Value, frozen=True):
    """A stored event. `timestamp` never decreases from one cursor to the next."""

    id: str
    cursor: int
    timestamp: Instant
    type: str
    payload: bytes
    metadata: Mapping[str, str]
    role: str
    session_id: str
    supersedes: tuple[str, ...]
    source: str
    deleted_at: Instant | None


class Append(Value, frozen=True, tag="append"):
    """Write all drafts under one run of cursors, or none.

    A draft whose `dedup_key` the log holds writes nothing: the stored event is its answer. If
    another draft writes, `expected_cursor` must be the log's last cursor (0: nothing was ever
    written), else nothing is.
    """

    drafts: tuple[EventDraft, ...]
    expected_cursor: int | None = None
    transaction_id: str = ""


class EventAction(enum.Enum):
    """What `ExpireEvents` does to an event. Not the numbers of the semantic block's actions."""

    SOFT_DELETE = 1
    """Tombstone it, if it has no tombstone."""
    HARD_DELETE = 2
    """Remove it, tombstoned or not, and free its `dedup_key`."""


class ExpireEvents(Value, frozen=True, tag="expire_events"):
    """Do `action` to the `max_rows` oldest events of a window that it changes.

    Both bounds are exclusive and ANDed; 0 and None leave one out, never both.
    """

    action: EventAction
    max_rows: int
    before_cursor: int = 0
    before_time: Instant | None = None
    transaction_id: str = ""


LogCommand = Append | ExpireEvents


class Appended(Value, frozen=True, tag="appended"):
    """The events, aligned with the drafts, and when the commit took effect."""

    events: tuple[Event, ...]
    committed_at: Instant


LogResult = Appended | Expired


class EventRange(Value, frozen=True):
    """Which events a read returns, and in which order: by cursor, rising or with `reverse` falling.

    Bounds are exclusive; 0 and None leave one out. `session_id`, `role` and `type` are equalities,
    and an empty one matches everything.
    """

    after_cursor: int = 0
    before_cursor: int = 0
    after_time: Instant | None = None
    before_time: Instant | None = None
    session_id: str = ""
    role: str = ""
    type: str = ""
    include_deleted: bool = False
    reverse: bool = False


class EventPage(Value, frozen=True):
    """The first events of a range, and where it goes on.

    `more` says whether events of the range may follow behind the last one; none follows a page
    without events. When the page was read, `first_cursor` was the oldest that the log held, and
    `last_cursor` the newest that it had given; where it held nothing, that is one less.
    """

    events: tuple[Event, ...]
    more: bool
    first_cursor: int
    last_cursor: int


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Everything a log's behaviour depends on besides its folder.

    `seal_events` unsealed events become a run, and so does what waited for `seal_after_s` or holds
    `journal_bytes_max`; `merge_fanout` runs of a tier become one. `recent_events` newest events
    stay in RAM with their payloads, up to `recent_bytes`, for those who follow. Events older than
    `retention_age_s`, and all but the newest `retention_events`, are removed; None keeps them.
    """

    seal_events: int = 8_192
    seal_after_s: float = 60.0
    merge_fanout: int = 8
    recent_events: int = 8_192
    recent_bytes: int = 16 * 1024 * 1024
    retention_age_s: float | None = None
    retention_events: int | None = None
    purge_after_s: float = 3_600.0
    group_events_max: int = 16_384
    transactions_kept_s: float = 600.0
    journal_bytes_max: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LogStatus:
    """A log's size and state, for `mindgrid status` and for metrics."""

    events: int
    """Events held, tombstoned ones included."""
    last_cursor: int
    unsealed_events: int
    runs: int
    journal_groups: int
    journal_bytes: int
    last_commit: Instant


class EpisodicLog(Protocol):
    """One episodic namespace. All methods may be called from any thread.

    Inputs were checked by `shards.episodic.checks`; a log asserts them and does not word errors.
    """

    def submit(self, command: LogCommand) -> Future[LogResult]:
        """Make `command` durable; the future ends when it is, and visible to every later read.

        It fails with CursorMismatch (nothing changed), or Unavailable (the outcome is unknown until
        the log is open again). A repeat of a transaction id within `transactions_kept_s` returns
        the first result.
        """
        ...

    def read(self, range: EventRange, limit: int) -> EventPage:
        """Return the first events of a range, at most `limit` and fewer where they are large.

        At least one, if the range has any. Raises what keeps the log from being read.
        """
        ...

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` after each commit and when the log fails; return what ends that.

        It is called inside the log's lock: it must be quick, and ask nothing of the log.
        """
        ...

    def status(self) -> LogStatus:
        """Return the log's size and state."""
        ...

    def close(self) -> None:
        """Let go of files and locks; waits for running work."""
        ...
