"""The shards of one host, of one kind: opened when they are first asked for, and kept open.

A shard is in one of four states: closed ─► opening ─► open, or failed with an error and a time at
which the next call tries again. A failed open is never an exception and never an empty shard.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from mindgrid.cluster.port import ShardKey
from mindgrid.cluster.reader import named
from mindgrid.cluster.spec import Bounds, shard_folder
from mindgrid.cluster.table import Routes, Table
from mindgrid.shards.errors import MindgridError, StorageLocked, Unavailable

log = logging.getLogger(__name__)


class Closes(Protocol):
    """What every kind of shard can do."""

    def close(self) -> None:
        """Let go of files and locks; waits for running work."""
        ...


@dataclass(frozen=True, slots=True)
class Office:
    """What a host was appointed to."""

    name: str = "host"
    epoch: int = 0
    storage: Path = field(default_factory=Path)
    routes: Routes = field(default_factory=lambda: Routes(Table(0, Bounds(), (), ())))


Spec = TypeVar("Spec")
S = TypeVar("S", bound=Closes)

Find = Callable[[Office, ShardKey], Spec | MindgridError]
"""Returns the spec of a shard, or why this host has no such shard."""
Open = Callable[[Spec, Path, int], S]
"""Opens a shard in its folder, under an epoch."""


@dataclass(slots=True)
class Slot(Generic[Spec, S]):
    """One shard, whatever state it is in."""

    key: ShardKey
    spec: Spec
    shard: S | None = None
    opening: Future[None] | None = None
    failure: MindgridError | None = None
    failures: int = 0
    retry_at: float = 0.0


class Slots(Generic[Spec, S]):
    """All methods may be called from any thread."""

    def __init__(self, find: Find[Spec], open: Open[Spec, S], threads: ThreadPoolExecutor) -> None:
        self._find = find
        self._open = open
        self._threads = threads
        self._lock = threading.Lock()
        self._office = Office()
        self._slots: dict[ShardKey, Slot[Spec, S]] = {}
        self._closed = False

    def ask(self, key: ShardKey) -> S | MindgridError | Future[None]:
        """Return the open shard, or why it is not open, or the future of its opening."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                spec = self._find(self._office, key)
                if isinstance(spec, MindgridError):
                    return spec
                slot = self._slots[key] = Slot(key, spec)
            if slot.shard is not None:
                return slot.shard
            if slot.opening is not None:
                return slot.opening
            if slot.failure is not None and time.monotonic() < slot.retry_at:
                return slot.failure
            slot.opening = self._threads.submit(self._fill, slot, self._office)
            return slot.opening

    def failure(self, key: ShardKey) -> MindgridError | None:
        """Return why the shard did not open last time; unlike `ask`, this never tries again."""
        with self._lock:
            slot = self._slots.get(key)
            return slot.failure if slot is not None else None

    def all(self) -> list[Slot[Spec, S]]:
        """Return the slots there are; their fields go on changing."""
        with self._lock:
            return list(self._slots.values())

    def open_ones(self) -> list[tuple[ShardKey, S]]:
        """Return the shards that are open."""
        with self._lock:
            slots = [(slot.key, slot.shard) for slot in self._slots.values()]
        return [(key, shard) for key, shard in slots if shard is not None]

    def retire(self, key: ShardKey, shard: S, error: MindgridError) -> None:
        """Open a shard anew that gave up: the disk decides what of its last commits is there."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None or slot.shard is not shard or self._closed:
                return
            log.error("shard %s is opened anew: %s", key, error)
            slot.shard = None
            # Not in this thread, which may be the shard's own: closing waits for it to end.
            slot.opening = self._threads.submit(self._fill, slot, self._office, shard)

    def take_office(self, office: Office) -> list[Slot[Spec, S]]:
        """Work under this appointment, and return the slots of shards that went elsewhere.

        They are in nobody's way any more, but still open: see `close_slots`.
        """
        with self._lock:
            self._office = office
            leaving = [s for key, s in self._slots.items() if self._find(office, key) != s.spec]
            for slot in leaving:
                del self._slots[slot.key]
        return leaving

    def give_up(self) -> list[Slot[Spec, S]]:
        """Open nothing any more, and return the slots of all shards."""
        with self._lock:
            self._closed = True
            slots = list(self._slots.values())
            self._slots.clear()
        return slots

    def _fill(self, slot: Slot[Spec, S], office: Office, former: S | None = None) -> None:
        key = slot.key
        folder = shard_folder(office.storage, key.namespace, key.generation, key.shard)
        try:
            if former is not None:
                former.close()
            shard = self._open(slot.spec, folder, office.epoch)
        except Exception as error:
            # Whatever went wrong: a shard that does not open is a state and not an exception.
            log.exception("shard %s does not open", key)
            with self._lock:
                slot.opening = None
                _fail(slot, _open_error(key, folder, error))
            return
        with self._lock:
            slot.opening, slot.failure, slot.failures = None, None, 0
            wanted = self._slots.get(key) is slot
            slot.shard = shard if wanted else None
        if not wanted:
            shard.close()


def close_slots(slots: list[Slot[Spec, S]]) -> None:
    """Close the shards of slots that were taken out, once those that are opening are open."""
    for slot in slots:
        if slot.opening is not None:
            slot.opening.result()
        if slot.shard is not None:
            slot.shard.close()


_REOPEN_FIRST_S = 0.5
_REOPEN_MOST_S = 30.0


def _fail(slot: Slot[Spec, S], error: MindgridError) -> None:
    slot.failure = error
    slot.failures += 1
    slot.retry_at = time.monotonic() + min(
        _REOPEN_MOST_S, _REOPEN_FIRST_S * 2 ** min(slot.failures - 1, 16)
    )


def _open_error(key: ShardKey, folder: Path, error: Exception) -> MindgridError:
    """Return what callers are told: the file and the reason, whatever went wrong."""
    if isinstance(error, MindgridError) and not isinstance(error, StorageLocked):
        return named(f"shard {key}", error)
    if isinstance(error, OSError) and error.filename is not None:
        return Unavailable(f"shard {key}", f"{error.filename}: {error.strerror}")
    if isinstance(error, StorageLocked):
        # Right after a host has changed this passes by itself, so the same request may succeed.
        return Unavailable(f"shard {key}", str(error))
    return Unavailable(f"shard {key}", f"{folder}: {type(error).__name__}: {error}")
