"""What a cluster is told when it starts: its storage, its namespaces, its hosts and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mindgrid.cluster.embedders.protocol import EmbedderOptions
from mindgrid.shards.config import Driver, ShardConfig
from mindgrid.shards.episodic.types import LogConfig

SEMANTIC, EPISODIC = "semantic", "episodic"


class NamespaceKey(NamedTuple):
    """What a namespace is known by."""

    block: str
    name: str

    def __str__(self) -> str:
        return f"{self.block}/{self.name}"


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """One namespace as the configuration describes it.

    `cache_size` counts the texts whose vectors are kept; negative keeps none. `embedder` is how
    the space's model is reached: so that whoever has the table can embed.
    """

    key: NamespaceKey
    config: ShardConfig
    driver: Driver = Driver.LANCE
    shards: int = 1
    cache_size: int = 4_096
    embedder: EmbedderOptions = field(default_factory=EmbedderOptions)


@dataclass(frozen=True, slots=True)
class LogSpec:
    """One episodic namespace as the configuration describes it: one log, in one shard."""

    key: NamespaceKey
    config: LogConfig = field(default_factory=LogConfig)
    driver: Driver = Driver.LANCE


@dataclass(frozen=True, slots=True)
class Bounds:
    """Every bound between a caller and a shard. Times in seconds.

    `deadline_s` is what a call gets whose caller sets none. The quick lane has `quick_calls` calls
    of at most `batch_queries` queries under way to each host, the heavy lane one; `waiting_max`
    queries of one namespace may wait in a lane. `writes_max` commits of one namespace may wait;
    one call carries at most `batch_bytes` of drafts. A call is tried `attempts` times while its
    shard is Unavailable, and until its deadline while its host is away. A host whose clock is more
    than `skew_max_s` from the coordinator's refuses writes; one that is silent for `silence_max_s`
    is ended and started anew.
    """

    deadline_s: float = 30.0
    quick_calls: int = 3
    batch_queries: int = 32
    heavy_top_k: int = 100
    waiting_max: int = 1_024
    write_calls: int = 4
    batch_writes: int = 64
    batch_bytes: int = 8 * 2**20
    writes_max: int = 1_024
    attempts: int = 4
    retry_first_s: float = 0.05
    retry_most_s: float = 1.0
    skew_max_s: float = 0.25
    silence_max_s: float = 15.0


@dataclass(frozen=True, slots=True)
class GridSpec:
    """A whole cluster. `hosts` of 0 stands for one host per two cores of the cluster."""

    storage: Path
    namespaces: tuple[NamespaceSpec, ...]
    hosts: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    logs: tuple[LogSpec, ...] = ()


def shard_folder(storage: Path, key: NamespaceKey, generation: int, shard: int) -> Path:
    """Return the folder of one shard.

    A tenant's folder will stand in front of the block; blocks are a closed set of names, so a
    tenant's folder can be told from one by its prefix.
    """
    return generation_folder(storage, key, generation) / shard_name(shard)


def shard_name(shard: int) -> str:
    """Return the name of a shard's folder in that of its generation."""
    return f"s{shard}"


def generation_folder(storage: Path, key: NamespaceKey, generation: int) -> Path:
    """Return the folder that holds all shards of one generation of a namespace."""
    return storage / key.block / key.name / f"g{generation}"
