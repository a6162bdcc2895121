"""How a user's process joins the Ray cluster of a server."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import ray
from ray._private.authentication import authentication_token_setup
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RpcError

from mindgrid.cluster.session import reachable
from mindgrid.cluster.supervisor import running_server
from mindgrid.shards.errors import ClusterReplaced, Unavailable


def join(address: str, ray_namespace: str, storage: Path | None = None) -> None:
    """Join the cluster at `address`, host:port of Ray's head; inside a cluster it must be that one.

    "auto" is the server on `storage` if that is given, else the cluster that this process is in or
    what Ray takes it for. Raises Unavailable if no server runs there, none answers, or this process
    has joined another cluster: Ray knows one a process. One that was joined and has been started
    anew since is joined anew.
    """
    if address == "auto" and storage is not None:
        server = running_server(storage)
        if server is not None:
            address = server.ray_address
        elif not ray.is_initialized():
            problem = "none is running; start it with `mindgrid serve`"
            raise Unavailable(f"the server on {storage}", problem)
    if ray.is_initialized():
        _check_is_at(address)
        try:
            check_joined()
        except ClusterReplaced:
            # Nothing is left of it, and Ray would ask for it for ever.
            ray.shutdown()
        else:
            return
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address != "auto":
        _check_answers(address)
    # It warns that what the server turned on may be turned off.
    logging.getLogger(authentication_token_setup.__name__).setLevel(logging.ERROR)
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


def _check_is_at(address: str) -> None:
    joined = ray.get_runtime_context().gcs_address
    if ":" in address and not _is_same(address, joined):
        problem = (
            f"this process has joined the Ray cluster at {joined}, and can be in one only; use "
            "another process, or call ray.shutdown() first"
        )
        raise Unavailable(f"the Ray cluster at {address}", problem)


def check_joined() -> None:
    """Raise ClusterReplaced if another Ray cluster has taken the place of the one that was joined.

    That is so once its server, or its head, was started anew. A task or an actor ends with its
    cluster, so it need not ask. Blocks.
    """
    joined = ray.get_runtime_context()
    if joined.worker.mode != ray.SCRIPT_MODE:
        return
    try:
        _check_answers(joined.gcs_address)
        there = GcsClient(address=reachable(joined.gcs_address)).cluster_id
    except (Unavailable, RpcError):
        return  # It may be back by and by.
    if there != joined.worker.gcs_client.cluster_id:
        raise ClusterReplaced(joined.gcs_address)


def _is_same(one: str, other: str) -> bool:
    """Return whether two addresses, host:port, may be the same: a machine has several names."""
    hosts, ports = zip(*(address.rpartition(":")[::2] for address in (one, other)), strict=True)
    names = [host.rpartition("/")[2].strip("[]").removeprefix("::ffff:") for host in hosts]
    loopback = any(name.startswith("127.") or name in ("localhost", "::1") for name in names)
    return ports[0] == ports[1] and (names[0] == names[1] or loopback)


def _check_answers(address: str) -> None:
    """Raise Unavailable if nothing listens there: Ray itself would try for two minutes."""
    if address.startswith(("http://", "https://")):
        problem = (
            "give the address behind `ray` in the line `ready …` of the server, or its storage"
        )
        raise Unavailable(f"the Ray cluster at {address}", problem)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_WAIT_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(f"the Ray cluster at {address}", f"nothing answers: {error}") from error


_CONNECT_WAIT_S = 5.0
