"""The routing table: which hosts there are, under which epoch, and where each shard lives."""

from __future__ import annotations

from dataclasses import dataclass

from mindgrid.cluster.placement import host_of, shard_of
from mindgrid.cluster.spec import Bounds, LogSpec, NamespaceKey, NamespaceSpec
from mindgrid.shards.errors import InvalidRequest, NotFound, Unavailable


@dataclass(frozen=True, slots=True)
class Seat:
    """A host's appointment: calls to it carry this epoch. Epoch 0 is no appointment yet."""

    host: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Holding:
    """A namespace and its generation that is live."""

    spec: NamespaceSpec
    generation: int


@dataclass(frozen=True, slots=True)
class LogHolding:
    """An episodic namespace and its generation that is live."""

    spec: LogSpec
    generation: int


@dataclass(frozen=True, slots=True)
class Table:
    """One version of the routing table, as the coordinator hands it out.

    A table is never changed: any difference is a higher version.
    """

    version: int
    bounds: Bounds
    seats: tuple[Seat, ...]
    holdings: tuple[Holding, ...]
    logs: tuple[LogHolding, ...] = ()


@dataclass(frozen=True, slots=True)
class LogRoute:
    """Where one log lives."""

    spec: LogSpec
    generation: int
    host: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where one namespace lives: the hosts of its shards, in the order of the shards."""

    spec: NamespaceSpec
    generation: int
    hosts: tuple[str, ...]
    by_host: tuple[tuple[str, tuple[int, ...]], ...]
    """Each host with its shards: the calls that a read of everything makes."""

    def shard_of(self, id: str) -> int:
        """Return the shard that holds the record with this id, if any does."""
        return shard_of(id, len(self.hosts))


class Routes:
    """A table with its routes, each worked out when it is first asked for."""

    def __init__(self, table: Table) -> None:
        self.version = table.version
        self.bounds = table.bounds
        self.epochs = {seat.host: seat.epoch for seat in table.seats}
        self._holdings = {holding.spec.key: holding for holding in table.holdings}
        self._logs = {holding.spec.key: holding for holding in table.logs}
        self._known: dict[NamespaceKey, Route] = {}

    def route(self, key: NamespaceKey) -> Route:
        """Return where the namespace lives; raises NotFound if there is none."""
        known = self._known.get(key)
        if known is not None:
            return known
        holding = self._holdings.get(key)
        if holding is None:
            raise _unknown(key)
        if not self.epochs:
            raise Unavailable(f"namespace {key}", "the cluster has no host yet")
        route = self._known[key] = route_of(holding, tuple(self.epochs))
        return route

    def log(self, key: NamespaceKey) -> LogRoute:
        """Return where the log lives; raises NotFound if there is none."""
        holding = self._logs.get(key)
        if holding is None:
            raise _unknown(key)
        if not self.epochs:
            raise Unavailable(f"namespace {key}", "the cluster has no host yet")
        return LogRoute(holding.spec, holding.generation, host_of(key, 0, tuple(self.epochs)))


def _unknown(key: NamespaceKey) -> InvalidRequest | NotFound:
    if not key.name:
        return InvalidRequest("namespace", "must not be empty")
    return NotFound("namespace", str(key))


def route_of(holding: Holding, hosts: tuple[str, ...]) -> Route:
    """Return the route of a namespace over these hosts."""
    key, shards = holding.spec.key, holding.spec.shards
    homes = tuple(host_of(key, shard, hosts) for shard in range(shards))
    by_host: dict[str, list[int]] = {}
    for shard, host in enumerate(homes):
        by_host.setdefault(host, []).append(shard)
    return Route(
        holding.spec,
        holding.generation,
        homes,
        tuple((host, tuple(shards)) for host, shards in by_host.items()),
    )
