"""The claims of tests/contract/semantic over hosts in Ray, with 1, 2 and 5 shards.

With 1 and 2 shards `make test` makes those about commits alone, and `make soak` the others too:
with five they pass through the same actors, and in this process they meet every number of shards.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest
import ray
from tests.contract.semantic import (
    test_expire,
    test_history,
    test_lifecycle,
    test_ranking,
    test_selection,
    test_supersession,
    test_values,
    test_versions,
    test_words,
)
from tests.support.callers import (
    Callers,
    Layout,
    Many,
    callers_of,
    english,  # noqa: F401 - a fixture
    fill,
    notes,  # noqa: F401 - a fixture
)

from mindgrid.cluster.coordinator import COORDINATOR, RayDirectory, configure
from mindgrid.cluster.spec import Bounds, GridSpec
from mindgrid.shards.config import Driver

pytestmark = pytest.mark.ray

HOSTS = 2
ONE, TWO, FIVE = (Layout(Driver.LANCE, shards, HOSTS) for shards in (1, 2, 5))
COMMITS = (test_supersession, test_versions)
OTHERS = (
    *(test_expire, test_history, test_lifecycle, test_ranking, test_selection),
    *(test_values, test_words),
)

for module in (*COMMITS, *OTHERS):
    for name, claim in list(vars(module).items()):
        if name.startswith("test_"):
            assert globals().setdefault(name, claim) is claim, f"two claims are called {name}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Say over which layouts a claim runs."""
    commits = metafunc.function.__module__ in {module.__name__ for module in COMMITS}
    marks = () if commits else (pytest.mark.soak,)
    layouts = [FIVE, *(pytest.param(layout, marks=marks) for layout in (ONE, TWO))]
    metafunc.parametrize("callers", layouts, indirect=True, ids=str, scope="module")


@pytest.fixture(scope="module")
def server(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the Ray namespace of a cluster that holds the namespaces of every layout."""
    ray_namespace = f"t-{uuid.uuid4().hex[:8]}"
    spaces = [space for layout in (ONE, TWO, FIVE) for space in layout.spaces(f"-{layout.shards}")]
    storage = tmp_path_factory.mktemp("storage")
    configure(GridSpec(storage, tuple(spaces), HOSTS, Bounds(deadline_s=90.0)), ray_namespace)
    yield ray_namespace
    for name in (COORDINATOR, *(f"host-{n}" for n in range(HOSTS))):
        ray.kill(ray.get_actor(name, namespace=ray_namespace), no_restart=True)


@pytest.fixture(scope="module")
def callers(server: str, request: pytest.FixtureRequest) -> Iterator[Callers]:
    """The door of a grid of this process over the hosts' shards."""
    layout: Layout = request.param
    with (
        asyncio.Runner() as runner,
        callers_of(runner, RayDirectory(server), f"-{layout.shards}") as callers,
    ):
        yield callers


@pytest.fixture(scope="module")
def many(callers: Callers) -> Many:
    """See `Many`."""
    return fill(callers.at("many"))
