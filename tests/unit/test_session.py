"""Two servers on one machine share nothing, and what one leaves behind is found and ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from mindgrid.cluster.orphans import end_life, end_session, is_running, processes_of
from mindgrid.cluster.process import Process, this_process
from mindgrid.cluster.session import MARK, Session, is_free, reachable, session_of
from mindgrid.shards.errors import ConfigError

_SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def session() -> Iterator[Session]:
    """Yield a session of nobody's storage."""
    found = session_of(Path(f"/nowhere/{uuid.uuid4()}"), "127.0.0.1")
    yield found
    end_session(found)
    shutil.rmtree(found.folder, ignore_errors=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home of this test's own, for Ray's token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_storage_folder_has_one_session_and_each_start_a_life_of_its_own(tmp_path: Path) -> None:
    one, again = session_of(tmp_path, "localhost"), session_of(tmp_path / "x" / "..", "localhost")
    assert one.folder == again.folder
    assert one.mark != again.mark
    assert session_of(tmp_path / "other", "localhost").folder != one.folder


def test_every_socket_fits_into_the_kernels_107_bytes(session: Session, home: Path) -> None:
    env = session.env(session.free_ports(), {})
    socket_path = Path(env["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    # As Serve and HAProxy name it while they bind it.
    assert len(f"{socket_path.parent}/{'f' * 56}/{socket_path.name}.1234567.tmp") <= 103
    plasma = (
        session.folder / "r" / "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    )
    assert len(str(plasma)) <= 103


def test_what_keeps_servers_apart_is_not_overridden_and_the_rest_is(
    session: Session, home: Path
) -> None:
    inherited = {
        "RAY_SERVE_HAPROXY_STATS_PORT": "8404",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "7",
        "PATH": "/bin",
    }
    env = session.env(session.free_ports(), inherited)
    assert env["RAY_SERVE_HAPROXY_STATS_PORT"] != "8404"
    assert env["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "7"
    assert env["PATH"] == "/bin"


def test_a_block_of_ports_with_one_in_use_is_passed_over(session: Session) -> None:
    ports = session.free_ports()
    assert session.free_ports() == ports
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", ports.first + 2))
        taken.listen()
        assert not is_free("", ports.first + 2)
        assert session.free_ports() != ports


def test_a_folder_in_which_others_may_write_is_refused(session: Session) -> None:
    session.prepare()
    session.prepare()
    session.folder.chmod(0o777)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        session.prepare()


@pytest.mark.parametrize("host", ["::1", "127.0.0.2"])
def test_a_loopback_address_that_ray_does_not_run_on_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"write 127\.0\.0\.1"):
        session_of(Path("x"), host)


def test_haproxy_shows_its_statistics_to_this_machine_only(session: Session) -> None:
    session.prepare()
    ports = session.free_ports()
    session.write_haproxy(ports, "/bin/echo")
    config = session.folder / "haproxy.cfg"
    door = "frontend http\n    bind *:8080\n"
    own = "    bind {0}:{1}\nlisten stats\n  bind {2}:{3}\n"
    config.write_text(door + own.format("", ports.first + 2, "*", ports.first + 1))
    ran = subprocess.run(
        [session.folder / "haproxy", "-db", "-f", config, "-sf", "7"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"-db -f {config} -sf 7\n"
    local = own.format("127.0.0.1", ports.first + 2, "127.0.0.1", ports.first + 1)
    assert config.read_text() == door + local


def test_the_token_is_made_once_and_for_its_owner_only(session: Session, home: Path) -> None:
    ports = session.free_ports()
    assert session.env(ports, {})["RAY_AUTH_MODE"] == "token"
    token = home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    text = token.read_text()
    assert len(text) == 64
    session.env(ports, {})
    assert token.read_text() == text


def test_who_chose_an_authentication_keeps_it(session: Session, home: Path) -> None:
    ports = session.free_ports()
    assert session.env(ports, {"RAY_AUTH_MODE": "disabled"})["RAY_AUTH_MODE"] == "disabled"
    session.env(ports, {"RAY_AUTH_TOKEN_PATH": "/mine"})
    assert not (home / ".ray").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="Ray keeps loopback addresses on macOS")
def test_only_loopback_addresses_are_spelled_another_way() -> None:
    assert reachable("127.0.0.1:6379") == "[::ffff:127.0.0.1]:6379"
    assert reachable("10.0.0.7:6379") == "10.0.0.7:6379"
    assert reachable("auto") == "auto"


def test_children_and_theirs_are_ended_and_strangers_are_not(session: Session) -> None:
    parent = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    ours = subprocess.Popen(
        [sys.executable, "-c", parent, *_SLEEPS], env={**os.environ, MARK: session.mark}
    )
    with subprocess.Popen(_SLEEPS) as stranger:
        while len(found := processes_of(session)) < 2:
            assert ours.poll() is None
        assert ours.pid in [process.pid for _, process in found]
        # Of another life: left alone when only this one is to end.
        assert end_life(replace(session, life="other").mark) == 0
        assert end_session(replace(session, life="other")) == 2
        assert ours.wait() == -9
        assert processes_of(session) == []
        assert stranger.poll() is None
        stranger.kill()


def test_a_recorded_process_is_ended_but_not_a_later_one_of_its_number(session: Session) -> None:
    with subprocess.Popen(_SLEEPS) as child:
        machine = this_process().machine
        started_at = psutil.Process(child.pid).create_time()
        earlier = Process(machine, child.pid, started_at - 100)
        elsewhere = Process("another", child.pid, started_at)
        assert not is_running(earlier)
        assert end_session(session, [earlier, elsewhere]) == 0
        assert child.poll() is None
        assert end_session(session, [Process(machine, child.pid, started_at)]) == 1
        assert child.wait() == -9
