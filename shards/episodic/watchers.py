"""Who is called when a log changes."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Watchers:
    """Callbacks without arguments. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: dict[object, Callable[[], None]] = {}

    def add(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Have it called from now on; return what ends that."""
        token = object()
        with self._lock:
            self._watchers[token] = watcher

        def remove() -> None:
            with self._lock:
                self._watchers.pop(token, None)

        return remove

    def call(self) -> None:
        """Call each."""
        with self._lock:
            watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher()
