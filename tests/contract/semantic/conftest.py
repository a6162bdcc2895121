"""The layouts in this process over which every claim of the semantic block is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.callers import (
    Callers,
    Layout,
    Many,
    english,  # noqa: F401 - a fixture
    fill,
    local_callers,
    notes,  # noqa: F401 - a fixture
)

from mindgrid.shards.config import Driver

LAYOUTS = [
    Layout(Driver.MEMORY, 1),
    Layout(Driver.LANCE, 1),
    Layout(Driver.LANCE, 2),
    Layout(Driver.LANCE, 5, hosts=2),
]


@pytest.fixture(scope="session", params=LAYOUTS, ids=str)
def callers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callers]:
    """One cluster for all claims of a layout."""
    layout: Layout = request.param
    with local_callers(tmp_path_factory.mktemp(str(layout)), layout) as callers:
        yield callers


@pytest.fixture(scope="session")
def many(callers: Callers) -> Many:
    """See `Many`."""
    return fill(callers.at("many"))
