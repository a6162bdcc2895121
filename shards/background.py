"""Threads for work that may take seconds and must not delay the searches beside it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10
"""About a tenth of a searching thread's share of a contended core. Not 19: a thread that starves
while it holds the interpreter's lock would stop the searches it is meant to let pass."""


def background_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads run at a lower priority."""
    return ThreadPoolExecutor(threads, name, initializer=_give_way)


def _give_way() -> None:
    # On Linux a priority belongs to the thread, named by its native id. Ray's workers are nice
    # already, so the step counts and not the value.
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
    os.setpriority(os.PRIO_PROCESS, thread, min(19, niceness))
