"""How a host opens the shards of a namespace by its driver, and what it imports for that."""

from __future__ import annotations

import importlib
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mindgrid.cluster.spec import LogSpec, NamespaceSpec, shard_name
from mindgrid.shards.clock import Clock
from mindgrid.shards.config import Driver
from mindgrid.shards.driver import SemanticShard
from mindgrid.shards.episodic.memory import MemoryLog
from mindgrid.shards.episodic.types import EpisodicLog
from mindgrid.shards.errors import Corruption
from mindgrid.shards.files import create_folder, sync
from mindgrid.shards.groups import Workers
from mindgrid.shards.memory import MemoryShard

Spec = TypeVar("Spec")


@dataclass(frozen=True, slots=True)
class Opened(Generic[Spec]):
    """What a shard is opened with."""

    spec: Spec
    folder: Path
    epoch: int
    clock: Clock
    commits: Executor
    maintenance: Executor


Opener = Callable[[Opened[NamespaceSpec]], SemanticShard]


def open_shard(opened: Opened[NamespaceSpec]) -> SemanticShard:
    """Open a shard by its namespace's driver."""
    spec = opened.spec
    if spec.driver is Driver.MEMORY:
        return MemoryShard(spec.config, opened.clock)
    # Here, so that a host of memory shards does not pay for Lance and FAISS.
    from mindgrid.shards.shard import LanceShard

    _find_folder(opened.folder, spec.shards)
    workers = Workers(opened.commits, opened.maintenance)
    return LanceShard.open(opened.folder, spec.config, opened.epoch, opened.clock, workers)


def open_log(opened: Opened[LogSpec]) -> EpisodicLog:
    """Open a log by its namespace's driver."""
    spec = opened.spec
    if spec.driver is Driver.MEMORY:
        return MemoryLog(spec.config, opened.clock)
    from mindgrid.shards.episodic.log import EventLog

    _find_folder(opened.folder, 1)
    workers = Workers(opened.commits, opened.maintenance)
    return EventLog.open(opened.folder, spec.config, opened.epoch, opened.clock, workers)


def _find_folder(folder: Path, shards: int) -> None:
    """Make the folders of all shards, the first time any of them is opened, else look for this one.

    At once, so that a shard whose folder is lost later is not taken for one that holds nothing yet.
    """
    generation = folder.parent
    if not generation.is_dir():
        fresh = generation.with_name(f"{generation.name}.new-{secrets.token_hex(4)}")
        for number in range(shards):
            create_folder(fresh / shard_name(number))
        try:
            fresh.rename(generation)
        except OSError:
            # Another host was sooner.
            shutil.rmtree(fresh, ignore_errors=True)
            if not generation.is_dir():
                raise
        sync(generation.parent)
    if not folder.is_dir():
        problem = "the folder is missing, but those of other shards exist; bring it back"
        raise Corruption(str(folder), problem)


def load_driver(driver: Driver) -> None:
    """Import what the driver needs, ahead of its first shard: seconds on a small machine."""
    if driver is Driver.LANCE:
        importlib.import_module("mindgrid.shards.shard")


def load_writers(drivers: Iterable[Driver]) -> None:
    """Import what no read needs, some time after the start: for seconds it slows all else down."""
    if Driver.LANCE in drivers:
        importlib.import_module("lancedb")
