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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from mindgrid.cluster.orphans import end_session, is_running
from mindgrid.cluster.session import session_of
from mindgrid.cluster.supervisor import ProcessRecord, State, running_server

ROOT = Path(__file__).resolve().parents[2]
START_WAIT_S = 180.0
"""20 s on a quiet machine."""

_CONFIG = """\
server: {{host: 127.0.0.1, http: {{port: {http}, body_bytes_max: 1MiB}}, grpc: {{port: {grpc}}}}}
storage: {{path: {storage}}}
auth: {{mode: "off"}}
backends: [{{name: main, driver: lance}}]
engine:
  {{seal_rows: 48, seal_after: 1s, exact_rows_max: 64, index_rows_min: 128, merge_fanout: 3}}
cluster: {{hosts: {hosts}, silence_max: 5s}}
namespaces:
"""
_NAMESPACE = """\
  - block: semantic
    name: {name}
    shards: {shards}
    embedder: {{provider: fake, dimensions: 8}}
"""

Json = dict[str, Any]


class Refused(Exception):
    """Another answer than 200: its status, and the code and message where it says so in JSON."""

    def __init__(self, http: int, code: int, message: str) -> None:
        super().__init__(http, code, message)
        self.http = http
        self.code = code
        self.message = message


class KillableServer:
    """`mindgrid serve` on free ports and a storage folder of its own."""

    def __init__(self, folder: Path, namespaces: dict[str, int], hosts: int = 1) -> None:
        """Write the configuration: namespaces with their number of shards. Nothing runs yet."""
        self.storage = folder / "storage"
        self.port = _free_port()
        self._config = folder / "mindgrid.yaml"
        self._log = folder / "serve.log"
        self._config.write_text(
            _CONFIG.format(http=self.port, grpc=_free_port(), storage=self.storage, hosts=hosts)
            + "".join(_NAMESPACE.format(name=n, shards=s) for n, s in namespaces.items())
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

    def call(self, method: str, body: Json | bytes, namespace: str = "kept") -> Json:
        """Return the answer of one verb; raises Refused, or OSError where nobody answers."""
        content = body
        if not isinstance(content, bytes):
            content = json.dumps({"namespace": namespace, **content}).encode()
        status, answer = self.ask("POST", f"/mindd.semantic.v1.Semantic/{method}", content)
        try:
            found: Json = json.loads(answer)
        except ValueError:
            found = {}  # HAProxy answers in plain text while no replica is up.
        if status != 200:
            raise Refused(status, found.get("code", 14), found.get("message", answer.decode()))
        return found

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of any request, made over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"content-type": "application/json"} if headers is None else headers
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


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
