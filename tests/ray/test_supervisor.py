"""A server's life: it comes up, heals itself, keeps to itself, and leaves nothing behind.

Ray takes its time to start, so the claims share one server where one does not spoil the next.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from mindgrid.cluster.orphans import end_session, is_running
from mindgrid.cluster.session import session_of
from mindgrid.cluster.supervisor import ProcessRecord, ServerRecord, State, running_server

pytestmark = pytest.mark.ray

_ROOT = Path(__file__).parents[2]
_START_WAIT_S = 180.0  # 20 s on a quiet machine.
_SERVE = """
import sys
from pathlib import Path
from mindgrid.cluster.supervisor import ServerOptions, Supervisor
from mindgrid.shards.errors import MindgridError
storage, port, app = sys.argv[1:]
options = ServerOptions(Path(storage), "127.0.0.1", int(port), 7777, Path("no.yaml"), app)
try:
    Supervisor(options, lambda line: print(line, flush=True)).run()
except MindgridError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@dataclass
class Server:
    """A supervisor in a process of its own, serving the tiny application."""

    storage: Path
    port: int
    process: subprocess.Popen[str]

    def first_line(self) -> str:
        """Return what it prints once it is ready, and if it ends instead, why."""
        assert self.process.stdout is not None
        late = threading.Timer(_START_WAIT_S, self.process.kill)
        late.start()
        try:
            line = self.process.stdout.readline().strip()
            return line or self.process.communicate()[1]
        finally:
            late.cancel()

    def get(self, path: str = "/healthz") -> str:
        """Return the answer: the process of the replica. Raises OSError if there is none."""
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    def record(self) -> ServerRecord:
        """Return what it says of itself."""
        record = running_server(self.storage)
        assert record is not None
        return record

    def named(self, name: str) -> ProcessRecord:
        """Return a process of the server by its name."""
        return next(found for found in self.record().processes if name in found.name)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        """End it by force, whatever state a failed test left it in."""
        self.process.kill()
        self.process.communicate()
        session = session_of(self.storage, "127.0.0.1")
        end_session(session)
        shutil.rmtree(session.folder, ignore_errors=True)


def serve(storage: Path, app: str = "build", port: int = 0) -> Server:
    """Start a server; it is not ready yet."""
    port = port or _free_port()
    paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(storage), str(port), f"tests.support.tiny_app:{app}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Server(storage, port, process)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server that is ready."""
    started = serve(tmp_path / "storage")
    try:
        line = started.first_line()
        assert line.startswith(f"ready http://127.0.0.1:{started.port} ray 127.0.0.1:"), line
        yield started
    finally:
        started.close()


def test_a_server_keeps_to_itself_and_drains_before_it_goes(server: Server, tmp_path: Path) -> None:
    assert server.record().state is State.READY
    refused = serve(server.storage)
    assert refused.process.wait(60) == 1
    words = refused.process.communicate()[1]
    assert words.startswith(f"StorageLocked: {server.storage} is in use by another server"), words

    other = serve(tmp_path / "other")
    try:
        assert other.first_line().startswith("ready")
        assert server.get() != other.get()
        left = other.record().processes
        answers: list[str] = []
        request = threading.Thread(target=lambda: answers.append(other.get("/slow")))
        request.start()
        time.sleep(0.5)
        assert other.stop() == 0
        request.join()
        assert answers[0].isdigit()
        out, err = other.process.communicate()
        assert err == ""
        assert [line.split(":")[0] for line in out.splitlines()] == ["stopping", "stopped"]
        assert not _running(left)
        assert running_server(other.storage) is None
    finally:
        other.close()
    assert server.get().isdigit()


def test_whatever_is_killed_the_server_or_its_next_start_mends_it(server: Server) -> None:
    replica = server.get()
    raylet = server.named("raylet")
    psutil.Process(raylet.pid).kill()
    _eventually(lambda: server.get() != replica)
    _eventually(lambda: server.record().state is State.READY)
    assert server.named("raylet") != raylet

    # With the driver, for it would clean up.
    before = server.record().processes
    driver = server.named("driver")
    server.process.kill()
    psutil.Process(driver.pid).kill()
    server.process.communicate()
    orphan = server.get()
    assert running_server(server.storage) is None

    again = serve(server.storage, port=server.port)
    try:
        assert again.first_line().startswith("ready")
        assert again.get() != orphan
        assert not _running(before)

        # Now the driver is left, and ends what is.
        before = again.record().processes
        again.process.kill()
        _eventually(lambda: not _running(before), within_s=30)
    finally:
        again.close()


def test_what_a_person_must_mend_is_said_and_not_tried_again(tmp_path: Path) -> None:
    refused = serve(tmp_path, "refuse")
    try:
        assert refused.process.wait(_START_WAIT_S) == 1
        out, err = refused.process.communicate()
        assert out == ""
        assert err.strip() == "ConfigError: no.yaml: holds nothing"
    finally:
        refused.close()


def _eventually(claim: Callable[[], bool], within_s: float = _START_WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while True:
        # While the server is down, nobody answers.
        with contextlib.suppress(OSError, http.client.HTTPException):
            if claim():
                return
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.2)


def _running(records: Iterable[ProcessRecord]) -> list[ProcessRecord]:
    return [record for record in records if is_running(record.process)]


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
