"""Puts the texts of concurrent callers into shared batches, so that none waits for another's pile.

While the model computes, texts gather; then each caller in turn gives one text at a time until the
batch is full. A query of one text so waits for the batch under way and is in the next, even while
a bulk load has hundreds of texts waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mindgrid.cluster.embedders.protocol import Embedder, Vectors
from mindgrid.shards.errors import Exhausted, MindgridError, Unavailable
from mindgrid.shards.types import Space

log = logging.getLogger(__name__)

# About 128 tokens, a twentieth of a second on one core: what a query waits for twice at most. More
# would make no batch faster (cluster/embedders/local.py).
BATCH_CHARS = 512
BATCH_TEXTS = 32
WAITING_MAX = 2_048


@dataclass(slots=True)
class _Job:
    """The texts of one caller; `left` are the rows that no batch has taken yet."""

    texts: Sequence[str]
    left: deque[int]
    out: Vectors
    ready: int = 0
    done: asyncio.Future[Vectors] = field(default_factory=asyncio.Future)


class Coalescer:
    """An embedder in front of an embedder. Belongs to one event loop.

    A batch may take `timeout_s`, and at most `waiting_max` texts wait; more are refused as
    Exhausted.
    """

    def __init__(
        self, model: Embedder, timeout_s: float | None = None, waiting_max: int = WAITING_MAX
    ) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._waiting_max = waiting_max
        self._waiting = 0
        self._jobs: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None

    @property
    def space(self) -> Space:
        """The space of the model behind."""
        return self._model.space

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order."""
        out = np.empty((len(texts), self.space.dimensions), np.float32)
        if not texts:
            return out
        if self._waiting and self._waiting + len(texts) > self._waiting_max:
            what = f"the queue of embedder {self.space.provider}/{self.space.model}"
            raise Exhausted(what, self._waiting_max)
        # Texts of like length share a batch and waste little on padding.
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        job = _Job(texts, deque(order), out)
        self._jobs.append(job)
        self._waiting += len(texts)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return await job.done
        finally:
            self._drop(job)

    async def close(self) -> None:
        """Close the model behind."""
        await self._model.close()

    def _drop(self, job: _Job) -> None:
        """Forget the texts that nobody waits for any more."""
        self._waiting -= len(job.left)
        job.left.clear()

    async def _work(self) -> None:
        while batch := self._take():
            rows = [job.texts[row] for job, row in batch]
            try:
                async with asyncio.timeout(self._timeout_s):
                    vectors = await self._model.embed(rows)
                self._hand_out(batch, vectors)
            except TimeoutError:
                self._fail(batch, timed_out(self.space, self._timeout_s or 0.0))
            except MindgridError as error:
                self._fail(batch, error)
            except Exception as error:
                # A bug: who is in the batch hears of it. Raised here, it would end this task, and
                # those that wait for the next batch would do so for ever.
                log.exception("a batch of embedder %s failed", self.space)
                self._fail(batch, error)

    def _take(self) -> list[tuple[_Job, int]]:
        """Return the next batch: one text of each caller in turn until it is full."""
        batch: list[tuple[_Job, int]] = []
        chars = 0
        while self._jobs and len(batch) < BATCH_TEXTS:
            job = self._jobs.popleft()
            if not job.left:
                continue
            chars += len(job.texts[job.left[0]])
            if batch and chars > BATCH_CHARS:
                self._jobs.appendleft(job)
                break
            batch.append((job, job.left.popleft()))
            self._waiting -= 1
            if job.left:
                self._jobs.append(job)
        return batch

    def _hand_out(self, batch: list[tuple[_Job, int]], vectors: Vectors) -> None:
        for (job, row), vector in zip(batch, vectors, strict=True):
            job.out[row] = vector
            job.ready += 1
            if job.ready == len(job.texts) and not job.done.done():
                job.done.set_result(job.out)

    def _fail(self, batch: list[tuple[_Job, int]], error: Exception) -> None:
        for job, _ in batch:
            self._drop(job)
            if not job.done.done():
                job.done.set_exception(error)


def timed_out(space: Space, timeout_s: float) -> Unavailable:
    """Return the error of a model that used up its time."""
    return Unavailable(
        f"embedder {space.provider}/{space.model}",
        f"no answer within {timeout_s:g} s (embedder.options.timeout)",
    )
