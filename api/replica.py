"""The Serve application: replicas that each hold one door over one grid."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ray import serve
from ray.serve.schema import LoggingConfig

from mindgrid.api.app import Door
from mindgrid.api.front import Grid
from mindgrid.cluster.settings import Settings

ONGOING_REQUESTS_MAX = 4_096
"""Serve's own default of 5 would be used up by five open tails."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the event loop from running; Python's 5 ms is two searches."""


class Front:
    """One replica: decodes, routes and merges. Serve asks it for the door once it is built."""

    def __init__(
        self, open_grid: Callable[[], Grid], body_bytes_max: int, bench: bool, *models: object
    ) -> None:
        """Answer from the grid that `open_grid` makes in this process.

        `models` are handles on the embedding models of the application, which Serve so starts with
        it; the grid finds them by name, as every other process does.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._door = Door(open_grid(), body_bytes_max, bench)

    def __serve_build_asgi_app__(self) -> Door:
        """Return what answers; made here, since a door cannot be pickled (`serve.ingress`)."""
        return self._door


def build(
    settings: Settings, open_grid: Callable[[], Grid], models: Sequence[serve.Application]
) -> serve.Application:
    """Return the application; `open_grid` is pickled, and called in each replica.

    The replicas ask for no CPU: on two cores one each would leave none for the hosts.
    """
    deployment = serve.deployment(
        name="front",
        num_replicas=settings.server.replicas,
        max_ongoing_requests=ONGOING_REQUESTS_MAX,
        ray_actor_options={"num_cpus": 0},
        # A line of log for each request took a tenth of the time, made and thrown away a thirtieth.
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )(serve.ingress()(Front))
    body_bytes_max = settings.server.http.body_bytes_max
    return deployment.bind(open_grid, body_bytes_max, settings.bench, *models)
