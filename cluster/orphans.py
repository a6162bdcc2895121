"""Which processes belong to a server, and how those that outlive it are ended.

Every process that a server starts, and every one these start, inherits the variable `MARK`. That
finds them wherever Ray has put them, also one that nobody had the time to record, and never a
stranger. Records (number and start time) help where a process hides its environment.

What is left after a kill -9 of the Ray head: HAProxy for ever, still holding the port of the door
and sending to ports that later belong to other replicas; busy workers for a minute or so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from mindgrid.cluster.process import Process, end, this_process
from mindgrid.cluster.session import MARK, Session

log = logging.getLogger(__name__)

_WAIT_S = 10.0


def end_session(session: Session, recorded: Iterable[Process] = ()) -> int:
    """Kill all that earlier lives on the same storage left, and this life's too; return how many.

    Waits until they are gone, for they hold ports and locks.
    """
    return _end(f"{session.folder}:", recorded)


def end_life(mark: str) -> int:
    """Kill all processes of one life but this one; return how many."""
    return _end(mark, ())


def processes_of(session: Session) -> list[tuple[str, Process]]:
    """Return the running processes of this life, by name."""
    machine = this_process().machine
    found = []
    for process in _marked(session.mark):
        with contextlib.suppress(psutil.Error):
            name = process.name()
            found.append((name, Process(machine, process.pid, process.create_time())))
    return found


def is_running(process: Process) -> bool:
    """Return whether this very process runs, on this machine."""
    if process.machine != this_process().machine:
        return False
    try:
        found = psutil.Process(process.pid)
        # A second's tolerance, as in `process.end`.
        same = abs(found.create_time() - process.started_at) < 1
        return same and bool(found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end(mark: str, recorded: Iterable[Process]) -> int:
    ended = 0
    for process in recorded:
        if is_running(process):
            end(process)
            ended += 1
    deadline = time.monotonic() + _WAIT_S
    killed = set()
    # Again and again: those that live may start others while we look. Until twice there is none:
    # one that is just becoming another program shows no environment for a moment. A zombie never
    # does, so it is not waited for; its parent may be slow to reap it.
    looks_in_vain = 0
    while looks_in_vain < 2:
        found = list(_marked(mark))
        looks_in_vain = 0 if found else looks_in_vain + 1
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed.add(process.pid)
        if found and time.monotonic() > deadline:
            log.warning("processes %s do not end", [process.pid for process in found])
            break
        time.sleep(0.02)
    return ended + len(killed)


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the living processes whose mark begins so, but for this one."""
    for process in psutil.process_iter():
        # Another user's, and one that has just ended, cannot be read.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and _mark_of(process).startswith(mark):
                yield process


def _mark_of(process: psutil.Process) -> str:
    environ = Path(f"/proc/{process.pid}/environ")
    if not environ.parent.exists():
        return str(process.environ().get(MARK, ""))
    # Without psutil's parsing, a quarter of the time; this is done for each process there is.
    for line in environ.read_bytes().split(b"\0"):
        if line.startswith(f"{MARK}=".encode()):
            return line.decode(errors="replace").partition("=")[2]
    return ""
