"""A host's actor: which of its calls may wait, and which never do."""

from __future__ import annotations

import asyncio
import threading
import uuid

import pytest
import ray
from tests.support.grids import namespace

from mindgrid.cluster import port
from mindgrid.cluster.host import THREADS
from mindgrid.cluster.openers import Opened
from mindgrid.cluster.port import ShardKey
from mindgrid.cluster.remote import ActorPlace, RemotePort, start_host
from mindgrid.cluster.spec import Bounds, NamespaceSpec
from mindgrid.cluster.table import Holding, Seat, Table
from mindgrid.shards.driver import SemanticShard

pytestmark = pytest.mark.ray


def never(opened: Opened[NamespaceSpec]) -> SemanticShard:
    """Open a shard on a disk that does not answer."""
    threading.Event().wait()
    raise AssertionError


def test_a_host_whose_shards_open_slowly_still_tells_that_it_lives(ray_cluster: str) -> None:
    ray_namespace = f"t-{uuid.uuid4().hex[:8]}"
    spec = namespace("slow", 200)
    table = Table(1, Bounds(), (Seat("host-0", 1),), (Holding(spec, 1),))
    appointment = port.encode(port.Appointment("host-0", 1, table, "/unused", ()))

    async def claim() -> None:
        host = RemotePort("host-0", ray_namespace)
        await host.appoint(appointment)
        calls = [
            port.encode(port.WarmCall(1, [ShardKey(spec.key, 1, shard)]))
            for shard in range(THREADS["warm"] + THREADS["control"])
        ]
        waiting = [asyncio.ensure_future(host.warm(call)) for call in calls]
        done, _ = await asyncio.wait(waiting, timeout=1)
        assert not done
        for call in (host.health(), host.status(), host.appoint(appointment)):
            await asyncio.wait_for(call, 5)
        for one in waiting:
            one.cancel()

    actor = start_host("host-0", ActorPlace(ray_namespace), never)
    try:
        asyncio.run(claim())
    finally:
        ray.kill(actor, no_restart=True)
