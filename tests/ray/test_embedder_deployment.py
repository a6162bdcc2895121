"""A model in a Serve deployment of its own answers as the same model in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from ray import serve

from mindgrid.cluster.embedders.protocol import EmbedderOptions, EmbedderSpec, Embedding
from mindgrid.cluster.embedders.service import EmbedService, build
from mindgrid.cluster.embedders.serving import APPLICATION, Remote, deployment_name, models, reach
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.errors import ConfigError
from mindgrid.shards.types import Space

NOTES = NamespaceKey("semantic", "notes")
SPEC = EmbedderSpec(Space("local", "all-MiniLM-L6-v2", "", 384))
BROKEN = EmbedderSpec(SPEC.space, EmbedderOptions(path=f"{tempfile.gettempdir()}/no-such-model"))

pytestmark = pytest.mark.ray


class Front:
    """Stands for what the server's application has in front of its models."""

    def __init__(self, *handles: object) -> None:
        pass


def deploy(specs: list[EmbedderSpec]) -> list[str]:
    """Run these models as a server does; return the names of the deployments that then run."""
    front = serve.deployment(name="front", ray_actor_options={"num_cpus": 0})(Front)
    serve.run(front.bind(*models(specs)), name=APPLICATION, route_prefix=None)
    deployments = serve.status().applications[APPLICATION].deployments
    return sorted(name for name in deployments if name.startswith("embedder-"))


@pytest.fixture(scope="module")
def _serving(ray_cluster: str) -> Iterator[None]:
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()


@pytest.mark.usefixtures("_serving")
def test_a_deployment_answers_with_the_bytes_of_the_model_here() -> None:
    assert deploy([SPEC, SPEC]) == [deployment_name(SPEC)]
    texts = [f"text number {number} {'word ' * (number % 40)}" for number in range(150)]

    async def both() -> tuple[bytes, bytes]:
        there = await EmbedService({NOTES: Embedding(SPEC)}, reach).embed(NOTES, texts)
        here = await build(SPEC).embed(texts)
        return there.tobytes(), here.tobytes()

    there, here = asyncio.run(both())
    assert there == here


@pytest.mark.usefixtures("_serving")
def test_a_task_uses_the_deployment_too() -> None:
    deploy([SPEC])

    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def embed() -> tuple[str, tuple[int, ...]]:
        async def run() -> tuple[str, tuple[int, ...]]:
            embedder = await reach(SPEC)
            return type(embedder).__name__, (await embedder.embed(["a", "b"])).shape

        return asyncio.run(run())

    assert ray.get(embed.remote()) == (Remote.__name__, (2, 384))


@pytest.mark.usefixtures("_serving")
def test_a_replica_that_is_killed_costs_no_answer() -> None:
    deploy([SPEC])

    async def run() -> None:
        service = EmbedService({NOTES: Embedding(SPEC, cache_size=-1)}, reach)
        handle = serve.get_deployment_handle(deployment_name(SPEC), APPLICATION)
        before = await service.embed(NOTES, ["apple pie"])
        os.kill(await handle.pid.remote(), signal.SIGKILL)
        after = await service.embed(NOTES, ["apple pie"])
        assert np.array_equal(before, after)

    asyncio.run(run())


@pytest.mark.usefixtures("_serving")
def test_a_model_that_cannot_load_is_an_error_with_a_remedy_and_no_crash_loop() -> None:
    assert deploy([BROKEN]) == [deployment_name(BROKEN)]
    with pytest.raises(ConfigError, match="pip install"):
        asyncio.run(EmbedService({NOTES: Embedding(BROKEN)}, reach).embed(NOTES, ["a"]))


@pytest.mark.usefixtures("_serving")
def test_a_model_nobody_asks_for_any_more_is_taken_down() -> None:
    deploy([SPEC, BROKEN])
    assert deploy([SPEC]) == [deployment_name(SPEC)]
