"""A host: many shards of many namespaces in one process, opened when they are first asked for.

Nothing here knows Ray; `remote.HostActor` puts it into an actor and `local` into this process. Both
call it from pools of threads (`THREADS`), whose calls wait for whatever they need; it guards its
state with one lock.

A shard is in one of four states: closed ─► opening ─► open, or failed with an error and a time at
which the next call tries again. A failed open is never an exception and never an empty shard.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil  # type: ignore[import-untyped,unused-ignore]

from mindgrid.cluster import port
from mindgrid.cluster.fanout import ById, get_from_shards, scan_shards, search_shards
from mindgrid.cluster.instants import stamp_read
from mindgrid.cluster.port import Done, Failed, Opening, ShardKey, failed
from mindgrid.cluster.process import end, this_process
from mindgrid.cluster.reader import Reader, is_fault, named
from mindgrid.cluster.spec import Bounds, NamespaceKey, NamespaceSpec, shard_folder, shard_name
from mindgrid.cluster.table import Routes, Table
from mindgrid.shards.background import background_pool
from mindgrid.shards.clock import Clock, Instant, SystemClock
from mindgrid.shards.config import Driver
from mindgrid.shards.driver import Found, SemanticShard
from mindgrid.shards.errors import (
    Corruption,
    MindgridError,
    Moved,
    NotFound,
    StorageLocked,
    Unavailable,
)
from mindgrid.shards.files import create_folder, sync
from mindgrid.shards.groups import Workers
from mindgrid.shards.memory import MemoryShard
from mindgrid.shards.transactions import Ask, Forget, Reply, Request, Resolve
from mindgrid.shards.types import Command, Delete, Expire, Result, Scanned, Stamp, Upsert

log = logging.getLogger(__name__)

THREADS = {
    "search": 4,
    "heavy": 1,
    "get": 2,
    "scan": 2,
    "commit": 32,
    "transact": 16,
    "warm": 16,
    "control": 4,
}
"""How many calls of each kind are worked on at once: a kind that is full delays no other.

Searches take turns (`Host.search`), so most of their threads wait, with their calls read.
A commit waits for its disk; only calls that wait for nothing else are `control`: a busy host must
not look dead.
"""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a shard is opened with."""

    spec: NamespaceSpec
    folder: Path
    epoch: int
    clock: Clock
    commits: Executor
    maintenance: Executor


Opener = Callable[[Opened], SemanticShard]


def open_shard(opened: Opened) -> SemanticShard:
    """Open a shard by its namespace's driver."""
    if opened.spec.driver is Driver.MEMORY:
        return MemoryShard(opened.spec.config, opened.clock)
    # Here, so that a host of memory shards does not pay for Lance and FAISS.
    from mindgrid.shards.shard import LanceShard

    _make_folders(opened.folder.parent, opened.spec.shards)
    if not opened.folder.is_dir():
        problem = "the folder is missing, but those of other shards exist; bring it back"
        raise Corruption(str(opened.folder), problem)
    workers = Workers(opened.commits, opened.maintenance)
    return LanceShard.open(opened.folder, opened.spec.config, opened.epoch, opened.clock, workers)


def _make_folders(generation: Path, shards: int) -> None:
    """Make the folders of all shards at once, the first time any of them is opened.

    So that a shard whose folder is lost later is not taken for one that holds nothing yet.
    """
    if generation.is_dir():
        return
    fresh = generation.with_name(f"{generation.name}.new-{secrets.token_hex(4)}")
    for number in range(shards):
        create_folder(fresh / shard_name(number))
    try:
        fresh.rename(generation)
    except OSError:
        # Another host was sooner.
        shutil.rmtree(fresh, ignore_errors=True)
        if not generation.is_dir():
            raise
    sync(generation.parent)


def load_driver(driver: Driver) -> None:
    """Import what the driver needs, ahead of its first shard: seconds on a small machine."""
    if driver is Driver.LANCE:
        importlib.import_module("mindgrid.shards.shard")


def load_writers(drivers: Iterable[Driver]) -> None:
    """Import what no read needs, some time after the start: for seconds it slows all else down."""
    if Driver.LANCE in drivers:
        importlib.import_module("lancedb")


@runtime_checkable
class Tended(Protocol):
    """A shard with work that is due by time and not by a call."""

    def tend(self) -> None:
        """Start that work in the background if any is due."""
        ...


@dataclass(slots=True)
class _Slot:
    """One shard of this host, whatever state it is in."""

    key: ShardKey
    spec: NamespaceSpec
    shard: SemanticShard | None = None
    opening: Future[None] | None = None
    failure: MindgridError | None = None
    failures: int = 0
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Running:
    """A write that a shard has taken."""

    key: ShardKey
    done: Future[Any]
    """Of a Result or a Reply."""

    def outcome(self) -> port.WriteOutcome:
        """Return what became of it."""
        error = self.done.exception()
        if error is None:
            return Done(self.done.result())
        return failed(named(f"shard {self.key}", error))


_State = SemanticShard | MindgridError | Future[None]


class Host:
    """The process side of a `Port`: every method is one of its calls."""

    def __init__(self, opener: Opener = open_shard, clock: Clock | None = None) -> None:
        self._opener = opener
        self._clock = clock or SystemClock()
        self._process = this_process()
        self._lock = threading.Lock()
        # Searches let go of Python's lock every few microseconds, so that two at once hand it to
        # and fro: 32 clients then cost a host 1.7 ms CPU a search, and 1.1 ms one after the other.
        self._turn = threading.Lock()
        self._name = "host"
        self._epoch = 0
        self._storage = Path()
        self._routes = Routes(Table(0, Bounds(), (), ()))
        self._slots: dict[ShardKey, _Slot] = {}
        self._drivers: set[Driver] = set()
        self._skew_us = 0
        self._opens = ThreadPoolExecutor(2, "open")
        # A group commit holds its thread while the disk syncs, and right after an open for
        # `skew_max_s`: with few threads, one namespace's start would delay the others' writes.
        self._commits = ThreadPoolExecutor(8, "commit")
        self._maintenance = background_pool(1, "maintenance")
        self._closed = threading.Event()
        self._tending: threading.Thread | None = None

    def search(self, call: bytes) -> bytes:
        """See `Port.search`."""
        decoded = port.decode_search(call)
        self._check_epoch(decoded.epoch)
        outcomes: list[port.AnswerOutcome] = []
        in_turn = self._turn.acquire(timeout=_TURN_WAIT_S)
        try:
            for item in decoded.items:
                outcomes += self._search(item)
        finally:
            if in_turn:
                self._turn.release()
        return port.encode(outcomes)

    def get(self, call: bytes) -> bytes:
        """See `Port.get`."""
        decoded = port.decode_get(call)
        self._check_epoch(decoded.epoch)
        return port.encode([self._get(item) for item in decoded.items])

    def scan(self, call: bytes) -> bytes:
        """See `Port.scan`."""
        decoded = port.decode_scan(call)
        self._check_epoch(decoded.epoch)
        return port.encode([self._scan(item) for item in decoded.items])

    def commit(self, call: bytes) -> bytes:
        """See `Port.commit`."""
        decoded = port.decode_commit(call)
        self._check_epoch(decoded.epoch)
        submitted = [self._submit(item) for item in decoded.items]
        wait([one.done for one in submitted if isinstance(one, _Running)])
        return port.encode(
            [one.outcome() if isinstance(one, _Running) else one for one in submitted]
        )

    def transact(self, call: bytes) -> bytes:
        """See `Port.transact`."""
        return self.commit(call)

    def warm(self, call: bytes) -> bytes:
        """See `Port.warm`."""
        decoded = port.decode_warm(call)
        self._check_epoch(decoded.epoch)
        states = list(map(self._ask, decoded.shards))
        wait([state for state in states if isinstance(state, Future)])
        if decoded.settled is not None:
            self._wait_settled(states, decoded.settled)
        outcomes: list[port.WarmOutcome] = []
        for key in decoded.shards:
            # A failure that is over its back-off would be tried again here, so it is read as is.
            failure = self._slots[key].failure if key in self._slots else None
            outcomes.append(failed(failure) if failure else Done(None))
        return port.encode(outcomes)

    def _wait_settled(self, states: Iterable[_State], instant: Instant) -> None:
        until = time.monotonic() + _SETTLE_WAIT_S
        for state in states:
            if not isinstance(state, Future | MindgridError):
                state.wait_settled(instant, max(0.0, until - time.monotonic()))

    def appoint(self, appointment: bytes) -> bytes:
        """See `Port.appoint`; raises Moved for an epoch older than the one it has."""
        self._take_office(port.decode_appointment(appointment))
        return self.health()

    def health(self, skew_us: int | None = None) -> bytes:
        """See `Port.health`."""
        if skew_us is not None:
            self._skew_us = skew_us
        return port.encode(self._health())

    def status(self) -> bytes:
        """See `Port.status`."""
        with self._lock:
            slots = sorted(self._slots.values(), key=lambda slot: str(slot.key))
        rss = psutil.Process().memory_info().rss
        return port.encode(port.HostStatus(self._health(), rss, list(map(_report, slots))))

    def close(self) -> None:
        """Close all shards and refuse further calls; none may be under way."""
        self._closed.set()
        with self._lock:
            self._epoch = -1
            slots = list(self._slots.values())
            self._slots.clear()
        self._opens.shutdown()
        for slot in slots:
            if slot.shard is not None:
                slot.shard.close()
        self._commits.shutdown()
        self._maintenance.shutdown()

    # Reads

    def _search(self, item: port.SearchItem) -> Sequence[port.AnswerOutcome]:
        readers = self._readers(item.namespace, item.generation, item.shards, item.stamp)
        if isinstance(readers, Failed | Opening):
            return [readers] * len(item.queries)
        stamp = item.stamp or stamp_read(self._clock)
        try:
            answers = search_shards(list(readers.values()), item.queries, stamp)
        except Exception as error:  # noqa: BLE001 - one item's bug is not the others'
            answers = [named(f"namespace {item.namespace}", error)] * len(item.queries)
        self._retire_failed(readers.values())
        return [
            failed(answer) if isinstance(answer, MindgridError) else Done(answer)
            for answer in answers
        ]

    def _get(self, item: port.GetItem) -> port.FoundOutcome:
        numbers = tuple({shard for shard, _ in item.ids})
        readers = self._readers(item.namespace, item.generation, numbers, item.stamp)
        if isinstance(readers, Failed | Opening):
            return readers
        read, stamp = ById(item.selection, item.want), item.stamp or stamp_read(self._clock)
        found: Found | MindgridError
        try:
            found = get_from_shards(readers, item.ids, read, stamp)
        except Exception as error:  # noqa: BLE001 - one item's bug is not the others'
            found = named(f"namespace {item.namespace}", error)
        self._retire_failed(readers.values())
        return failed(found) if isinstance(found, MindgridError) else Done(found)

    def _scan(self, item: port.ScanItem) -> port.ScannedOutcome:
        readers = self._readers(item.namespace, item.generation, item.shards, item.stamp)
        if isinstance(readers, Failed | Opening):
            return readers
        stamp = item.stamp or stamp_read(self._clock)
        scanned: Scanned | MindgridError
        try:
            scanned = scan_shards(list(readers.values()), item.scan, stamp)
        except Exception as error:  # noqa: BLE001 - one item's bug is not the others'
            scanned = named(f"namespace {item.namespace}", error)
        self._retire_failed(readers.values())
        return failed(scanned) if isinstance(scanned, MindgridError) else Done(scanned)

    def _readers(
        self,
        namespace: NamespaceKey,
        generation: int,
        numbers: Sequence[int],
        stamp: Stamp | None,
    ) -> dict[int, Reader] | Failed | Opening:
        """Return the shards for one read if all are open and the stamp is not from the future."""
        if stamp is not None:
            ahead_s = (stamp.at - self._clock.now()) / 1e6
            skew_max_s = self._routes.bounds.skew_max_s
            # A shard commits nothing at or before an instant that was read, but forgets that
            # instant when it is opened anew; then it only waits for skew_max.
            if ahead_s > skew_max_s:
                problem = (
                    f"the read's instant is {ahead_s:.3f} s ahead of its clock, more than "
                    f"{skew_max_s} s; clocks differ between machines and must be set"
                )
                return failed(Unavailable(self._name, problem))
        shards = self._open_shards(namespace, generation, numbers)
        if isinstance(shards, Failed | Opening):
            return shards
        return {
            number: Reader(ShardKey(namespace, generation, number), shard)
            for number, shard in shards.items()
        }

    # Writes

    def _submit(self, item: port.Write) -> _Running | Failed | Opening:
        skew_max_s = self._routes.bounds.skew_max_s
        skewed = abs(self._skew_us) > skew_max_s * 1e6
        # What was decided is carried out whatever the clock says, for it names its time.
        if skewed and not isinstance(item.request, Resolve | Ask | Forget):
            problem = (
                f"its clock is {self._skew_us / 1e6:+.3f} s from the coordinator's, more than "
                f"{skew_max_s} s; writes are refused until the clocks agree"
            )
            return failed(Unavailable(self._name, problem))
        state = self._ask(item.shard)
        if isinstance(state, Future):
            return Opening()
        if isinstance(state, MindgridError):
            return failed(state)
        try:
            future = _taken(state, item.request)
        except MindgridError as error:
            return failed(error)
        future.add_done_callback(partial(self._look_at, item.shard, state))
        return _Running(item.shard, future)

    def _look_at(self, key: ShardKey, shard: SemanticShard, done: Future[Any]) -> None:
        if is_fault(done.exception()):
            # A full disk, for one, refuses a write and leaves the shard as it was.
            self._retire_if_mute(Reader(key, shard))

    # Shards

    def _open_shards(
        self, namespace: NamespaceKey, generation: int, numbers: Sequence[int]
    ) -> dict[int, SemanticShard] | Failed | Opening:
        """Return the shards if all are open; else start opening all that are not."""
        states = {n: self._ask(ShardKey(namespace, generation, n)) for n in numbers}
        shards: dict[int, SemanticShard] = {}
        for number, state in states.items():
            if isinstance(state, MindgridError):
                return failed(state)
            if not isinstance(state, Future):
                shards[number] = state
        return shards if len(shards) == len(states) else Opening()

    def _ask(self, key: ShardKey) -> _State:
        """Return the open shard, or why it is not open, or the future of its opening."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                spec = self._spec_of(key)
                if isinstance(spec, MindgridError):
                    return spec
                slot = self._slots[key] = _Slot(key, spec)
            if slot.shard is not None:
                return slot.shard
            if slot.opening is not None:
                return slot.opening
            if slot.failure is not None and time.monotonic() < slot.retry_at:
                return slot.failure
            slot.opening = self._opens.submit(self._open, slot, self._epoch)
            return slot.opening

    def _spec_of(self, key: ShardKey) -> NamespaceSpec | MindgridError:
        try:
            route = self._routes.route(key.namespace)
        except NotFound:
            # The caller's table has it, so this host's is the older one.
            return Moved(str(key), self._epoch)
        if route.generation != key.generation or route.hosts[key.shard] != self._name:
            return Moved(str(key), self._epoch)
        return route.spec

    def _open(self, slot: _Slot, epoch: int, former: SemanticShard | None = None) -> None:
        key = slot.key
        folder = shard_folder(self._storage, key.namespace, key.generation, key.shard)
        opened = Opened(slot.spec, folder, epoch, self._clock, self._commits, self._maintenance)
        try:
            if former is not None:
                former.close()
            shard = self._opener(opened)
        except Exception as error:
            # Whatever went wrong: a shard that does not open is a state and not an exception.
            log.exception("shard %s does not open", key)
            with self._lock:
                slot.opening = None
                self._fail(slot, _open_error(key, folder, error))
            return
        with self._lock:
            slot.opening, slot.failure, slot.failures = None, None, 0
            wanted = self._slots.get(key) is slot
            slot.shard = shard if wanted else None
        if not wanted:
            shard.close()

    def _retire_failed(self, readers: Iterable[Reader]) -> None:
        for reader in readers:
            if reader.failed:
                self._retire_if_mute(reader)

    def _retire_if_mute(self, reader: Reader) -> None:
        """Retire a shard that answers nothing any more, not even a read of no id."""
        error = reader.probe(stamp_read(self._clock))
        if error is not None:
            self._retire(reader.key, reader.shard, error)

    def _retire(self, key: ShardKey, shard: SemanticShard, error: MindgridError) -> None:
        """Open a shard anew that gave up: the disk decides what of its last commits is there."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None or slot.shard is not shard or self._closed.is_set():
                return
            log.error("shard %s is opened anew: %s", key, error)
            slot.shard = None
            # Not in this thread, which may be the shard's own: closing waits for it to end.
            slot.opening = self._opens.submit(self._open, slot, self._epoch, shard)

    def _fail(self, slot: _Slot, error: MindgridError) -> None:
        slot.failure = error
        slot.failures += 1
        slot.retry_at = time.monotonic() + min(
            _REOPEN_MOST_S, _REOPEN_FIRST_S * 2 ** min(slot.failures - 1, 16)
        )

    # Office

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise Moved(self._name, epoch)

    def _take_office(self, appointment: port.Appointment) -> None:
        if appointment.epoch < self._epoch:
            raise Moved(appointment.host, appointment.epoch)
        for former in appointment.predecessors:
            if not end(former):
                reason = f"its former process {former.pid} does not end"
                raise Unavailable(appointment.host, reason)
        with self._lock:
            self._name = appointment.host
            self._storage = Path(appointment.storage)
            self._routes = Routes(appointment.table)
            self._epoch = appointment.epoch
            self._drivers = {holding.spec.driver for holding in appointment.table.holdings}
            if self._tending is None:
                self._tending = threading.Thread(target=self._tend, name="tend", daemon=True)
                self._tending.start()
            leaving = [slot for key, slot in self._slots.items() if self._spec_of(key) != slot.spec]
            for slot in leaving:
                del self._slots[slot.key]
        for driver in self._drivers:
            self._opens.submit(load_driver, driver)
        for slot in leaving:
            # Before the new owner is appointed, which would find the folder locked.
            if slot.opening is not None:
                slot.opening.result()
            if slot.shard is not None:
                slot.shard.close()

    def _tend(self) -> None:
        if not self._closed.wait(_TEND_EVERY_S):
            self._maintenance.submit(load_writers, self._drivers)
        while not self._closed.wait(_TEND_EVERY_S):
            with self._lock:
                shards = [slot.shard for slot in self._slots.values()]
            for shard in shards:
                if isinstance(shard, Tended):
                    shard.tend()

    def _health(self) -> port.HostHealth:
        with self._lock:
            open_ = [(slot.key, slot.shard) for slot in self._slots.values()]
        doubts = [
            doubt for key, shard in open_ if shard is not None for doubt in _doubts(key, shard)
        ]
        return port.HostHealth(self._process, self._clock.now(), self._epoch, tuple(doubts))


_TURN_WAIT_S = 0.1
"""How long a call of searches waits for others: a slow one holds up nobody for longer.

Two full calls of HYBRID before it take 0.06 s.
"""
_TEND_EVERY_S = 5.0
_SETTLE_WAIT_S = 1.0
_REOPEN_FIRST_S = 0.5
_REOPEN_MOST_S = 30.0


def _taken(shard: SemanticShard, request: Command | Request) -> Future[Result] | Future[Reply]:
    if isinstance(request, Upsert | Delete | Expire):
        return shard.submit(request)
    return shard.transact(request)


def _doubts(key: ShardKey, shard: SemanticShard) -> Iterator[port.Doubt]:
    doubts = shard.doubts()
    for name, promise in doubts.promises.items():
        yield port.Doubt(key, name, promise.home, ())
    for name, decision in doubts.decisions.items():
        if decision.decided.at is not None:
            yield port.Doubt(key, name, key.shard, decision.participants)


def _report(slot: _Slot) -> port.ShardReport:
    # Each field is read once, since the shard may close meanwhile.
    shard, failure = slot.shard, slot.failure
    return port.ShardReport(
        slot.key,
        shard.status() if shard is not None else None,
        str(failure) if failure is not None else "",
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
