"""The coordinator's memory on disk: the namespaces, and who was appointed under which epoch.

One small JSON file, replaced as a whole by each change: written beside, synced, renamed, and the
folder synced, so that it is the old or the new one after any crash. A digest in front of the
content shows damage that JSON itself would let through. The lock beside it keeps a second
coordinator out, on this machine or on a shared file system.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from mindgrid.cluster.process import Process
from mindgrid.cluster.spec import (
    Bounds,
    GridSpec,
    LogSpec,
    NamespaceSpec,
    generation_folder,
)
from mindgrid.cluster.table import Holding, LogHolding, Seat, Table
from mindgrid.shards.clock import Clock, Instant
from mindgrid.shards.config import Driver
from mindgrid.shards.errors import ConfigError, Corruption, Unavailable
from mindgrid.shards.files import write_atomically
from mindgrid.shards.lock import FolderLock

FORMAT = 1
BLOCKS = ("semantic", "episodic", "memory")


class Namespace(msgspec.Struct, frozen=True):
    """A namespace that was configured once. One that no longer is keeps its data, unserved."""

    spec: NamespaceSpec
    generation: int
    created_at: Instant
    configured: bool


class Log(msgspec.Struct, frozen=True):
    """An episodic namespace that was configured once; one that no longer is keeps its events."""

    spec: LogSpec
    generation: int
    created_at: Instant
    configured: bool


class HostEntry(msgspec.Struct, frozen=True):
    """A host, the custom resource it is bound to if any, and its last appointment.

    `processes` are all that may hold its shards: while an appointment is under way, the new
    process behind the former ones.
    """

    name: str
    resource: str = ""
    epoch: int = 0
    processes: tuple[Process, ...] = ()


class _State(msgspec.Struct, frozen=True):
    format: int
    version: int
    layout_version: int
    bounds: Bounds
    hosts_wanted: int
    namespaces: tuple[Namespace, ...]
    hosts: tuple[HostEntry, ...]
    logs: tuple[Log, ...] = ()


_EMPTY = _State(FORMAT, 0, 0, Bounds(), 0, (), ())


class Catalog:
    """The catalog of one storage folder, owned by this process until `close`.

    Every change is durable when its method returns; one that raises has changed nothing.
    """

    def __init__(self, storage: Path, clock: Clock) -> None:
        """Take the lock, read the catalog and raise its version.

        Raises StorageLocked while another process owns it, Corruption if the file is damaged or
        missing over stored data, Unavailable if the disk does not take the new version.
        """
        self.storage = storage
        self._clock = clock
        folder = storage / "catalog"
        with _naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        self._path = folder / "catalog.json"
        try:
            self._state = self._read()
            self._write(msgspec.structs.replace(self._state, version=self._state.version + 1))
        except BaseException:
            self._lock.release()
            raise

    @property
    def bounds(self) -> Bounds:
        """The bounds that were configured last."""
        return self._state.bounds

    @property
    def hosts_wanted(self) -> int:
        """How many hosts were configured last; 0 leaves it to the cluster's size."""
        return self._state.hosts_wanted

    @property
    def hosts(self) -> tuple[HostEntry, ...]:
        """All hosts, in the order in which they were added."""
        return self._state.hosts

    @property
    def is_empty(self) -> bool:
        """Whether there is no namespace of any block."""
        return not self._state.namespaces and not self._state.logs

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """All semantic namespaces, those no longer configured included."""
        return self._state.namespaces

    @property
    def table_version(self) -> int:
        """The version of the table as it stands."""
        return self._state.version

    @property
    def layout_version(self) -> int:
        """The version in which namespaces, bounds or the set of hosts changed last.

        A host whose epoch is lower knows an older layout and must be appointed anew.
        """
        return self._state.layout_version

    def table(self) -> Table:
        """Return the routing table as it stands."""
        return Table(
            self._state.version,
            self._state.bounds,
            tuple(Seat(host.name, host.epoch) for host in self._state.hosts),
            tuple(
                Holding(namespace.spec, namespace.generation)
                for namespace in self._state.namespaces
                if namespace.configured
            ),
            tuple(
                LogHolding(log.spec, log.generation) for log in self._state.logs if log.configured
            ),
        )

    def configure(self, spec: GridSpec) -> bool:
        """Take a new configuration; return whether it differs from the one before.

        Raises ConfigError if it does not fit the stored data, naming the job that changes that.
        """
        known = {namespace.spec.key: namespace for namespace in self._state.namespaces}
        for wanted in spec.namespaces:
            before = known.get(wanted.key)
            known[wanted.key] = (
                Namespace(wanted, 1, self._clock.now(), configured=True)
                if before is None
                else self._reconciled(before, wanted)
            )
        configured = {wanted.key for wanted in spec.namespaces}
        state = msgspec.structs.replace(
            self._state,
            bounds=spec.bounds,
            hosts_wanted=spec.hosts,
            namespaces=tuple(
                msgspec.structs.replace(namespace, configured=key in configured)
                for key, namespace in known.items()
            ),
            logs=self._logs(spec.logs),
        )
        if state == self._state:
            return False
        self._write_layout(state)
        return True

    def add_hosts(self, hosts: tuple[HostEntry, ...]) -> None:
        """Add hosts behind those that exist, never appointed yet."""
        known = {host.name for host in self.hosts}
        added = tuple(host for host in hosts if host.name not in known)
        if added:
            self._write_layout(msgspec.structs.replace(self._state, hosts=self.hosts + added))

    def appoint(self, name: str, processes: tuple[Process, ...]) -> int:
        """Give the host a new epoch, higher than any before, and return it.

        `processes` are all that may be this host until `confirm` names the one that is. The epoch
        is also the table's new version, in one write: a table that was handed out between two
        writes would be taken for the newest by whoever has it.
        """
        epoch = self._state.version + 1
        hosts = self._hosts_with(name, epoch, processes)
        self._write(msgspec.structs.replace(self._state, version=epoch, hosts=hosts))
        return epoch

    def confirm(self, name: str, epoch: int, process: Process) -> None:
        """Record that this process, and no other, is the host under this epoch."""
        hosts = self._hosts_with(name, epoch, (process,))
        self._write(msgspec.structs.replace(self._state, hosts=hosts))

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.release()

    def _hosts_with(
        self, name: str, epoch: int, processes: tuple[Process, ...]
    ) -> tuple[HostEntry, ...]:
        return tuple(
            msgspec.structs.replace(host, epoch=epoch, processes=processes)
            if host.name == name
            else host
            for host in self.hosts
        )

    def _reconciled(self, before: Namespace, wanted: NamespaceSpec) -> Namespace:
        if self._is_stored(before):
            _check_fits(before.spec, wanted)
            return msgspec.structs.replace(before, spec=wanted, configured=True)
        # Rows in RAM were made under the old identity: a new generation starts without them.
        same = _identity(before.spec) == _identity(wanted)
        generation = before.generation if same else before.generation + 1
        return msgspec.structs.replace(before, spec=wanted, generation=generation, configured=True)

    def _logs(self, wanted: Sequence[LogSpec]) -> tuple[Log, ...]:
        known = {log.spec.key: log for log in self._state.logs}
        for spec in wanted:
            before = known.get(spec.key)
            if before is None:
                known[spec.key] = Log(spec, 1, self._clock.now(), configured=True)
                continue
            if self._is_stored(before):
                _check_driver(before.spec, spec)
            known[spec.key] = msgspec.structs.replace(before, spec=spec, configured=True)
        configured = {spec.key for spec in wanted}
        return tuple(
            msgspec.structs.replace(log, configured=key in configured) for key, log in known.items()
        )

    def _is_stored(self, namespace: Namespace | Log) -> bool:
        folder = generation_folder(self.storage, namespace.spec.key, namespace.generation)
        return folder.exists()

    def _read(self) -> _State:
        path = str(self._path)
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            for block in BLOCKS:
                if (self.storage / block).exists():
                    problem = f"it is missing, although {self.storage / block} holds data"
                    raise Corruption(path, problem) from None
            return _EMPTY
        digest, _, body = content.partition(b"\n")
        if digest != _digest(body):
            raise Corruption(path, "its digest does not match")
        try:
            state = msgspec.json.decode(body, type=_State)
        except msgspec.ValidationError as error:
            # The digest holds, so a newer release wrote it.
            raise ConfigError(path, f"it is not of format {FORMAT}: {error}") from error
        if state.format != FORMAT:
            raise ConfigError(path, f"its format is {state.format}; this release reads {FORMAT}")
        return state

    def _write_layout(self, state: _State) -> None:
        version = state.version + 1
        self._write(msgspec.structs.replace(state, version=version, layout_version=version))

    def _write(self, state: _State) -> None:
        assert self._lock.is_held(), "the catalog is only written under its lock"
        body = msgspec.json.format(msgspec.json.encode(state), indent=1)
        with _naming(self._path):
            write_atomically(self._path, _digest(body) + b"\n" + body)
        self._state = state


_LATER = "once a release has that job"


def _identity(spec: NamespaceSpec) -> tuple[object, int, Driver]:
    return spec.config.space, spec.shards, spec.driver


def _check_fits(stored: NamespaceSpec, wanted: NamespaceSpec) -> None:
    where = f"namespace {stored.key}"
    was, now = stored.config.space, wanted.config.space
    for name in ("provider", "model", "revision", "dimensions"):
        old, new = getattr(was, name), getattr(now, name)
        if old != new:
            raise ConfigError(
                where,
                f"embedder.{name} is {new!r}, but its records are stored with {old!r}; write "
                f"{old!r} again, or change them with `mindgrid reembed {stored.key}` {_LATER}",
            )
    if stored.shards != wanted.shards:
        raise ConfigError(
            where,
            f"shards is {wanted.shards}, but its records are stored in {stored.shards}; write "
            f"{stored.shards} again, or change them with `mindgrid reshard {stored.key}` {_LATER}",
        )
    _check_driver(stored, wanted)


def _check_driver(stored: NamespaceSpec | LogSpec, wanted: NamespaceSpec | LogSpec) -> None:
    if stored.driver is not wanted.driver:
        raise ConfigError(
            f"namespace {stored.key}",
            f"its backend's driver is {wanted.driver.value!r}, but its records are stored by "
            f"{stored.driver.value!r}; choose that driver, or another namespace",
        )


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an error of the disk into ours, with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise Unavailable("the catalog", f"{error.filename or path}: {error.strerror}") from error
