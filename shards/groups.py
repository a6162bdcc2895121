"""Group commit and maintenance of one folder: one of each at a time, in threads that a host lends.

    enqueue ─► queue ─► a group: `Work.commit` ─► the next one, behind other shards' groups
    start_maintenance ─► `Work.maintain_once` until nothing is due

Requests that arrive while a group is made durable wait, and go together in the next one. The first
failure that leaves the disk's state unknown ends it all: it is what every later call is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mindgrid.shards.errors import MindgridError, Unavailable

log = logging.getLogger(__name__)

R = TypeVar("R")

_PAUSE_S = 10.0
"""After maintenance that failed, until it is tried again."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The threads a shard borrows from its host: for group commits, and for maintenance."""

    commits: Executor
    maintenance: Executor


@dataclass(frozen=True, slots=True)
class Pending(Generic[R]):
    """A request that waits for its group; `done` gets its answer, whatever kind that has."""

    request: R
    done: Future[Any]


class Work(Protocol[R]):
    """What a shard does in these threads."""

    def take(self, queue: deque[Pending[R]]) -> list[Pending[R]]:
        """Take the next group from the front of the queue, at least one request."""
        ...

    def commit(self, group: list[Pending[R]]) -> None:
        """Make a group durable and answer it; what it raises ends the shard."""
        ...

    def maintain_once(self) -> bool:
        """Do the most urgent step of maintenance that is due; False if none is."""
        ...

    def can_go_on(self) -> bool:
        """Return whether the journal can still be written to, after maintenance that failed."""
        ...

    def failed(self, error: MindgridError) -> None:
        """Stop answering reads, too, with this error."""
        ...


class Groups(Generic[R]):
    """The queue and the maintenance of one shard. All methods may be called from any thread."""

    def __init__(self, folder: Path, work: Work[R], workers: Workers) -> None:
        self._folder = folder
        self._work = work
        self._workers = workers
        self._queue: deque[Pending[R]] = deque()
        self._lock = threading.Condition()
        self._draining = False
        self._maintaining = False
        self._maintain_from_s = 0.0
        self._failure: MindgridError | None = None

    def enqueue(self, request: R, refusal: MindgridError | None = None) -> Future[Any]:
        """Put the request into the next group; with `refusal` fail it at once instead."""
        pending = Pending(request, Future[Any]())
        # A caller that gives up must not cancel what may be durable already.
        pending.done.set_running_or_notify_cancel()
        with self._lock:
            refusal = self._failure or refusal
            if refusal is not None:
                pending.done.set_exception(refusal)
                return pending.done
            self._queue.append(pending)
            if not self._draining:
                self._draining = True
                self._workers.commits.submit(self._drain)
        return pending.done

    def start_maintenance(self) -> None:
        """Do what is due in the background, unless that is under way or failed a moment ago."""
        with self._lock:
            if self._maintaining or self._failure is not None:
                return
            if time.monotonic() < self._maintain_from_s:
                return
            self._maintaining = True
        self._workers.maintenance.submit(self._maintain)

    def maintain(self) -> None:
        """Do what is due in this thread, unless another does so already."""
        with self._lock:
            if self._maintaining or self._failure is not None:
                return
            self._maintaining = True
        self._maintain()

    @contextmanager
    def maintaining(self) -> Iterator[None]:
        """Keep maintenance to the block, once what is under way is over; raises the failure."""
        with self._lock:
            while self._maintaining:
                self._lock.wait()
            if self._failure is not None:
                raise self._failure
            self._maintaining = True
        try:
            yield
        finally:
            self._end_maintenance()

    def fail(self, error: MindgridError) -> None:
        """Refuse all that waits and every later call with the first error there was."""
        with self._lock:
            self._failure = self._failure or error
            self._work.failed(error)
            waiting = list(self._queue)
            self._queue.clear()
        for pending in waiting:
            pending.done.set_exception(error)

    def close(self) -> None:
        """Refuse what comes, and wait for the work that is under way."""
        self.fail(Unavailable(self._folder.name, "it is closed"))
        with self._lock:
            while self._draining or self._maintaining:
                self._lock.wait()

    def _drain(self) -> None:
        """Commit one group, and come back for the next behind the other shards' groups."""
        with self._lock:
            # A failure may have emptied the queue since.
            group = self._work.take(self._queue) if self._queue else []
        try:
            if group:
                self._work.commit(group)
        except MindgridError as error:
            self._refuse(group, error)
        except Exception as error:
            log.exception("a commit of shard %s failed by a bug", self._folder)
            self._refuse(group, Unavailable(self._folder.name, f"a commit failed: {error!r}"))
        with self._lock:
            self._draining = bool(self._queue)
            if self._draining:
                self._workers.commits.submit(self._drain)
            self._lock.notify_all()

    def _refuse(self, group: list[Pending[R]], error: MindgridError) -> None:
        """Fail the group, all that waits behind it, and every later call: the disk decides now."""
        self.fail(error)
        for pending in group:
            if not pending.done.done():
                pending.done.set_exception(error)

    def _maintain(self) -> None:
        try:
            while self._failure is None and self._work.maintain_once():
                pass
        except Unavailable as error:
            if not self._work.can_go_on():
                self.fail(error)
                return
            # Nothing was switched: the rows are safe in the journal, reads and writes go on.
            log.warning("maintenance of shard %s is put off: %s", self._folder, error)
            self._maintain_from_s = time.monotonic() + _PAUSE_S
        except MindgridError as error:
            self.fail(error)
        except Exception as error:
            log.exception("maintenance of shard %s failed by a bug", self._folder)
            self.fail(Unavailable(self._folder.name, f"maintenance failed: {error!r}"))
        finally:
            self._end_maintenance()

    def _end_maintenance(self) -> None:
        with self._lock:
            self._maintaining = False
            self._lock.notify_all()
