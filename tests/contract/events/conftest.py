"""The drivers in this process over which every claim of the episodic block is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.log_callers import Desk, local_logs, log  # noqa: F401 - a fixture

from mindgrid.shards.config import Driver


@pytest.fixture(scope="module", params=list(Driver), ids=lambda driver: driver.value)
def desk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    """One cluster for all claims of a file."""
    with local_logs(tmp_path_factory.mktemp("logs"), request.param, hosts=2) as local:
        yield local.desk
