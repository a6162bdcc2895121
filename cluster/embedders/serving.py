"""Runs a model as a Serve deployment of its own, and reaches it from any process of the cluster.

Front replicas, jobs and drivers then share the model's memory and its batches, and it scales apart
from them. Serve's handles carry calls over gRPC in throughput-optimized mode, where a replica
refuses messages over 4 MiB; `service.split` keeps calls below. Answers travel as bytes, and errors
as their name and fields, so that neither depends on what both sides can unpickle.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import ray
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from mindgrid.cluster.embedders import registry
from mindgrid.cluster.embedders.coalescer import WAITING_MAX
from mindgrid.cluster.embedders.protocol import Embedder, EmbedderSpec, Vectors
from mindgrid.cluster.embedders.service import build, build_here
from mindgrid.shards.errors import Exhausted, MindgridError, Unavailable, pack, unpack
from mindgrid.shards.types import Space

APPLICATION = "mindgrid"
"""The name of the one Serve application of a server."""

Reply = bytes | tuple[str, list[str | int | float]]

log = logging.getLogger(__name__)


def models(specs: Iterable[EmbedderSpec]) -> list[serve.Application]:
    """Return a deployment for each distinct model that wants its own process.

    They are bound into the one application of the server, so that Serve's gRPC proxy, with one
    application to choose from, needs no metadata to find it.
    """
    wanted = {deployment_name(spec): spec for spec in specs if _has_own_process(spec)}
    return [
        serve.deployment(
            name=name,
            num_replicas=spec.options.replicas,
            # Calls wait in the replica, where they share batches, and not in front of it.
            max_ongoing_requests=WAITING_MAX,
            # Two cores are soon booked out; the operating system shares them better.
            ray_actor_options={"num_cpus": 0},
        )(EmbedServer).bind(spec)
        for name, spec in sorted(wanted.items())
    ]


def deployment_name(spec: EmbedderSpec) -> str:
    """Return the deployment's name: equal for equal specs, in every process."""
    digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:8]
    return f"embedder-{spec.space.provider}-{digest}"


async def reach(spec: EmbedderSpec) -> Embedder:
    """Return the embedder where it runs: its deployment if there is one, else in this process."""
    if not _has_own_process(spec) or not ray.is_initialized():
        return await build_here(spec)
    try:
        handle = await asyncio.to_thread(
            serve.get_deployment_handle, deployment_name(spec), APPLICATION
        )
    except RayServeException:
        log.info("%s has no deployment; it runs in this process", spec)
        return await build_here(spec)
    return Remote(spec, handle)


def _has_own_process(spec: EmbedderSpec) -> bool:
    return registry.find(spec.space.provider).own_process


class EmbedServer:
    """One replica: a model and the queue in front of it."""

    def __init__(self, spec: EmbedderSpec) -> None:
        self._spec = spec
        self._model: Embedder | None = None
        try:
            self._model = build(spec)
        except MindgridError as error:
            # Serve would start replicas for ever; so callers hear the reason instead.
            log.warning("%s", error)

    async def embed(self, texts: list[str]) -> Reply:
        """Return the vectors' bytes, float32 and little-endian, or an error taken apart."""
        try:
            self._model = self._model or await build_here(self._spec)
            return (await self._model.embed(texts)).astype("<f4", copy=False).tobytes()
        except MindgridError as error:
            return pack(error)

    def pid(self) -> int:
        """Return this replica's process, for `mindgrid status` and for tests that end it."""
        return os.getpid()


class Remote:
    """A model behind a Serve handle. Belongs to the event loop it is first used in."""

    def __init__(self, spec: EmbedderSpec, handle: Any) -> None:
        self._spec = spec
        self._handle = handle

    @property
    def space(self) -> Space:
        """The space of the model behind."""
        return self._spec.space

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector for each text, in order."""
        reply: Reply
        try:
            reply = await self._handle.embed.remote(list(texts))
        except BackPressureError as error:
            raise Exhausted(f"the queue of {self._spec}", error.args[1]) from error
        except (RayError, RayServeException, AioRpcError) as error:
            if isinstance(error, ray.exceptions.RayTaskError):
                raise  # a bug over there
            raise Unavailable(str(self._spec), f"its replica is gone: {error}") from error
        if not isinstance(reply, bytes):
            raise unpack(*reply)
        return np.frombuffer(reply, "<f4").reshape(len(texts), -1)

    async def close(self) -> None:
        """Do nothing: the model belongs to the server."""
