"""What callers ask for vectors: cache, limits, retries and checks in front of any embedder.

    embed(namespace, texts) ─► cut ─► cache ─► calls within the limits ─► embedder ─► check

This is the one place that tries again: adapters ask once. What is Unavailable may answer later;
what is wrong, refused or slow is not asked for a second time.

Where an embedder runs is decided by `reach`: in this process here, in a Serve deployment of its
own in `serving`. Nothing in this file knows Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.wait import wait_exponential_jitter

from mindgrid.cluster.embedders import refusals, registry
from mindgrid.cluster.embedders.cache import EmbeddingCache
from mindgrid.cluster.embedders.coalescer import Coalescer, timed_out
from mindgrid.cluster.embedders.protocol import Embedder, EmbedderSpec, Embedding, Limits, Vectors
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    TextRefused,
    Unavailable,
)

# Enough for two replicas with one call under way and one waiting each.
_CALLS_AT_ONCE = 4

# A text that every model takes.
_PROBE = "text"

Reach = Callable[[EmbedderSpec], Awaitable[Embedder]]


@dataclass(frozen=True, slots=True)
class Retries:
    """How often one call is made, and the pauses between: exponential with jitter.

    A provider that asks to be left alone is, for up to `most_s`; one that asks for longer is given
    up at once, since it would refuse every attempt before.
    """

    attempts: int = 4
    first_s: float = 0.2
    most_s: float = 10.0


class EmbedService:
    """The embedders of all namespaces. Belongs to the event loop it is first used in."""

    def __init__(
        self,
        namespaces: Mapping[NamespaceKey, Embedding],
        reach: Reach | None = None,
        retries: Retries | None = None,
    ) -> None:
        """Take how each namespace embeds, and how an embedder is reached (default: built here)."""
        self._reach = reach or build_here
        self._retries = retries or Retries()
        self._embedders: dict[EmbedderSpec, asyncio.Task[Embedder]] = {}
        self._answered: set[EmbedderSpec] = set()
        self._embeddings: dict[NamespaceKey, Embedding] = {}
        self._caches: dict[NamespaceKey, EmbeddingCache] = {}
        self.learn(namespaces)

    def learn(self, namespaces: Mapping[NamespaceKey, Embedding]) -> None:
        """Add namespaces; those that embed as before keep their caches."""
        for key, one in namespaces.items():
            if self._embeddings.get(key) != one:
                self._embeddings[key] = one
                self._caches[key] = EmbeddingCache(
                    one.spec.space, one.cache_size, self._computing(one.spec)
                )

    async def embed(self, namespace: NamespaceKey, texts: Sequence[str]) -> Vectors:
        """Return one vector of the namespace's space for each text, in order.

        Fails with NotFound, with Unimplemented for a provider of a later release, with TextRefused
        naming a text that the model does not take, with Unavailable naming provider and model, or
        with ConfigError where the operator must act.
        """
        cache = self._caches.get(namespace)
        if cache is None:
            raise NotFound("namespace", str(namespace))
        cut = _limits(self._embeddings[namespace].spec).text_chars or None
        wanted = [text[:cut] for text in texts]
        try:
            return await cache.embed(wanted)
        except TextRefused as error:
            # Its index is that among the texts of one call.
            refused = TextRefused(wanted.index(error.text), error.text, error.reason)
        raise refused

    async def close(self) -> None:
        """Close the embedders that were reached; nothing may be asked any more."""
        embedders, self._embedders = self._embedders, {}
        for task in embedders.values():
            task.cancel()
        for reached in await asyncio.gather(*embedders.values(), return_exceptions=True):
            if not isinstance(reached, BaseException):
                await reached.close()

    def cache_counts(self) -> dict[NamespaceKey, tuple[int, int]]:
        """Return each namespace's cache hits and misses since the start."""
        return {key: (cache.hits, cache.misses) for key, cache in self._caches.items()}

    def _computing(self, spec: EmbedderSpec) -> Callable[[list[str]], Awaitable[Vectors]]:
        async def compute(texts: list[str]) -> Vectors:
            return await self._compute(spec, texts)

        return compute

    async def _compute(self, spec: EmbedderSpec, texts: list[str]) -> Vectors:
        """Embed within the limits of one call, a few calls at once."""
        embedder = await self._embedder(spec)
        gate = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def call(part: list[str]) -> Vectors:
            async with gate:
                return await self._ask(spec, embedder, part)

        calls = [asyncio.ensure_future(call(part)) for part in split(texts, spec)]
        try:
            # No TaskGroup: it would wrap our error into a group that callers do not expect.
            return np.concatenate(await asyncio.gather(*calls))
        finally:
            for one in calls:
                one.cancel()

    async def _ask(self, spec: EmbedderSpec, embedder: Embedder, texts: list[str]) -> Vectors:
        async def call(part: list[str]) -> Vectors:
            vectors = await _call(spec, embedder, part, self._retries)
            self._answered.add(spec)
            return vectors

        try:
            return await refusals.embed(call, texts)
        except TextRefused:
            if spec not in self._answered:
                await _probe(spec, call)
            raise

    async def _embedder(self, spec: EmbedderSpec) -> Embedder:
        """Return the embedder of a spec, reached once; a failure is tried anew next time."""
        task = self._embedders.get(spec)
        if task is None:
            task = self._embedders[spec] = asyncio.create_task(self._reached(spec))
        return await asyncio.shield(task)

    async def _reached(self, spec: EmbedderSpec) -> Embedder:
        try:
            return await self._reach(spec)
        except BaseException:
            self._embedders.pop(spec, None)
            raise


def check_here(specs: Iterable[EmbedderSpec]) -> None:
    """Raise ConfigError for the first model that cannot work in this process."""
    for spec in specs:
        if sentence := registry.find(spec.space.provider).lacks(spec):
            raise ConfigError(str(spec), sentence)


async def build_here(spec: EmbedderSpec) -> Embedder:
    """Return an embedder in this process."""
    # Loading a model takes a second, in which the loop must not stand still.
    return await asyncio.to_thread(build, spec)


def build(spec: EmbedderSpec) -> Embedder:
    """Return an embedder in this process; one that computes here gets a queue in front."""
    provider = registry.find(spec.space.provider)
    model = provider.build(spec)
    return Coalescer(model, spec.options.timeout_s) if provider.own_process else model


def split(texts: Sequence[str], spec: EmbedderSpec) -> list[list[str]]:
    """Return the texts in parts that fit into one call, in order."""
    limits = _limits(spec)
    answer_rows = max(1, limits.call_bytes // (4 * spec.space.dimensions))
    count_max = min(limits.batch_texts, answer_rows)
    bytes_max = min(limits.call_bytes, limits.batch_tokens or limits.call_bytes)
    parts: list[list[str]] = []
    size = 0
    for text in texts:
        bytes_here = len(text.encode())
        if not parts or len(parts[-1]) == count_max or size + bytes_here > bytes_max:
            parts.append([])
            size = 0
        parts[-1].append(text)
        size += bytes_here
    return parts


def _limits(spec: EmbedderSpec) -> Limits:
    return registry.find(spec.space.provider).limits(spec)


async def _probe(spec: EmbedderSpec, call: refusals.Call) -> None:
    """Raise ConfigError if the model refuses whatever it is asked: then no caller is to blame."""
    try:
        await call([_PROBE])
    except InvalidRequest as refused:
        problem = f"it refuses every text: {refused.problem}"
    else:
        return
    raise ConfigError(str(spec), problem)


async def _call(
    spec: EmbedderSpec, embedder: Embedder, texts: list[str], retries: Retries
) -> Vectors:
    """Embed one part; what is unavailable is tried again, what is wrong or slow is not."""
    back_off = wait_exponential_jitter(
        multiplier=retries.first_s, jitter=retries.first_s, max=retries.most_s
    )
    retrying = AsyncRetrying(
        stop=lambda state: (
            state.attempt_number >= retries.attempts or _asked(state) > retries.most_s
        ),
        wait=lambda state: max(back_off(state), _asked(state)),
        retry=retry_if_exception_type(Unavailable),
        reraise=True,
    )
    try:
        return await retrying(_timed, spec, embedder, texts)
    except TimeoutError:
        raise timed_out(spec.space, spec.options.timeout_s) from None


def _asked(state: RetryCallState) -> float:
    """Return how long a provider that just failed asked to be left alone, in seconds."""
    error = state.outcome.exception() if state.outcome is not None else None
    return error.retry_after_s if isinstance(error, Unavailable) else 0.0


async def _timed(spec: EmbedderSpec, embedder: Embedder, texts: list[str]) -> Vectors:
    # A model of ours may have a queue, in which a call may well wait longer than any batch takes:
    # there the batches are timed, by the Coalescer, and the caller's own deadline rules the wait.
    has_queue = registry.find(spec.space.provider).own_process
    async with asyncio.timeout(None if has_queue else spec.options.timeout_s):
        return checked(spec, await embedder.embed(texts), len(texts))


def checked(spec: EmbedderSpec, vectors: Vectors, count: int) -> Vectors:
    """Return what an embedder answered; refuse what must never be stored."""
    if vectors.ndim != 2 or len(vectors) != count:
        raise Unavailable(
            str(spec), f"{count} texts were answered by an array of shape {vectors.shape}"
        )
    if vectors.shape[1] != spec.space.dimensions:
        raise ConfigError(
            str(spec),
            f"the model's vectors have length {vectors.shape[1]}, but embedder.dimensions is "
            f"{spec.space.dimensions}; write {vectors.shape[1]}, or choose a model that takes it",
        )
    good = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise Unavailable(str(spec), f"text {row} was answered by NaN, infinity or all zeros")
    return np.ascontiguousarray(vectors, np.float32)
