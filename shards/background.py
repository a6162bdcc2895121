"""Work that may take seconds, on a thread that gives way to the searches beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

NICENESS = 10
"""About a tenth of a searching thread's share of a contended core. Not 19: a thread that starves
while it holds the interpreter's lock would stop the searches it is meant to let pass."""


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` on a new thread of lower priority; the future ends with its result or error.

    The thread is a daemon and ends with the work: a priority once lowered cannot be raised again.
    """
    future: Future[T] = Future()

    def run() -> None:
        # On Linux a priority belongs to the thread, named by its native id.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return future
