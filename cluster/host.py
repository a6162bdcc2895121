"""A host: many shards of many namespaces in one process, opened when they are first asked for.

Nothing here knows Ray; `remote.HostActor` puts it into an actor and `local` into this process. Both
call it from pools of threads (`THREADS`), whose calls wait for whatever they need. Which shards are
open is the business of `slots`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import psutil  # type: ignore[import-untyped,unused-ignore]

from mindgrid.cluster import port
from mindgrid.cluster.fanout import ById, get_from_shards, scan_shards, search_shards
from mindgrid.cluster.follows import FOLLOWERS_MAX, Follows
from mindgrid.cluster.instants import stamp_read
from mindgrid.cluster.openers import (
    Opened,
    Opener,
    load_driver,
    load_writers,
    open_log,
    open_shard,
)
from mindgrid.cluster.port import Done, Failed, Opening, ShardKey, failed
from mindgrid.cluster.process import end, this_process
from mindgrid.cluster.reader import Reader, is_fault, named
from mindgrid.cluster.slots import Office, Slot, Slots, close_slots
from mindgrid.cluster.spec import EPISODIC, LogSpec, NamespaceKey, NamespaceSpec
from mindgrid.cluster.table import Routes
from mindgrid.shards.background import background_pool
from mindgrid.shards.clock import Clock, Instant, SystemClock
from mindgrid.shards.config import Driver
from mindgrid.shards.driver import Found, SemanticShard
from mindgrid.shards.episodic.types import (
    Append,
    EpisodicLog,
    EventPage,
    EventRange,
    ExpireEvents,
    LogCommand,
)
from mindgrid.shards.errors import MindgridError, Moved, NotFound, Unavailable
from mindgrid.shards.transactions import Ask, Forget, Reply, Request, Resolve
from mindgrid.shards.types import Command, Delete, Expire, Result, Scanned, Stamp, Upsert

THREADS = {
    "search": 4,
    "heavy": 1,
    "get": 2,
    "scan": 2,
    "events": 4,
    "follow": FOLLOWERS_MAX,
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


@runtime_checkable
class Tended(Protocol):
    """A shard with work that is due by time and not by a call."""

    def tend(self) -> None:
        """Start that work in the background if any is due."""
        ...


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


_Spec = TypeVar("_Spec")


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
        self._office = Office()
        self._drivers: set[Driver] = set()
        self._skew_us = 0
        self._opens = ThreadPoolExecutor(2, "open")
        self._shards = Slots[NamespaceSpec, SemanticShard](
            _shard_spec, self._open_shard, self._opens
        )
        self._logs = Slots[LogSpec, EpisodicLog](_log_spec, self._open_log, self._opens)
        self._follows = Follows(self._logs.ask, self._retire_log_if_mute)
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

    def events(self, call: bytes) -> bytes:
        """See `Port.events`."""
        decoded = port.decode_events(call)
        self._check_epoch(decoded.epoch)
        return port.encode([self._events(item) for item in decoded.items])

    def follow(self, call: bytes) -> bytes:
        """See `Port.follow`."""
        decoded = port.decode_follow(call)
        self._check_epoch(decoded.epoch)
        return port.encode(self._follows.answer(decoded))

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
        logs = [key for key in decoded.shards if key.namespace.block == EPISODIC]
        states = [self._shards.ask(key) for key in decoded.shards if key not in logs]
        opening = [*states, *map(self._logs.ask, logs)]
        wait([state for state in opening if isinstance(state, Future)])
        if decoded.settled is not None:
            self._wait_settled(states, decoded.settled)
        outcomes: list[port.WarmOutcome] = []
        for key in decoded.shards:
            # Not asked, which would try again where the back-off is over.
            failure = (self._logs if key in logs else self._shards).failure(key)
            outcomes.append(failed(failure) if failure else Done(None))
        return port.encode(outcomes)

    def _wait_settled(
        self, states: Iterable[SemanticShard | MindgridError | Future[None]], instant: Instant
    ) -> None:
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
        rss = psutil.Process().memory_info().rss
        shards = sorted(map(_report, self._shards.all()), key=lambda one: str(one.shard))
        logs = sorted(map(_report_log, self._logs.all()), key=lambda one: str(one.log))
        return port.encode(port.HostStatus(self._health(), rss, shards, logs))

    def end_follows(self) -> None:
        """Answer the calls that wait for news; followers that call again begin anew."""
        self._follows.end()

    def close(self) -> None:
        """Close all shards and refuse further calls; none may be under way."""
        self._closed.set()
        self._office = Office(self._office.name, -1)
        self.end_follows()
        leaving, leaving_logs = self._shards.give_up(), self._logs.give_up()
        self._opens.shutdown()
        close_slots(leaving)
        close_slots(leaving_logs)
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

    def _events(self, item: port.EventsItem) -> port.EventsOutcome:
        key = ShardKey(item.namespace, item.generation, 0)
        state = self._logs.ask(key)
        if isinstance(state, Future):
            return Opening()
        if isinstance(state, MindgridError):
            return failed(state)
        try:
            page: EventPage = state.read(item.range, item.limit)
        except Exception as error:  # noqa: BLE001 - one item's bug is not the others'
            if is_fault(error):
                self._retire_log_if_mute(key, state)
            return failed(named(f"log {item.namespace}", error))
        return Done(page)

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
            skew_max_s = self._office.routes.bounds.skew_max_s
            # A shard commits nothing at or before an instant that was read, but forgets that
            # instant when it is opened anew; then it only waits for skew_max.
            if ahead_s > skew_max_s:
                problem = (
                    f"the read's instant is {ahead_s:.3f} s ahead of its clock, more than "
                    f"{skew_max_s} s; clocks differ between machines and must be set"
                )
                return failed(Unavailable(self._office.name, problem))
        shards = self._open_shards(namespace, generation, numbers)
        if isinstance(shards, Failed | Opening):
            return shards
        return {
            number: Reader(ShardKey(namespace, generation, number), shard)
            for number, shard in shards.items()
        }

    # Writes

    def _submit(self, item: port.Write) -> _Running | Failed | Opening:
        skew_max_s = self._office.routes.bounds.skew_max_s
        skewed = abs(self._skew_us) > skew_max_s * 1e6
        # What was decided is carried out whatever the clock says, for it names its time.
        if skewed and not isinstance(item.request, Resolve | Ask | Forget):
            problem = (
                f"its clock is {self._skew_us / 1e6:+.3f} s from the coordinator's, more than "
                f"{skew_max_s} s; writes are refused until the clocks agree"
            )
            return failed(Unavailable(self._office.name, problem))
        if isinstance(item.request, Append | ExpireEvents):
            return self._submit_to_log(item.shard, item.request)
        state = self._shards.ask(item.shard)
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

    def _submit_to_log(self, key: ShardKey, command: LogCommand) -> _Running | Failed | Opening:
        state = self._logs.ask(key)
        if isinstance(state, Future):
            return Opening()
        if isinstance(state, MindgridError):
            return failed(state)
        future = state.submit(command)
        future.add_done_callback(partial(self._look_at_log, key, state))
        return _Running(key, future)

    def _look_at(self, key: ShardKey, shard: SemanticShard, done: Future[Any]) -> None:
        if is_fault(done.exception()):
            # A full disk, for one, refuses a write and leaves the shard as it was.
            self._retire_if_mute(Reader(key, shard))

    def _look_at_log(self, key: ShardKey, log: EpisodicLog, done: Future[Any]) -> None:
        if is_fault(done.exception()):
            self._retire_log_if_mute(key, log)

    # Shards

    def _open_shards(
        self, namespace: NamespaceKey, generation: int, numbers: Sequence[int]
    ) -> dict[int, SemanticShard] | Failed | Opening:
        """Return the shards if all are open; else start opening all that are not."""
        states = {n: self._shards.ask(ShardKey(namespace, generation, n)) for n in numbers}
        shards: dict[int, SemanticShard] = {}
        for number, state in states.items():
            if isinstance(state, MindgridError):
                return failed(state)
            if not isinstance(state, Future):
                shards[number] = state
        return shards if len(shards) == len(states) else Opening()

    def _open_shard(self, spec: NamespaceSpec, folder: Path, epoch: int) -> SemanticShard:
        return self._opener(self._opened(spec, folder, epoch))

    def _open_log(self, spec: LogSpec, folder: Path, epoch: int) -> EpisodicLog:
        return open_log(self._opened(spec, folder, epoch))

    def _opened(self, spec: _Spec, folder: Path, epoch: int) -> Opened[_Spec]:
        return Opened(spec, folder, epoch, self._clock, self._commits, self._maintenance)

    def _retire_failed(self, readers: Iterable[Reader]) -> None:
        for reader in readers:
            if reader.failed:
                self._retire_if_mute(reader)

    def _retire_if_mute(self, reader: Reader) -> None:
        """Retire a shard that answers nothing any more, not even a read of no id."""
        error = reader.probe(stamp_read(self._clock))
        if error is not None:
            self._shards.retire(reader.key, reader.shard, error)

    def _retire_log_if_mute(self, key: ShardKey, log: EpisodicLog) -> None:
        try:
            log.read(EventRange(), 1)
        except MindgridError as error:
            if is_fault(error):
                self._logs.retire(key, log, named(f"log {key.namespace}", error))

    # Office

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._office.epoch:
            raise Moved(self._office.name, epoch)

    def _take_office(self, appointment: port.Appointment) -> None:
        if appointment.epoch < self._office.epoch:
            raise Moved(appointment.host, appointment.epoch)
        for former in appointment.predecessors:
            if not end(former):
                reason = f"its former process {former.pid} does not end"
                raise Unavailable(appointment.host, reason)
        table = appointment.table
        office = Office(
            appointment.host, appointment.epoch, Path(appointment.storage), Routes(table)
        )
        with self._lock:
            self._office = office
            self._drivers = {holding.spec.driver for holding in table.holdings}
            if self._tending is None:
                self._tending = threading.Thread(target=self._tend, name="tend", daemon=True)
                self._tending.start()
        leaving, leaving_logs = self._shards.take_office(office), self._logs.take_office(office)
        for driver in self._drivers:
            self._opens.submit(load_driver, driver)
        # Before the new owner is appointed, which would find the folders locked.
        close_slots(leaving)
        close_slots(leaving_logs)

    def _tend(self) -> None:
        if not self._closed.wait(_TEND_EVERY_S):
            self._maintenance.submit(load_writers, self._drivers)
        while not self._closed.wait(_TEND_EVERY_S):
            for _, shard in (*self._shards.open_ones(), *self._logs.open_ones()):
                if isinstance(shard, Tended):
                    shard.tend()
            self._follows.tend()

    def _health(self) -> port.HostHealth:
        doubts = [doubt for key, s in self._shards.open_ones() for doubt in _doubts(key, s)]
        return port.HostHealth(self._process, self._clock.now(), self._office.epoch, tuple(doubts))


_TURN_WAIT_S = 0.1
"""How long a call of searches waits for others: a slow one holds up nobody for longer.

Two full calls of HYBRID before it take 0.06 s.
"""
_TEND_EVERY_S = 5.0
_SETTLE_WAIT_S = 1.0


def _taken(shard: SemanticShard, request: Command | Request) -> Future[Result] | Future[Reply]:
    if isinstance(request, Upsert | Delete | Expire):
        return shard.submit(request)
    return shard.transact(request)


def _shard_spec(office: Office, key: ShardKey) -> NamespaceSpec | MindgridError:
    try:
        route = office.routes.route(key.namespace)
    except NotFound:
        # The caller's table has it, so this host's is the older one.
        return Moved(str(key), office.epoch)
    if route.generation != key.generation or route.hosts[key.shard] != office.name:
        return Moved(str(key), office.epoch)
    return route.spec


def _log_spec(office: Office, key: ShardKey) -> LogSpec | MindgridError:
    try:
        route = office.routes.log(key.namespace)
    except NotFound:
        return Moved(str(key), office.epoch)
    if route.generation != key.generation or route.host != office.name:
        return Moved(str(key), office.epoch)
    return route.spec


def _doubts(key: ShardKey, shard: SemanticShard) -> Iterator[port.Doubt]:
    doubts = shard.doubts()
    for name, promise in doubts.promises.items():
        yield port.Doubt(key, name, promise.home, ())
    for name, decision in doubts.decisions.items():
        if decision.decided.at is not None:
            yield port.Doubt(key, name, key.shard, decision.participants)


def _report(slot: Slot[NamespaceSpec, SemanticShard]) -> port.ShardReport:
    # Each field is read once, since the shard may close meanwhile.
    shard, failure = slot.shard, slot.failure
    status = shard.status() if shard is not None else None
    return port.ShardReport(slot.key, status, str(failure or ""))


def _report_log(slot: Slot[LogSpec, EpisodicLog]) -> port.LogReport:
    held, failure = slot.shard, slot.failure
    status = held.status() if held is not None else None
    return port.LogReport(slot.key.namespace, status, str(failure or ""))
