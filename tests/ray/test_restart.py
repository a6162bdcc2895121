"""A process with a handle learns that its server was started anew, and connects again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.servers import ROOT, KillableServer

pytestmark = pytest.mark.ray


def test_who_holds_a_handle_over_a_restart_is_told_and_connects_again(tmp_path: Path) -> None:
    server = KillableServer(tmp_path, logs=["runs"])
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    try:
        server.start()
        with subprocess.Popen(
            [sys.executable, "-m", "tests.support.reconnecting", str(server.storage)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdin is not None
            try:
                assert child.stdout.readline() == "followed 1\n"
                server.kill_and_start()
                child.stdin.write("\n")
                rest, noise = child.communicate(timeout=120)
            finally:
                child.kill()
        assert "Task was destroyed" not in noise
        assert rest.splitlines() == ["ClusterReplaced", "ClusterReplaced", "followed 2"]
    finally:
        server.close()
