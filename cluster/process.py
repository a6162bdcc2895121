"""Processes that outlive their parents: told from later ones of the same number, and ended."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped,unused-ignore]


class Process(msgspec.Struct, array_like=True, frozen=True):
    """A process on a machine; the start time tells it from a later one with the same number."""

    machine: str
    pid: int
    started_at: float


def this_process() -> Process:
    """Return what this process is known by."""
    return Process(_machine(), os.getpid(), psutil.Process().create_time())


def end(process: Process, wait_s: float = 5.0) -> bool:
    """Kill the process and wait until it is gone; return whether it is.

    A process of another machine cannot be ended from here and counts as gone: what it holds is
    fenced by the epochs in its journals. A stopped process dies of SIGKILL too.
    """
    if process.machine != _machine() or process.pid == os.getpid():
        return True
    try:
        found = psutil.Process(process.pid)
        # Seconds, since the kernel's boot time that psutil adds may be stepped by NTP.
        if abs(found.create_time() - process.started_at) > _SAME_START_S:
            return True
        found.kill()
    except psutil.NoSuchProcess:
        return True
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        # A zombie holds no locks; its parent may be dead or slow to reap it.
        with contextlib.suppress(psutil.NoSuchProcess):
            if found.is_running() and found.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return True
    return False


def watch_parent(gone: Callable[[], None], every_s: float = 0.5) -> None:
    """Call `gone` in a thread of its own once this process has another parent than now.

    Ray leaves an actor's process running for a minute and more after its raylet was killed.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        gone()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _machine() -> str:
    """Name the machine, its boot and, by the host name, the container: where a pid means us."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


_SAME_START_S = 2.0
