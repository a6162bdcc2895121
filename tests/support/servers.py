"""A whole server as a child, with small segments, asked over HTTP and killed in part or whole."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from mindgrid.cluster.orphans import end_session, is_running
from mindgrid.cluster.session import session_of
from mindgrid.cluster.supervisor import ProcessRecord, State, running_server

ROOT = Path(__file__).resolve().parents[2]
SILENCE_MAX_S = 5.0
"""After so long without a sign of life a host is replaced."""
START_WAIT_S = 180.0
"""20 s on a quiet machine."""

_CONFIG = """\
server: {{host: 127.0.0.1, http: {{port: {http}, body_bytes_max: 1MiB}}, grpc: {{port: {grpc}}}}}
storage: {{path: {storage}}}
auth: {{mode: "off"}}
backends: [{{name: main, driver: lance}}]
engine:
  {{seal_rows: 48, seal_after: 1s, exact_rows_max: 64, index_rows_min: 128, merge_fanout: 3}}
cluster: {{hosts: {hosts}, silence_max: {silence_max_s}s}}
namespaces:
"""
_NAMESPACE = """\
  - block: semantic
    name: {name}
    shards: {shards}
    embedder: {{provider: fake, dimensions: 8}}
"""
_LOG = "  - {{block: episodic, name: {name}}}\n"

Json = dict[str, Any]
SEMANTIC = "/mindd.semantic.v1.Semantic"
WAIT_S = 60.0
"""How long an answer may take."""
_JSON = {"content-type": "application/json"}


class Refused(Exception):
    """Another answer than 200: its status, and the code and message where it says so in JSON."""

    def __init__(self, http: int, code: int, message: str) -> None:
        super().__init__(http, code, message)
        self.http = http
        self.code = code
        self.message = message


class KillableServer:
    """`mindgrid serve` on free ports and a storage folder of its own."""

    def __init__(
        self,
        folder: Path,
        namespaces: dict[str, int] | None = None,
        hosts: int = 1,
        logs: Sequence[str] = (),
    ) -> None:
        """Write the configuration: semantic namespaces with their number of shards, and logs.

        Nothing runs yet.
        """
        self.storage = folder / "storage"
        self.port = _free_port()
        self._config = folder / "mindgrid.yaml"
        self._log = folder / "serve.log"
        self._config.write_text(
            _CONFIG.format(
                http=self.port,
                grpc=_free_port(),
                storage=self.storage,
                hosts=hosts,
                silence_max_s=SILENCE_MAX_S,
            )
            + "".join(_NAMESPACE.format(name=n, shards=s) for n, s in (namespaces or {}).items())
            + "".join(_LOG.format(name=name) for name in logs)
        )
        self._child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Return once it is ready."""
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        with self._log.open("a") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "mindgrid.jobs.cli", "serve", "--config", str(self._config)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        late = threading.Timer(START_WAIT_S, self._child.kill)
        late.start()
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        late.cancel()
        assert line.startswith("ready"), self._log.read_text()[-4000:]

    def close(self) -> None:
        """End all of it by force, whatever state a failed test left it in."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._forget_child()
        end_session(session_of(self.storage, "127.0.0.1"))

    def _forget_child(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        self._child.stdout.close()
        self._child = None

    def kill_all(self) -> None:
        """Kill -9 the supervisor and every process under it, the supervisor first."""
        assert self._child is not None
        supervisor = psutil.Process(self._child.pid)
        family = {child.pid: child for child in supervisor.children(recursive=True)}
        for record in self.processes():
            with suppress(psutil.NoSuchProcess):
                if is_running(record.process):
                    family[record.pid] = psutil.Process(record.pid)
        self._child.kill()
        for process in family.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        self._forget_child()
        psutil.wait_procs(list(family.values()), timeout=10)

    def kill(self, name: str) -> ProcessRecord:
        """Kill -9 the process whose name holds this, and return what it was, once it is gone."""
        found = self.named(name)
        os.kill(found.pid, signal.SIGKILL)
        # Else who looks for its successor may still find it.
        eventually(lambda: not is_running(found.process))
        return found

    def kill_and_start(self) -> None:
        """Kill -9 all of it, and return once it is ready again."""
        self.kill_all()
        self.start()

    def kill_head(self, name: str) -> None:
        """Kill -9 a process of Ray's head, and return once what follows is ready."""
        self.kill(name)
        # The orphaned door answers on for seconds, until the supervisor ends it with all the rest.
        self.named(name)
        eventually(self.is_ready)

    def pause(self, name: str, seconds: float) -> None:
        """Stop the process whose name holds this for so long, and let it go on if it is there."""
        found = self.named(name)
        os.kill(found.pid, signal.SIGSTOP)
        time.sleep(seconds)
        if is_running(found.process):
            with suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGCONT)

    def named(self, name: str) -> ProcessRecord:
        """Return the running process whose name holds this; it may take seconds to be recorded."""
        deadline = time.monotonic() + START_WAIT_S
        while True:
            for record in self.processes():
                if name in record.name and is_running(record.process):
                    return record
            assert time.monotonic() < deadline, f"no process is called {name}"
            time.sleep(0.2)

    def processes(self) -> tuple[ProcessRecord, ...]:
        """Return what server.json says runs."""
        record = running_server(self.storage)
        return record.processes if record is not None else ()

    def is_ready(self) -> bool:
        """Return whether it says so, and its door too."""
        record = running_server(self.storage)
        if record is None or record.state is not State.READY:
            return False
        try:
            return self.ask("GET", "/healthz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def call(
        self,
        method: str,
        body: Json | bytes,
        namespace: str = "kept",
        service: str = SEMANTIC,
        wait_s: float = WAIT_S,
    ) -> Json:
        """Return the answer of one verb; raises Refused, or OSError where nobody answers.

        It hangs up, with TimeoutError, after so many seconds without an answer.
        """
        content = body
        if not isinstance(content, bytes):
            content = json.dumps({"namespace": namespace, **content}).encode()
        status, answer = self.ask("POST", f"{service}/{method}", content, wait_s=wait_s)
        if status != 200:
            raise _refusal(status, answer)
        found: Json = json.loads(answer)
        return found

    @contextmanager
    def stream(self, path: str, body: Json, idle_s: float) -> Iterator[Iterator[bytes]]:
        """Yield the lines of an answer as they come.

        Raises what `call` does, and TimeoutError where no line comes for `idle_s`. The lines also
        end where the connection breaks off.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=idle_s)
        try:
            connection.request("POST", path, json.dumps(body), _JSON)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise _refusal(response.status, response.read())
                yield iter(response.readline, b"")
        finally:
            connection.close()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        wait_s: float = WAIT_S,
    ) -> tuple[int, bytes]:
        """Return status and body of any request, made over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=wait_s)
        headers = _JSON if headers is None else headers
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _refusal(status: int, answer: bytes) -> Refused:
    try:
        said: Json = json.loads(answer)
    except ValueError:
        said = {}  # HAProxy answers in plain text while no replica is up.
    return Refused(status, said.get("code", 14), said.get("message", answer.decode()))


def eventually(claim: Callable[[], bool], within_s: float = START_WAIT_S) -> None:
    """Return once the claim holds."""
    deadline = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
