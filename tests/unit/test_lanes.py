"""Lanes: what waits leaves together, in turn, in time, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from mindgrid.cluster.lanes import Deadline, Lane, LaneBounds
from mindgrid.shards.errors import DeadlineExceeded, Exhausted, MindgridError, NotFound

BOUNDS = LaneBounds(calls=1, batch_items=4, waiting_max=8)


class Host:
    """A fake host: holds every call until it is let go, and doubles what it is sent."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.under_way = 0
        self.most_under_way = 0
        self.gate = asyncio.Event()

    async def __call__(self, batch: list[int]) -> Sequence[int | MindgridError]:
        self.calls.append(batch)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        return [2 * work if work >= 0 else NotFound("work", str(work)) for work in batch]


def in_a_loop(claim: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(claim(), 10)

    asyncio.run(main())


def test_items_submitted_in_one_turn_of_the_loop_leave_in_one_call() -> None:
    async def claim() -> None:
        host = Host()
        host.gate.set()
        lane = Lane("quick", host, BOUNDS)
        futures = [lane.submit("a", work, Deadline.after(5)) for work in (1, 2, 3)]
        assert await asyncio.gather(*futures) == [2, 4, 6]
        assert host.calls == [[1, 2, 3]]

    in_a_loop(claim)


def test_a_lone_item_waits_for_nobody() -> None:
    async def claim() -> None:
        host = Host()
        host.gate.set()
        lane = Lane("quick", host, BOUNDS)
        assert await lane.submit("a", 1, Deadline.after(5)) == 2

    in_a_loop(claim)


def test_no_more_calls_are_under_way_than_the_bound_and_no_batch_is_larger() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, LaneBounds(calls=2, batch_items=4, waiting_max=100))
        futures = [lane.submit("a", work, Deadline.after(5)) for work in range(30)]
        await asyncio.sleep(0.01)
        assert host.most_under_way == 2
        host.gate.set()
        assert await asyncio.gather(*futures) == [2 * work for work in range(30)]
        assert host.most_under_way == 2
        assert max(map(len, host.calls)) == 4

    in_a_loop(claim)


def test_a_second_call_leaves_once_it_is_worth_one_or_late() -> None:
    async def claim() -> None:
        host = Host()
        bounds = LaneBounds(2, 4, waiting_max=100, beside_items=3, beside_s=0.05)
        lane = Lane("quick", host, bounds)
        futures = [lane.submit("a", 1, Deadline.after(5))]
        await asyncio.sleep(0.01)
        futures += [lane.submit("a", work, Deadline.after(5)) for work in (2, 3)]
        await asyncio.sleep(0.01)
        assert host.calls == [[1]]
        futures.append(lane.submit("a", 4, Deadline.after(5)))
        await asyncio.sleep(0.01)
        assert host.calls == [[1], [2, 3, 4]]
        host.gate.set()
        await asyncio.gather(*futures)

        host = Host()
        lane = Lane("quick", host, bounds)
        futures = [lane.submit("a", 1, Deadline.after(5))]
        await asyncio.sleep(0.01)
        futures.append(lane.submit("a", 2, Deadline.after(5)))
        await asyncio.sleep(0.2)
        assert host.calls == [[1], [2]]
        host.gate.set()
        await asyncio.gather(*futures)

    in_a_loop(claim)


def test_a_flood_of_one_namespace_delays_another_by_one_item_each() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, LaneBounds(calls=1, batch_items=4, waiting_max=100))
        flood = [lane.submit("a", work, Deadline.after(5)) for work in range(40)]
        await asyncio.sleep(0.01)
        single = lane.submit("b", 100, Deadline.after(5))
        third = lane.submit("c", 200, Deadline.after(5))
        host.gate.set()
        await asyncio.gather(single, third, *flood)
        assert host.calls[1] == [4, 100, 200, 5]

    in_a_loop(claim)


def test_a_full_namespace_is_refused_and_the_others_are_not() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, BOUNDS)
        waiting = [lane.submit("a", work, Deadline.after(5)) for work in range(4)]
        await asyncio.sleep(0.01)
        waiting += [lane.submit("a", work, Deadline.after(5)) for work in range(4, 12)]
        with pytest.raises(Exhausted, match=r"quick queue of namespace a.*limit 8"):
            lane.submit("a", 12, Deadline.after(5))
        waiting.append(lane.submit("b", 13, Deadline.after(5)))
        host.gate.set()
        assert len(await asyncio.gather(*waiting)) == 13

    in_a_loop(claim)


def test_departed_callers_make_room_and_their_work_is_never_sent() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, BOUNDS)
        first = lane.submit("a", 0, Deadline.after(5))
        await asyncio.sleep(0.01)
        departed = [lane.submit("a", work, Deadline.after(5)) for work in range(1, 9)]
        for future in departed:
            future.cancel()
        staying = lane.submit("a", 9, Deadline.after(5))
        host.gate.set()
        assert [await first, await staying] == [0, 18]
        assert host.calls == [[0], [9]]

    in_a_loop(claim)


def test_a_cancelled_task_withdraws_its_item() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, BOUNDS)
        first = lane.submit("a", 0, Deadline.after(5))
        await asyncio.sleep(0.01)

        async def caller() -> int:
            return await lane.submit("a", 1, Deadline.after(5))

        task = asyncio.create_task(caller())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        host.gate.set()
        await first
        await asyncio.sleep(0.01)
        assert host.calls == [[0]]

    in_a_loop(claim)


def test_an_item_that_waited_too_long_fails_in_the_queue_and_is_never_sent() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, BOUNDS)
        first = lane.submit("a", 0, Deadline.after(5))
        await asyncio.sleep(0.01)
        late = lane.submit("a", 1, Deadline.after(0.02))
        with pytest.raises(DeadlineExceeded, match=r"quick lane did not answer within 0\.02 s"):
            await late
        host.gate.set()
        await first
        await asyncio.sleep(0.01)
        assert host.calls == [[0]]

    in_a_loop(claim)


def test_a_host_that_hangs_fails_its_items_at_their_deadlines_and_frees_the_lane() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, BOUNDS)
        short = lane.submit("a", 0, Deadline.after(0.05))
        long = lane.submit("a", 1, Deadline.after(0.3))
        with pytest.raises(DeadlineExceeded):
            await short
        assert not long.done()
        with pytest.raises(DeadlineExceeded):
            await long
        await asyncio.sleep(0.01)
        assert host.under_way == 0
        host.gate.set()
        assert await lane.submit("a", 2, Deadline.after(5)) == 4

    in_a_loop(claim)


def test_an_item_that_fails_does_not_touch_the_others_of_its_batch() -> None:
    async def claim() -> None:
        host = Host()
        host.gate.set()
        lane = Lane("quick", host, BOUNDS)
        good, bad = lane.submit("a", 1, Deadline.after(5)), lane.submit("a", -1, Deadline.after(5))
        assert await good == 2
        with pytest.raises(NotFound):
            await bad

    in_a_loop(claim)


def test_a_call_that_fails_fails_all_its_items_and_the_lane_goes_on() -> None:
    async def claim() -> None:
        broken = [True]

        async def send(batch: list[int]) -> Sequence[int | MindgridError]:
            if broken.pop():
                raise ZeroDivisionError
            return batch

        lane = Lane("quick", send, BOUNDS)
        broken.insert(0, False)
        futures = [lane.submit("a", work, Deadline.after(5)) for work in (1, 2)]
        for future in futures:
            with pytest.raises(ZeroDivisionError):
                await future
        assert await lane.submit("a", 3, Deadline.after(5)) == 3

    in_a_loop(claim)


def test_a_batch_stops_before_its_size_is_exceeded_but_takes_one_item_always() -> None:
    async def claim() -> None:
        host = Host()
        host.gate.set()
        bounds = LaneBounds(calls=1, batch_items=10, waiting_max=10, batch_size=100)
        lane = Lane("write", host, bounds)
        sizes = [60, 30, 500, 20]
        futures = [lane.submit("a", n, Deadline.after(5), size) for n, size in enumerate(sizes)]
        await asyncio.gather(*futures)
        assert host.calls == [[0, 1], [2], [3]]

    in_a_loop(claim)


def test_closing_gives_up_what_waits_and_what_is_under_way() -> None:
    async def claim() -> None:
        host = Host()
        lane = Lane("quick", host, BOUNDS)
        futures = [lane.submit("a", work, Deadline.after(5)) for work in range(6)]
        await asyncio.sleep(0.01)
        await lane.close()
        assert all(future.cancelled() for future in futures)

    in_a_loop(claim)
