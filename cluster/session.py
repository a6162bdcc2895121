"""Where one server's Ray lives on this machine: its folder, its ports and its environment.

Ray and Serve assume one cluster per machine. Two servers keep apart only because each has its own
of everything that is named here (docs/decisions/0003). Nothing here imports Ray: the supervisor
stays small, and `ray start` may load this module.

    /tmp/mindgrid-1a2b3c4d/     short, since a socket's path has 107 bytes at most
      r/                        Ray's sessions: sockets and logs
      h/<node id>/              HAProxy's configuration and sockets; the id has 56 letters
      haproxy                   what Serve starts in place of HAProxy
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mindgrid.shards.errors import ConfigError

MARK = "MINDGRID_SESSION"
"""The variable that every process of a server inherits, so that orphans are known by it."""

_ROOT = Path("/tmp")  # Not $TMPDIR: on macOS that alone has 49 bytes.
_ANYWHERE = ("0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "localhost")

# Below the range of ephemeral ports, from which the kernel serves connections meanwhile.
_BLOCKS_FROM, _BLOCKS_TO, _BLOCK = 20_000, 32_000, 500
_REPLICAS_FROM, _REPLICAS_GRPC_FROM = 100, 300


@dataclass(frozen=True, slots=True)
class Ports:
    """A block of ports of one server. Serve itself looks for free ones among the replicas'."""

    first: int

    @property
    def gcs(self) -> int:
        """Return the port of the Ray head: its address."""
        return self.first

    @property
    def ray_address(self) -> str:
        """Return the address by which drivers of this machine join."""
        return f"127.0.0.1:{self.gcs}"

    def env(self) -> dict[str, str]:
        """Return what tells Serve its ports."""
        offsets = {
            "HAPROXY_STATS_PORT": 1,
            "HAPROXY_METRICS_PORT": 2,
            "FALLBACK_PROXY_HTTP_PORT": 3,
            "FALLBACK_PROXY_GRPC_PORT": 4,
            "DIRECT_INGRESS_MIN_HTTP_PORT": _REPLICAS_FROM,
            "DIRECT_INGRESS_MAX_HTTP_PORT": _REPLICAS_GRPC_FROM - 1,
            "DIRECT_INGRESS_MIN_GRPC_PORT": _REPLICAS_GRPC_FROM,
            "DIRECT_INGRESS_MAX_GRPC_PORT": _BLOCK - 1,
        }
        return {f"RAY_SERVE_{name}": str(self.first + at) for name, at in offsets.items()}


@dataclass(frozen=True, slots=True)
class Session:
    """The Ray session of the server on one storage folder, for one life of its supervisor."""

    folder: Path
    life: str
    host: str

    @property
    def mark(self) -> str:
        """Return the value of MARK in every process of this life."""
        return f"{self.folder}:{self.life}"

    def prepare(self) -> None:
        """Make the folder, empty but for the last run's logs.

        Raises ConfigError when somebody else owns it: its name can be guessed, and whoever writes
        there decides what Serve starts.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        found = self.folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022 or self.folder.is_symlink():
            raise ConfigError(str(self.folder), "belongs to somebody else; remove it")
        shutil.rmtree(self._haproxy, ignore_errors=True)
        self._haproxy.mkdir()
        sessions = self.folder / "r"
        for old in sorted(sessions.glob("session_2*"))[:-1]:
            shutil.rmtree(old, ignore_errors=True)

    def free_ports(self) -> Ports:
        """Return a block whose fixed ports are free, the same one as long as it is free.

        Raises ConfigError if there is none.
        """
        blocks = range(_BLOCKS_FROM, _BLOCKS_TO, _BLOCK)
        start = int(self.folder.name[-8:], 16) % len(blocks)
        for at in range(len(blocks)):
            first = blocks[(start + at) % len(blocks)]
            if all(is_free("", first + offset) for offset in range(5)):
                return Ports(first)
        raise ConfigError(
            f"ports {_BLOCKS_FROM} to {_BLOCKS_TO}", "are all in use: Ray needs five in a row"
        )

    def head_command(self, ports: Ports) -> list[str]:
        """Return the command of the Ray head, which ends when one of its parts does."""
        options = {
            "port": ports.gcs,
            "temp-dir": self.folder / "r",
            "include-dashboard": "false",
            "include-log-monitor": "false",
            # 0 lets the kernel choose: two clusters with Ray's own ranges meet in them.
            "dashboard-agent-listen-port": 0,
            "min-worker-port": 0,
            "max-worker-port": 0,
            # A driver's arguments and answers go inline; only jobs need more, and they spill.
            "object-store-memory": 512 * 2**20,
        }
        if self.host not in _ANYWHERE:
            options["node-ip-address"] = self._node_ip()
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--disable-usage-stats", "--no-monitor"),
            *(f"--{name}={value}" for name, value in options.items()),
        ]

    def env(self, ports: Ports, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of every process of the session.

        Serve reads its settings when it is imported, in the controller, the proxies and the
        replicas; they inherit them from the raylet, and it from the head. Who sets a variable of
        the second group knows better.
        """
        haproxy = self._haproxy
        ours = {
            MARK: self.mark,
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "a.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "m.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "state"),
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(self.folder / "haproxy"),
            **ports.env(),
            # Spares Ray's client server, a process of 90 MB that nobody asked for.
            "RAY_START_HOOK": f"{__name__}.without_client_server",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        if self._node_ip() == "127.0.0.1":
            # Ray turns 127.0.0.1 into the outward address unless it believes it is on macOS, and
            # then listens there for everyone, and dies when a laptop changes its network.
            ours["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        defaults = {
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            # 15 by default, which leaves no room below for work that is to give way; the raylet
            # and the gcs stay ahead of it.
            "RAY_worker_niceness": "5",
            # A line of log for each request, parsed in Python: a fifth of a core under load.
            "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
            # Thirty seconds, for load balancers before HAProxy; we have none.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
            # A killed HAProxy is missed this soon.
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
            # A driver or worker whose head is gone ends this soon.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Thirty seconds for its processes to come up, which a busy machine may exceed.
            "RAY_raylet_start_wait_time_s": "180",
        }
        return {**defaults, **inherited, **ours, **_token(inherited)}

    def write_haproxy(self, ports: Ports, binary: str) -> None:
        """Write what Serve starts in place of HAProxy.

        Serve binds HAProxy's statistics and metrics to all interfaces, whatever the host is.
        """
        own = f"{ports.first + 1}|{ports.first + 2}"
        program = self.folder / "haproxy"
        program.write_text(
            "#!/bin/sh\n"
            "# -db -f CONFIGURATION …: keep statistics and metrics on this machine.\n"
            f"sed -i -E 's/^( *bind )[*]?:({own})$/\\1127.0.0.1:\\2/' \"$3\"\n"
            f'exec {shlex.quote(binary)} "$@"\n'
        )
        program.chmod(0o700)

    def clear(self) -> None:
        """Remove what a stopped session leaves, but for its logs."""
        shutil.rmtree(self._haproxy, ignore_errors=True)

    @property
    def _haproxy(self) -> Path:
        return self.folder / "h"

    def _node_ip(self) -> str:
        """Return what HAProxy reaches replicas by: they listen on the server's host."""
        return "127.0.0.1" if self.host in _LOOPBACK else self.host


def session_of(storage: Path, host: str) -> Session:
    """Return the session of a storage folder, with a new life.

    Raises ConfigError for a loopback address that Ray does not run on.
    """
    with contextlib.suppress(ValueError):
        if host not in _LOOPBACK and ipaddress.ip_address(host).is_loopback:
            raise ConfigError("server.host", f"write 127.0.0.1; Ray does not run on {host}")
    name = f"{os.getuid()}:{storage.resolve()}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return Session(_ROOT / f"mindgrid-{digest}", secrets.token_hex(4), host)


def is_free(host: str, port: int) -> bool:
    """Return whether one could listen on the port."""
    with closing(socket.socket()) as probe:
        # As servers do, so that connections which are only fading away do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def reachable(address: str) -> str:
    """Return a Ray address by which this machine's loopback is really joined.

    Ray replaces 127.0.0.1 in addresses by the outward one, where our head does not listen; it
    leaves the same address alone in IPv6 spelling.
    """
    host, _, port = address.rpartition(":")
    mapped = sys.platform == "linux" and host in _LOOPBACK
    return f"[::ffff:127.0.0.1]:{port}" if mapped else address


class _RayParams(Protocol):
    ray_client_server_port: int | None


def without_client_server(params: _RayParams, _head: bool) -> None:
    """Tell `ray start`, which calls this, not to start what `ray://` addresses connect to."""
    params.ray_client_server_port = None


def _token(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what makes Ray ask everyone for a token.

    Without it, whoever reaches a port of Ray runs code here, and Serve's replicas listen for each
    other on all interfaces. Ray's own file is taken, so that drivers of the same user find it.
    """
    if "RAY_AUTH_MODE" in inherited:
        return {}
    if not inherited.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        _make_token(Path.home() / ".ray" / "auth_token")
    return {"RAY_AUTH_MODE": "token"}


def _make_token(path: Path) -> None:
    if path.exists():
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Complete at once under its name, and for its owner only: Ray would let everyone read it.
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
        fresh.rename(path)
    except OSError as error:
        raise ConfigError(
            str(path),
            f"cannot be written ({error.strerror}); put a token somewhere and name its file in "
            "RAY_AUTH_TOKEN_PATH",
        ) from None
