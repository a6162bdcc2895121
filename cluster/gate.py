"""One host as a `Grid` uses it: its lanes, and the bytes that their batches become."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from mindgrid.cluster import port
from mindgrid.cluster.lanes import Lane, LaneBounds
from mindgrid.cluster.port import Done, Failed, Opening, Port, SearchItem
from mindgrid.cluster.spec import Bounds, NamespaceKey
from mindgrid.shards.clock import Instant
from mindgrid.shards.driver import Found
from mindgrid.shards.episodic.types import Append, EventPage, LogResult
from mindgrid.shards.errors import MindgridError, Unavailable
from mindgrid.shards.sizes import draft_bytes, values_bytes
from mindgrid.shards.transactions import Reply
from mindgrid.shards.types import Answer, Query, Result, Scanned, Stamp, Upsert, Want

R = TypeVar("R")


class HostAway(Unavailable):
    """A call did not come through; another host may have taken over, or this one may be back."""


class Part(NamedTuple):
    """The shards of one namespace that live on one host, and the stamp if the caller sets one."""

    namespace: NamespaceKey
    generation: int
    shards: tuple[int, ...]
    stamp: Stamp | None


Work = tuple[Part, Query]
Written = Result | Reply | LogResult | Opening


class Gate:
    """The way from one `Grid` to one host. `epoch` is that of the newest table."""

    def __init__(self, host: str, way: Port, bounds: Bounds) -> None:
        self.host = host
        self.epoch = 0
        self._port = way
        self._heavy_top_k = bounds.heavy_top_k
        waiting = bounds.waiting_max
        quick = LaneBounds(
            calls=bounds.quick_calls,
            batch_items=bounds.batch_queries,
            waiting_max=waiting,
            beside_items=max(1, bounds.batch_queries // 4),
            beside_s=_BESIDE_S,
        )
        heavy = LaneBounds(1, bounds.batch_queries, waiting)
        write = LaneBounds(
            calls=bounds.write_calls,
            batch_items=bounds.batch_writes,
            waiting_max=bounds.writes_max,
            batch_size=bounds.batch_bytes,
            beside_items=max(1, bounds.batch_writes // 4),
            beside_s=_WRITE_BESIDE_S,
        )
        self.quick: Lane[Work, Answer | Opening] = Lane(
            f"{host} quick", partial(self._search, False), quick
        )
        self.heavy: Lane[Work, Answer | Opening] = Lane(
            f"{host} heavy", partial(self._search, True), heavy
        )
        self.reads: Lane[port.GetItem, Found | Opening] = Lane(f"{host} read", self._get, quick)
        self.scans: Lane[port.ScanItem, Scanned | Opening] = Lane(
            f"{host} scan", self._scan, LaneBounds(1, bounds.batch_queries, waiting)
        )
        self.events: Lane[port.EventsItem, EventPage | Opening] = Lane(
            f"{host} events", self._events, LaneBounds(4, bounds.batch_queries, waiting)
        )
        self.writes: Lane[port.Write, Written] = Lane(f"{host} write", self._commit, write)

    def lane_for(self, query: Query) -> Lane[Work, Answer | Opening]:
        """Return the lane of a query, judged before anything is sent."""
        heavy = query.exact or query.top_k > self._heavy_top_k or query.want & Want.PAYLOAD
        return self.heavy if heavy else self.quick

    async def warm(self, shards: list[port.ShardKey], settled: Instant | None = None) -> None:
        """Wait until these shards are open or failed, and for a while until they are settled."""
        await self._call(self._port.warm, port.encode(port.WarmCall(self.epoch, shards, settled)))

    async def follow(self, call: port.FollowCall) -> port.FollowAnswer:
        """Wait for news of what a follower follows."""
        answer = await self._call(self._port.follow, port.encode(call))
        return port.decode_followed(answer)

    async def health(self) -> port.HostHealth:
        """Return the host's process, clock and epoch."""
        return port.decode_health(await self._port.health())

    async def status(self) -> port.HostStatus:
        """Return what the host holds."""
        return port.decode_status(await self._port.status())

    async def close(self) -> None:
        """Give up all that waits."""
        for lane in (self.quick, self.heavy, self.reads, self.scans, self.events, self.writes):
            await lane.close()

    async def _search(
        self, heavy: bool, batch: list[Work]
    ) -> Sequence[Answer | Opening | MindgridError]:
        groups: dict[Part, list[int]] = {}
        for index, (part, _) in enumerate(batch):
            groups.setdefault(part, []).append(index)
        items = [
            SearchItem(p.namespace, p.generation, p.shards, p.stamp, [batch[i][1] for i in indexes])
            for p, indexes in groups.items()
        ]
        call = port.encode(port.SearchCall(self.epoch, items))
        answer = await self._call(partial(self._port.search, heavy=heavy), call)
        by_group = _results(port.decode_answers(answer))
        in_groups = iter(by_group)
        results: list[Answer | Opening | MindgridError] = [_OPENING] * len(batch)
        for indexes in groups.values():
            for index in indexes:
                results[index] = next(in_groups)
        return results

    async def _get(self, batch: list[port.GetItem]) -> Sequence[Found | Opening | MindgridError]:
        call = port.encode(port.GetCall(self.epoch, batch))
        return _results(port.decode_found(await self._call(self._port.get, call)))

    async def _scan(
        self, batch: list[port.ScanItem]
    ) -> Sequence[Scanned | Opening | MindgridError]:
        call = port.encode(port.ScanCall(self.epoch, batch))
        return _results(port.decode_scanned(await self._call(self._port.scan, call)))

    async def _events(
        self, batch: list[port.EventsItem]
    ) -> Sequence[EventPage | Opening | MindgridError]:
        call = port.encode(port.EventsCall(self.epoch, batch))
        return _results(port.decode_read(await self._call(self._port.events, call)))

    async def _commit(self, batch: list[port.Write]) -> Sequence[Written | MindgridError]:
        call = port.encode(port.CommitCall(self.epoch, batch))
        return _results(port.decode_written(await self._call(self._port.commit, call)))

    async def _call(self, call: Callable[[bytes], Awaitable[bytes]], work: bytes) -> bytes:
        try:
            return await call(work)
        except Unavailable as error:
            # Of the host itself, for a shard's errors come back as outcomes.
            raise HostAway(error.what, error.reason) from error


def _results(
    outcomes: Sequence[Done[R] | Failed | Opening],
) -> list[R | Opening | MindgridError]:
    """Return what each item of a call came to."""
    return [
        outcome.value
        if isinstance(outcome, Done)
        else outcome.rebuild()
        if isinstance(outcome, Failed)
        else outcome
        for outcome in outcomes
    ]


def write_bytes(write: port.Write) -> int:
    """Return roughly how many bytes a command is on its way."""
    if isinstance(write.request, Append):
        return sum(_COMMAND_BYTES + values_bytes(draft) for draft in write.request.drafts)
    if isinstance(write.request, Upsert):
        return sum(_COMMAND_BYTES + draft_bytes(draft) for draft in write.request.drafts)
    return _COMMAND_BYTES


_COMMAND_BYTES = 256
_BESIDE_S = 0.005
"""What a call to a host costs at both ends, about; so long a query may wait to save one."""
_WRITE_BESIDE_S = 0.002
"""As long for a write, which is owed a sync and no search: 2 ms save a seventh of the host's work
at 8 and at 32 writers and cost neither of them latency; 5 ms cost 8 writers a fifth of their rate.
"""
_OPENING = Opening()
