"""Hosts in Ray actors: the actor, the port to it, and what starts it.

What Ray does that surprises, all seen on 2.60: an actor whose `__init__` raises on a restart is
dead for ever and its name is freed, so `__init__` only keeps its arguments; a call of an asyncio
actor costs the actor twice the CPU time of a threaded one's (1.3 and 0.75 ms); without out-of-order
execution a call whose large argument is still on its way holds up all later ones; an actor's
process outlives its killed raylet by more than a minute.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import ray.exceptions

from mindgrid.cluster.host import THREADS, Host
from mindgrid.cluster.openers import Opener, open_shard
from mindgrid.cluster.process import watch_parent
from mindgrid.shards.errors import MindgridError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Actor = Any
"""A Ray actor's handle, which has no types."""

RAY_NAMESPACE = "mindgrid"

_GROUP_OF = {
    "search": "search",
    "get": "get",
    "warm": "warm",
    "scan": "scan",
    "events": "events",
    "follow": "follow",
    "commit": "commit",
    "transact": "transact",
    "appoint": "control",
    "health": "control",
    "status": "control",
}
SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLD = 20_000
"""New containers between two collections; Python's 700 are a few searches."""
_SHARE = 0.001


class HostActor:
    """A `Host` in a process of its own: every call is handed on."""

    def __init__(self, opener: Opener = open_shard) -> None:
        """Keep the arguments; nothing here may raise."""
        # Threads hand the interpreter over sooner than after 5 ms, which is several searches.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # What is there by now stays: the collector need not walk it again and again, while every
        # search waits.
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        watch_parent(_exit)
        self._host = Host(opener)

    def search(self, call: bytes) -> bytes:
        """See `Port.search`."""
        return self._host.search(call)

    def get(self, call: bytes) -> bytes:
        """See `Port.get`."""
        return self._host.get(call)

    def scan(self, call: bytes) -> bytes:
        """See `Port.scan`."""
        return self._host.scan(call)

    def events(self, call: bytes) -> bytes:
        """See `Port.events`."""
        return self._host.events(call)

    def follow(self, call: bytes) -> bytes:
        """See `Port.follow`."""
        return self._host.follow(call)

    def commit(self, call: bytes) -> bytes:
        """See `Port.commit`."""
        return self._host.commit(call)

    def transact(self, call: bytes) -> bytes:
        """See `Port.transact`."""
        return self._host.transact(call)

    def warm(self, call: bytes) -> bytes:
        """See `Port.warm`."""
        return self._host.warm(call)

    def appoint(self, appointment: bytes) -> bytes:
        """See `Port.appoint`."""
        return self._host.appoint(appointment)

    def health(self, skew_us: int | None = None) -> bytes:
        """See `Port.health`."""
        return self._host.health(skew_us)

    def status(self) -> bytes:
        """See `Port.status`."""
        return self._host.status()


for _name, _group in _GROUP_OF.items():
    # What `@ray.method` does, without taking the types away.
    getattr(HostActor, _name).__ray_concurrency_group__ = _group


def _exit() -> None:
    """End this process at once: whoever takes over must find the folders unlocked."""
    log.error("the raylet is gone; this host exits")
    os._exit(1)


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """Which Ray namespace an actor is in, and the custom resource that binds it to a disk."""

    ray_namespace: str = RAY_NAMESPACE
    resource: str = ""


def start_host(name: str, place: ActorPlace, opener: Opener = open_shard) -> Actor:
    """Return the host's actor, created if it does not exist. Blocks on Ray's GCS.

    Not pinned to a node by affinity: after the loss of the node it could never start again.
    """
    kind = ray.remote(concurrency_groups=dict(THREADS), allow_out_of_order_execution=True)
    return detached(kind(HostActor), name, place).remote(opener)


def detached(kind: Any, name: str, place: ActorPlace) -> Any:
    """Return the actor class with the options that every actor of ours is created with."""
    return kind.options(
        name=name,
        namespace=place.ray_namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        resources={place.resource: _SHARE} if place.resource else None,
    )


def find_actor(name: str, ray_namespace: str) -> Actor:
    """Return the actor of that name; raises Unavailable if there is none. Blocks on Ray's GCS."""
    try:
        return ray.get_actor(name, namespace=ray_namespace)
    except ValueError:
        raise Unavailable(name, "there is no such actor in the Ray cluster") from None
    except ray.exceptions.RayError as error:
        raise Unavailable(name, f"Ray does not answer: {type(error).__name__}") from error


async def ours(what: str, answer: Awaitable[T]) -> T:
    """Return what an actor answers; what it raises, and its absence, become our errors.

    A bug stays what it is: a RayTaskError with the actor's traceback.
    """
    try:
        return await answer
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, MindgridError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise Unavailable(what, f"its process is gone ({type(error).__name__})") from error


class RemotePort:
    """The `Port` of a host's actor, found by name when it is first called."""

    def __init__(self, name: str, ray_namespace: str) -> None:
        self._name = name
        self._ray_namespace = ray_namespace
        self._actor: Actor | None = None

    async def search(self, call: bytes, heavy: bool = False) -> bytes:
        """See `Port.search`."""
        return await self._call("search", call, group="heavy" if heavy else "")

    async def get(self, call: bytes) -> bytes:
        """See `Port.get`."""
        return await self._call("get", call)

    async def scan(self, call: bytes) -> bytes:
        """See `Port.scan`."""
        return await self._call("scan", call)

    async def events(self, call: bytes) -> bytes:
        """See `Port.events`."""
        return await self._call("events", call)

    async def follow(self, call: bytes) -> bytes:
        """See `Port.follow`."""
        return await self._call("follow", call)

    async def commit(self, call: bytes) -> bytes:
        """See `Port.commit`."""
        return await self._call("commit", call)

    async def transact(self, call: bytes) -> bytes:
        """See `Port.transact`."""
        return await self._call("transact", call)

    async def warm(self, call: bytes) -> bytes:
        """See `Port.warm`."""
        return await self._call("warm", call)

    async def appoint(self, appointment: bytes) -> bytes:
        """See `Port.appoint`."""
        return await self._call("appoint", appointment)

    async def health(self, skew_us: int | None = None) -> bytes:
        """See `Port.health`."""
        return await self._call("health", skew_us)

    async def status(self) -> bytes:
        """See `Port.status`."""
        return await self._call("status")

    async def _call(self, method: str, *arguments: bytes | int | None, group: str = "") -> bytes:
        if self._actor is None:
            # A lookup asks the GCS and blocks, so it is not made on the loop.
            self._actor = await asyncio.to_thread(find_actor, self._name, self._ray_namespace)
        called = getattr(self._actor, method)
        if group:
            called = called.options(concurrency_group=group)
        try:
            return await ours(self._name, called.remote(*arguments))
        except Unavailable:
            # It may have been created anew, with another actor behind its name.
            self._actor = None
            raise
