"""One Ray cluster for all tests of this folder: it takes longer to start than most tests to run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Start a cluster of this run's own, and yield its address."""
    # Workers import this tree as we do. A short path: sockets in it have 107 bytes at most.
    source = str(Path(__file__).parents[2] / "src")
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [source, root, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    # Ray gives its processes 30 s to come up, which a busy machine may exceed.
    os.environ.update(RAY_raylet_start_wait_time_s="180")  # Ray spells it so
    folder = tempfile.mkdtemp(prefix="mg", dir="/tmp")
    context = _start(folder)
    yield context.address_info["address"]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str) -> Any:
    return ray.init(
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=folder,
        namespace="tests",
        log_to_driver=False,
    )
