"""A text is embedded once: for callers at the same time, and for those who come later."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from mindgrid.cluster.embedders.cache import EmbeddingCache
from mindgrid.cluster.embedders.fake import fake_vector
from mindgrid.cluster.embedders.protocol import Vectors
from mindgrid.shards.errors import InvalidRequest, Unavailable
from mindgrid.shards.types import Space

T = TypeVar("T")
SPACE = Space("fake", "fake", "", 4)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 10))


class Model:
    """Counts its calls, and holds them while its gate is shut."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_on: dict[str, Exception] = {}

    async def compute(self, texts: list[str]) -> Vectors:
        self.calls.append(texts)
        await self.gate.wait()
        for text in texts:
            if text in self.fail_on:
                raise self.fail_on[text]
        return np.stack([fake_vector(text, 4) for text in texts])

    def cache(self, size: int = 0) -> EmbeddingCache:
        return EmbeddingCache(SPACE, size, self.compute)

    async def begun(self, calls: int) -> None:
        while len(self.calls) < calls:
            await asyncio.sleep(0)


def expected(*texts: str) -> Vectors:
    return np.stack([fake_vector(text, 4) for text in texts])


def test_a_repeated_text_makes_no_second_call() -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache()
        first = await cache.embed(["a", "b"])
        second = await cache.embed(["b", "c", "a"])
        assert np.array_equal(first, expected("a", "b"))
        assert np.array_equal(second, expected("b", "c", "a"))
        assert model.calls == [["a", "b"], ["c"]]
        assert (cache.hits, cache.misses) == (2, 3)

    run(work())


def test_a_text_twice_in_one_call_is_computed_once() -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache()
        assert np.array_equal(await cache.embed(["a", "b", "a"]), expected("a", "b", "a"))
        assert model.calls == [["a", "b"]]
        assert (cache.hits, cache.misses) == (1, 2)

    run(work())


@pytest.mark.parametrize("size", [0, -1])
def test_concurrent_equal_texts_share_one_computation(size: int) -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache(size)
        model.gate.clear()
        callers = [asyncio.create_task(cache.embed(["a", str(n)])) for n in range(20)]
        await model.begun(20)
        model.gate.set()
        for number, answer in enumerate(await asyncio.gather(*callers)):
            assert np.array_equal(answer, expected("a", str(number)))
        assert sum("a" in call for call in model.calls) == 1
        assert (cache.hits, cache.misses) == (19, 21)

    run(work())


def test_a_caller_that_leaves_does_not_take_the_computation_along() -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache()
        model.gate.clear()
        first = asyncio.create_task(cache.embed(["a"]))
        await model.begun(1)
        second = asyncio.create_task(cache.embed(["a"]))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        model.gate.set()
        assert np.array_equal(await second, expected("a"))
        with pytest.raises(asyncio.CancelledError):
            await first
        assert model.calls == [["a"]]

    run(work())


def test_what_is_computed_is_kept_when_every_caller_has_left() -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache()
        model.gate.clear()
        caller = asyncio.create_task(cache.embed(["a"]))
        await model.begun(1)
        caller.cancel()
        model.gate.set()
        await asyncio.sleep(0.01)
        await cache.embed(["a"])
        assert model.calls == [["a"]]

    run(work())


def test_failures_are_not_kept() -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache()
        model.fail_on["a"] = Unavailable("embedder x/y", "down")
        with pytest.raises(Unavailable, match="down"):
            await cache.embed(["a", "b"])
        model.fail_on.clear()
        assert np.array_equal(await cache.embed(["a", "b"]), expected("a", "b"))
        assert model.calls == [["a", "b"], ["a", "b"]]

    run(work())


def test_a_neighbours_bad_text_does_not_fail_mine() -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache()
        model.fail_on["bad"] = InvalidRequest("content", "refused by the provider")
        model.gate.clear()
        his = asyncio.create_task(cache.embed(["good", "bad"]))
        await model.begun(1)
        mine = asyncio.create_task(cache.embed(["good"]))
        await asyncio.sleep(0)
        model.gate.set()
        assert np.array_equal(await mine, expected("good"))
        with pytest.raises(InvalidRequest):
            await his
        assert model.calls == [["good", "bad"], ["good"]]

    run(work())


def test_a_failure_that_nobody_waits_for_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache()
        model.fail_on["a"] = Unavailable("embedder x/y", "down")
        model.gate.clear()
        caller = asyncio.create_task(cache.embed(["a"]))
        await model.begun(1)
        caller.cancel()
        model.gate.set()
        await asyncio.sleep(0.01)

    run(work())
    assert caplog.records == []


def test_the_least_recently_used_text_goes_first() -> None:
    async def work() -> None:
        model = Model()
        cache = model.cache(size=2)
        await cache.embed(["a"])
        await cache.embed(["b"])
        await cache.embed(["a"])
        await cache.embed(["c"])
        model.calls.clear()
        await cache.embed(["a", "c"])
        assert model.calls == []
        await cache.embed(["b"])
        assert model.calls == [["b"]]

    run(work())


def test_a_size_of_0_is_4096_and_a_negative_one_is_off() -> None:
    async def work() -> None:
        for size, kept in ((0, 4096), (-1, 0), (7, 7)):
            model = Model()
            cache = model.cache(size)
            texts = [str(number) for number in range(4100)]
            await cache.embed(texts)
            for text in reversed(texts):
                await cache.embed([text])
                if len(model.calls) > 1:
                    break
            assert cache.hits == kept

    run(work())


def test_the_answer_is_the_callers_own() -> None:
    async def work() -> None:
        cache = Model().cache()
        (await cache.embed(["a"]))[:] = 7
        assert np.array_equal(await cache.embed(["a"]), expected("a"))

    run(work())


def test_no_texts_are_no_call() -> None:
    async def work() -> None:
        model = Model()
        assert (await model.cache().embed([])).shape == (0, 4)
        assert model.calls == []

    run(work())
