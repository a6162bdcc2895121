"""The driver: joins Ray, deploys the Serve application and watches over it.

A process of its own, so that the supervisor never joins Ray: a process whose cluster has died
cannot cleanly join the next one.

    python -m mindgrid.cluster.driver ORDER       (a DriverOrder as JSON)

It reports through a file, which the supervisor reads: pipes fill up, and Ray prints to them.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from mindgrid.cluster.orphans import end_life
from mindgrid.cluster.process import watch_parent
from mindgrid.cluster.session import reachable
from mindgrid.shards.errors import ConfigError, OperatorError, pack

if TYPE_CHECKING:
    from ray.serve import Application

log = logging.getLogger(__name__)

_HEAD_WAIT_S = 120.0
_LOOK_EVERY_S = 5.0


class DriverOrder(msgspec.Struct, frozen=True):
    """What a driver is to do."""

    ray_address: str
    host: str
    http_port: int
    app: str
    """`module:function`; called with `config_file`, it returns the serve.Application."""
    config_file: str
    report_file: str
    life: str
    """The mark of the processes to end with the supervisor; empty in a cluster of others."""
    deploy: bool
    """False if the application was deployed to this cluster before and may still run."""


class Stage(StrEnum):
    """How far a driver has come."""

    JOINING = "joining"
    DEPLOYING = "deploying"
    RUNNING = "running"
    FAILED = "failed"


class DriverReport(msgspec.Struct, frozen=True):
    """What a driver says; `error` and `fields` are an OperatorError taken apart."""

    stage: Stage
    error: str = ""
    fields: tuple[str | int | float, ...] = ()


def main(argument: str) -> None:
    """Do what the order says, until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    order = msgspec.json.decode(argument, type=DriverOrder)
    watch_parent(lambda: _abandon(order))
    signal.signal(signal.SIGTERM, _leave)
    try:
        _report(order, DriverReport(Stage.JOINING))
        _join(order)
        try:
            _deploy(order)
            _report(order, DriverReport(Stage.RUNNING))
            _watch()
        except _Stopped:
            _take_down(order)
    except _Stopped:
        return
    except OperatorError as error:
        # What a person must mend; the supervisor says it and does not try again.
        name, fields = pack(error)
        _report(order, DriverReport(Stage.FAILED, name, tuple(fields)))
        raise SystemExit(1) from error


def _join(order: DriverOrder) -> None:
    """Join the cluster, whose head may still be starting."""
    import ray

    from mindgrid.cluster.remote import RAY_NAMESPACE

    deadline = time.monotonic() + _HEAD_WAIT_S
    while order.life and not _is_up(order.ray_address):
        if time.monotonic() > deadline:
            raise SystemExit(f"no Ray head at {order.ray_address} after {_HEAD_WAIT_S:g} s")
        time.sleep(0.1)
    ray.init(
        address=reachable(order.ray_address),
        namespace=RAY_NAMESPACE,
        log_to_driver=False,
        configure_logging=False,
    )
    # Ray has put its own in place.
    signal.signal(signal.SIGTERM, _leave)


def _deploy(order: DriverOrder) -> None:
    from ray import serve
    from ray.serve.config import HTTPOptions

    from mindgrid.cluster.embedders.serving import APPLICATION

    if not order.deploy and _status() == "RUNNING":
        # Deploying again would replace every replica, for nothing.
        return
    _report(order, DriverReport(Stage.DEPLOYING))
    # First, for it finds what is wrong sooner than Serve starts.
    application = _builder(order.app)(order.config_file)
    serve.start(http_options=HTTPOptions(host=order.host, port=order.http_port))
    serve.run(application, name=APPLICATION, route_prefix="/")


def _watch() -> None:
    """Return never: leave when the application is gone for good."""
    while True:
        time.sleep(_LOOK_EVERY_S)
        status = _status()
        if status in ("", "DEPLOY_FAILED", "NOT_STARTED", "DELETING"):
            raise SystemExit(f"the application is {status or 'not there'}")


def _status() -> str:
    """Return the application's state in Serve's words, empty if there is none."""
    from ray import serve

    from mindgrid.cluster.embedders.serving import APPLICATION

    found = serve.status().applications.get(APPLICATION)
    return "" if found is None else str(found.status.value)


def _take_down(order: DriverOrder) -> None:
    """Let Serve answer what is under way, and in a cluster of others leave nothing running."""
    import ray
    from ray import serve

    from mindgrid.cluster.embedders.serving import APPLICATION
    from mindgrid.cluster.remote import RAY_NAMESPACE

    serve.delete(APPLICATION)
    if order.life:
        return
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == RAY_NAMESPACE:
            ray.kill(ray.get_actor(actor["name"], namespace=RAY_NAMESPACE), no_restart=True)


def _builder(path: str) -> Callable[[str], Application]:
    """Return the function that `module:function` names."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(path, f"is no builder of an application: {error}") from error
    return cast("Callable[[str], Application]", found)


def _is_up(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def _report(order: DriverOrder, report: DriverReport) -> None:
    path = Path(order.report_file)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(report))
    fresh.rename(path)


def _abandon(order: DriverOrder) -> None:
    """End what a supervisor that was killed would have ended. Nothing heals it any more."""
    log.error("the supervisor is gone; its server ends")
    if order.life:
        end_life(order.life)
    os._exit(1)


class _Stopped(BaseException):
    """SIGTERM has come; raised wherever the main thread is, once."""


def _leave(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


if __name__ == "__main__":
    main(sys.argv[1])
