"""What a shard can do, whichever driver keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from mindgrid.shards.clock import Instant
from mindgrid.shards.errors import MindgridError
from mindgrid.shards.transactions import Doubts, Reply, Request
from mindgrid.shards.types import (
    Answer,
    Command,
    Query,
    Record,
    Result,
    Scan,
    Scanned,
    Selection,
    Stamp,
    Want,
)


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """A shard's size and state, for `mindgrid status` and for metrics."""

    rows: int
    """Rows held, old versions included."""
    records: int
    """Ids whose newest row is not hard-deleted."""
    tail_rows: int
    segments: int
    indexed_rows: int
    journal_groups: int
    journal_bytes: int
    last_commit: Instant


@dataclass(frozen=True, slots=True)
class Found:
    """The records asked for by id, None where none is visible, and the instant of the read."""

    records: tuple[Record | None, ...]
    instant: Instant


class SemanticShard(Protocol):
    """One slice of a semantic namespace. All methods may be called from any thread.

    Inputs were checked by `shards.checks`; a shard asserts them and does not word errors.
    """

    def submit(self, command: Command) -> Future[Result]:
        """Make `command` durable; the future ends when it is, and visible to every later read.

        It fails with PreconditionFailed or Locked (nothing changed), or Unavailable (the outcome
        is unknown until the shard is open again). A repeat of a transaction id within
        `transactions_kept_s` returns the first result.
        """
        ...

    def transact(self, request: Request) -> Future[Reply]:
        """Take a step of a commit over several shards; durable as `submit` is, with its errors."""
        ...

    def doubts(self) -> Doubts:
        """Return the promises and decisions that such commits may still be waiting for."""
        ...

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        """Answer each query by itself; one that fails does not touch the others.

        Each fails with InDoubt while a promise may yet take effect at or before its instant.
        """
        ...

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        """Return the records with these ids, in order, as `selection` sees them; or InDoubt."""
        ...

    def scan(self, scan: Scan, stamp: Stamp) -> Scanned | MindgridError:
        """Return a page of records in the order of their ids (code points), or InDoubt."""
        ...

    def wait_settled(self, instant: Instant, wait_s: float) -> None:
        """Return once no promise may take effect at or before `instant`, or the time is over."""
        ...

    def status(self) -> ShardStatus:
        """Return the shard's size and state."""
        ...

    def close(self) -> None:
        """Let go of files and locks; waits for running work."""
        ...
