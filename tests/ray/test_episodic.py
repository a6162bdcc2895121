"""The claims of tests/contract/events over hosts in Ray."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest
import ray
from tests.contract.events import (
    test_airline,
    test_append,
    test_examples,
    test_expire,
    test_range,
    test_tail,
)
from tests.contract.events.test_airline import told  # noqa: F401 - a fixture
from tests.support.log_callers import Desk, desk_of, log, log_specs  # noqa: F401 - a fixture

from mindgrid.cluster.coordinator import COORDINATOR, RayDirectory, configure
from mindgrid.cluster.spec import Bounds, GridSpec
from mindgrid.shards.config import Driver

pytestmark = pytest.mark.ray

HOSTS = 2

CLAIMS = test_airline, test_append, test_examples, test_expire, test_range, test_tail
for module in CLAIMS:
    for name, claim in list(vars(module).items()):
        if name.startswith("test_"):
            assert globals().setdefault(name, claim) is claim, f"two claims are called {name}"


@pytest.fixture(scope="module")
def desk(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """The door of a grid of this process over the logs of hosts in Ray."""
    ray_namespace = f"t-{uuid.uuid4().hex[:8]}"
    storage = tmp_path_factory.mktemp("storage")
    bounds = Bounds(deadline_s=90.0)
    configure(GridSpec(storage, (), HOSTS, bounds, logs=log_specs(Driver.LANCE)), ray_namespace)
    with asyncio.Runner() as runner, desk_of(runner, RayDirectory(ray_namespace)) as desk:
        yield desk
    for name in (COORDINATOR, *(f"host-{n}" for n in range(HOSTS))):
        ray.kill(ray.get_actor(name, namespace=ray_namespace), no_restart=True)
