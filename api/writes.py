"""Writes that go to their end, whoever asked for them and has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Writes:
    """The writes of one door that are under way."""

    def __init__(self) -> None:
        """None is under way yet."""
        self._writes: set[asyncio.Task[Any]] = set()

    async def to_its_end(self, write: Coroutine[Any, Any, T]) -> T:
        """Return the write's result; a caller who leaves does not stop it half-way.

        Serve cancels the task of a request whose client has gone. A search is dropped by that, as
        it should be; a batch over several shards would be left with only some of them written.
        """
        task = asyncio.ensure_future(write)
        self._writes.add(task)  # The event loop itself keeps only weak references.
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # Where the caller has left, no one else looks at it.
