"""Remembers a namespace's vectors by text, and computes each text once however many ask for it.

A computation belongs to the cache and not to the caller that began it: callers come and go (a
client hangs up, a deadline ends), and whoever waits besides them must not notice. Failures are
never remembered.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from cachetools import LRUCache

from mindgrid.cluster.embedders.protocol import CACHE_SIZE_DEFAULT, Vectors
from mindgrid.shards.errors import CallerError
from mindgrid.shards.types import Space, Vector

Compute = Callable[[list[str]], Awaitable[Vectors]]


class EmbeddingCache:
    """The vectors of one namespace in one space. Belongs to one event loop.

    `size` texts are kept, least recently used first out; 0 stands for CACHE_SIZE_DEFAULT, a
    negative size keeps none. A kept text costs its vector and 32 bytes, however long it is.

    `hits` counts texts answered without the model, from the cache or by a computation that
    another caller had begun; `misses` counts texts the model was asked for.
    """

    def __init__(self, space: Space, size: int, compute: Compute) -> None:
        self._dimensions = space.dimensions
        self._kept: LRUCache[bytes, Vector] | None = None
        if size >= 0:
            self._kept = LRUCache(size or CACHE_SIZE_DEFAULT)
        self._compute = compute
        self._running: dict[bytes, _Running] = {}
        self._prefix = hashlib.sha256(repr(space).encode())
        self.hits = 0
        self.misses = 0

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order; the array is the caller's own."""
        wanted = {self._key(text): text for text in texts}
        found, joined, missing = self._sorted_out(wanted)
        self.hits += len(texts) - len(missing)
        self.misses += len(missing)
        started = self._start(missing)
        found.update(await self._collect(missing, started))
        found.update(await self._join(joined, wanted))
        if not texts:
            return np.empty((0, self._dimensions), np.float32)
        return np.stack([found[self._key(text)] for text in texts])

    def _key(self, text: str) -> bytes:
        """Return the digest of space and text, which is as good as the text and never long."""
        digest = self._prefix.copy()
        digest.update(text.encode())
        return digest.digest()

    def _sorted_out(
        self, wanted: dict[bytes, str]
    ) -> tuple[dict[bytes, Vector], dict[bytes, _Running], dict[bytes, str]]:
        """Return what is kept, what is being computed, and what nobody has asked for yet."""
        found: dict[bytes, Vector] = {}
        joined: dict[bytes, _Running] = {}
        missing: dict[bytes, str] = {}
        for key, text in wanted.items():
            vector = None if self._kept is None else self._kept.get(key)
            if vector is not None:
                found[key] = vector
            elif key in self._running:
                joined[key] = self._running[key]
            else:
                missing[key] = text
        return found, joined, missing

    def _start(self, missing: dict[bytes, str]) -> _Running | None:
        if not missing:
            return None
        # The task is held by `_running`: asyncio itself keeps only a weak reference.
        running = asyncio.ensure_future(self._run(dict(missing)))
        for key in missing:
            self._running[key] = running
        running.add_done_callback(lambda done: self._finish(list(missing), done))
        return running

    async def _run(self, missing: dict[bytes, str]) -> dict[bytes, Vector]:
        vectors = await self._compute(list(missing.values()))
        assert vectors.shape == (len(missing), self._dimensions)
        found = {}
        for key, row in zip(missing, vectors, strict=True):
            # A copy, or one kept row would keep the whole batch in memory.
            found[key] = row.copy()
            found[key].setflags(write=False)
        return found

    def _finish(self, keys: list[bytes], done: _Running) -> None:
        for key in keys:
            if self._running.get(key) is done:
                del self._running[key]
        # Asking for the exception also tells asyncio that it was seen, should no caller be left.
        if done.cancelled() or done.exception() is not None or self._kept is None:
            return
        self._kept.update(done.result())

    async def _collect(self, missing: dict[bytes, str], started: _Running | None) -> _Found:
        return await asyncio.shield(started) if started is not None else {}

    async def _join(self, joined: dict[bytes, _Running], wanted: dict[bytes, str]) -> _Found:
        """Wait for what others have begun; begin anew where one failed over another text of his."""
        found: dict[bytes, Vector] = {}
        again: dict[bytes, str] = {}
        for key, running in joined.items():
            try:
                found[key] = (await asyncio.shield(running))[key]
            except CallerError:
                again[key] = wanted[key]
        if again:
            self.hits -= len(again)
            self.misses += len(again)
            found.update(await asyncio.shield(self._start(again)))  # type: ignore[arg-type]
        return found


_Found = dict[bytes, Vector]
_Running = asyncio.Future[_Found]
