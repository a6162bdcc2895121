"""A real server as a child, on free ports and a folder of its own, and what its processes cost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# A server asks for a token; Ray reads this when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")

import psutil  # type: ignore[import-untyped,unused-ignore]

from mindgrid.cluster import port
from mindgrid.cluster.coordinator import RayDirectory
from mindgrid.cluster.port import HostStatus
from mindgrid.cluster.remote import RAY_NAMESPACE
from mindgrid.cluster.session import MARK, reachable
from mindgrid.cluster.supervisor import running_server
from mindgrid.shards.driver import ShardStatus
from tests.support.http_load import Connection

_CONFIG = """\
server: {{host: 127.0.0.1, http: {{port: {http}}}, grpc: {{port: {grpc}}}}}
storage: {{path: {storage}}}
auth: {{mode: "off"}}
backends: [{{name: main, driver: lance}}]
cluster: {{hosts: 1}}
namespaces:
"""
_NAMESPACE = """\
  - block: semantic
    name: {name}
    backend: main
    embedder: {{provider: fake, dimensions: {dimensions}}}
"""
_LOG = """\
  - block: episodic
    name: {name}
    backend: main
"""
_PARTS = {"host": "ray::Host", "front": "ray::ServeReplica", "haproxy": "haproxy"}
"""How the names of the processes begin that searches pass through."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the processes of one part of a server hold, and what CPU time they have used."""

    cpu_s: float
    rss_mib: float
    own_mib: float
    """Without what is mapped from files or shared."""


class Served:
    """A server that runs; see `served`."""

    def __init__(
        self, folder: Path, namespaces: list[str], dimensions: int, logs: list[str]
    ) -> None:
        """Write the configuration; nothing runs yet."""
        self.storage = folder / "storage"
        self.port = _free_port()
        self._config = folder / "mindgrid.yaml"
        self._config.write_text(
            _CONFIG.format(http=self.port, grpc=_free_port(), storage=self.storage)
            + "".join(_NAMESPACE.format(name=n, dimensions=dimensions) for n in namespaces)
            + "".join(_LOG.format(name=name) for name in logs)
        )
        self._child: subprocess.Popen[str] | None = None
        self._directory: RayDirectory | None = None

    def start(self) -> float:
        """Return after how many seconds it was ready; raises RuntimeError if it never is."""
        started = time.perf_counter()
        command = [sys.executable, "-m", "mindgrid.jobs.cli", "serve", "--config"]
        env = {**os.environ, "MINDD_BENCH": "true"}
        self._child = subprocess.Popen(
            [*command, str(self._config)], env=env, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        if not self._child.stdout.readline().startswith("ready"):
            raise RuntimeError(f"the server ended with {self._child.wait()}")
        return time.perf_counter() - started

    def stop(self) -> None:
        """End it as a person would, by SIGTERM."""
        if self._child is None:
            return
        if self._directory is not None:
            import ray

            ray.shutdown()
            self._directory = None
        self._child.terminate()
        try:
            self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._child = None

    def connect(self) -> Connection:
        """Return a new connection to the door."""
        return Connection(self.port)

    def kill_host(self) -> None:
        """End the process that holds the shards by SIGKILL."""
        os.kill(self._pids("host")[0], signal.SIGKILL)

    def cost(self, part: str) -> Cost:
        """Return what `front`, `host`, `haproxy` or `other`, all the rest, costs by now."""
        cpu = rss = own = 0.0
        for pid in self._pids(part):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                times, memory = process.cpu_times(), process.memory_full_info()
                cpu += times.user + times.system
                rss += memory.rss / 2**20
                own += memory.uss / 2**20
        return Cost(cpu, rss, own)

    def connections(self, part: str) -> int:
        """Return how many TCP connections clients have to this part."""
        found = 0
        for pid in self._pids(part):
            every = psutil.Process(pid).net_connections("tcp")
            ports = {one.laddr.port for one in every if one.status == psutil.CONN_LISTEN}
            here = [one for one in every if one.status == psutil.CONN_ESTABLISHED]
            found += sum(one.laddr.port in ports for one in here)
        return found

    def metric(self, name: str) -> list[float]:
        """Return the values of a metric as Prometheus would read them; seconds old."""
        import ray

        self._connect()
        port_ = ray.nodes()[0]["MetricsExportPort"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port_}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(name + "{")]

    def shards(self) -> dict[str, ShardStatus]:
        """Return the state of each open shard, by namespace."""
        status = asyncio.run(_host_status(self._connect()))
        return {r.shard.namespace.name: r.status for r in status.shards if r.status is not None}

    def _connect(self) -> RayDirectory:
        if self._directory is None:
            import ray

            record = running_server(self.storage)
            assert record is not None
            ray.init(
                address=reachable(record.ray_address),
                namespace=RAY_NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
            )
            self._directory = RayDirectory(RAY_NAMESPACE)
        return self._directory

    def _pids(self, part: str) -> list[int]:
        record = running_server(self.storage)
        assert record is not None
        mark = f"{MARK}={record.session}:".encode()
        found = []
        for process in psutil.process_iter():
            # Some end while they are looked at.
            with suppress(psutil.Error, OSError):
                name = process.name()
                known = next((key for key, start in _PARTS.items() if name.startswith(start)), "")
                if (known or "other") == part and mark in _environ(process.pid):
                    found.append(process.pid)
        return found


def _environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def _host_status(directory: RayDirectory) -> HostStatus:
    table = await directory.table(-1, "")
    return port.decode_status(await directory.port(table.seats[0].host).status())


@contextmanager
def served(
    folder: Path, namespaces: list[str], dimensions: int, logs: Sequence[str] = ()
) -> Iterator[Served]:
    """Yield a running server with one shard a namespace, and end it."""
    server = Served(folder, namespaces, dimensions, list(logs))
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found
