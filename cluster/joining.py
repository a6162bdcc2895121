"""How a user's process joins the Ray cluster of a server."""

from __future__ import annotations

import os
from pathlib import Path

import ray
from ray._private.authentication import authentication_token_setup

from mindgrid.cluster.session import reachable
from mindgrid.cluster.supervisor import running_server
from mindgrid.shards.errors import Unavailable


def join(address: str, ray_namespace: str, storage: Path | None = None) -> None:
    """Join the cluster at `address`, host:port of Ray's head; does nothing inside a cluster.

    "auto" is the server on `storage` if that is given, else what Ray takes it for. Raises
    Unavailable if no server runs there or none answers.
    """
    if ray.is_initialized():
        return
    if address == "auto" and storage is not None:
        server = running_server(storage)
        if server is None:
            problem = "none is running; start it with `mindgrid serve`"
            raise Unavailable(f"the server on {storage}", problem)
        address = server.ray_address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    # Ray reads RAY_AUTH_MODE when it is imported, which has happened; by itself it turns the
    # token on only where it finds the cluster by itself (docs/decisions/0003).
    authentication_token_setup.maybe_enable_token_auth_if_token_available(False)
    try:
        ray.init(
            address=reachable(address),
            namespace=ray_namespace,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError) as error:
        raise Unavailable(f"the Ray cluster at {address}", str(error)) from error
