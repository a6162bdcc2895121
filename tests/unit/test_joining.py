"""Joining a Ray cluster where there is none: an answer in seconds."""

from __future__ import annotations

import subprocess
import sys


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    # In a process of its own: this one may have joined a cluster for other tests.
    program = "import mindgrid; mindgrid.connect('127.0.0.1:1')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "the Ray cluster at 127.0.0.1:1 is unavailable: nothing answers" in last, done.stderr
