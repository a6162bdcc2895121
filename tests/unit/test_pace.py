"""Large requests take turns beside small ones, and only then."""

from __future__ import annotations

import asyncio

from mindgrid.api.pace import Pace


class Large:
    """Large requests that note how many are under way, and end when they are told to."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.go = asyncio.Semaphore(0)
        self.begun: list[int] = []

    async def run(self, number: int) -> None:
        async with self._pace.large():
            self.begun.append(number)
            await self.go.acquire()


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_large_requests_alone_run_side_by_side() -> None:
    async def claim() -> None:
        large = Large(Pace())
        running = [asyncio.create_task(large.run(n)) for n in range(4)]
        await _settle()
        assert large.begun == [0, 1, 2, 3]
        for _ in running:
            large.go.release()
        await asyncio.gather(*running)

    asyncio.run(claim())


def test_beside_small_requests_they_take_turns_in_their_order() -> None:
    async def claim() -> None:
        pace = Pace()
        pace.small()
        large = Large(pace)
        running = [asyncio.create_task(large.run(n)) for n in range(4)]
        for begun in range(1, 5):
            await _settle()
            assert large.begun == list(range(begun))
            large.go.release()
        await asyncio.gather(*running)

    asyncio.run(claim())


def test_one_that_leaves_while_it_waits_holds_up_nobody() -> None:
    async def claim() -> None:
        pace = Pace()
        pace.small()
        large = Large(pace)
        running = [asyncio.create_task(large.run(n)) for n in range(3)]
        await _settle()
        running[1].cancel()
        for _ in range(2):
            large.go.release()
        await asyncio.gather(*running, return_exceptions=True)
        assert large.begun == [0, 2]

    asyncio.run(claim())


def test_some_time_after_the_last_small_request_they_run_side_by_side_again() -> None:
    async def claim() -> None:
        pace = Pace(quiet_s=0.02)
        pace.small()
        await asyncio.sleep(0.03)
        large = Large(pace)
        running = [asyncio.create_task(large.run(n)) for n in range(2)]
        await _settle()
        assert large.begun == [0, 1]
        for _ in running:
            large.go.release()
        await asyncio.gather(*running)

    asyncio.run(claim())
