"""What the driver deploys: coordinator and hosts configured, models running, the door in front."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ray import serve

from mindgrid.api import replica
from mindgrid.api.front import Grid
from mindgrid.api.metrics import TailGauge
from mindgrid.cluster import client, coordinator, settings
from mindgrid.cluster.embedders import serving
from mindgrid.cluster.handle import TableEmbedders
from mindgrid.cluster.remote import RAY_NAMESPACE


def build(config_file: str) -> serve.Application:
    """Bring up what the application stands on, and return it. Ray must be connected. Blocks.

    Raises ConfigError if the file is wrong or does not fit the stored data, StorageLocked,
    Corruption and Unavailable if the catalog cannot be opened.
    """
    loaded = settings.load(Path(config_file))
    spec = loaded.grid_spec()
    coordinator.configure(spec)
    models = serving.models(embedding.spec for embedding in loaded.embeddings().values())
    return replica.build(loaded, partial(open_grid, spec.storage), models)


def open_grid(storage: Path) -> Grid:
    """Return the grid of one replica; it starts a coordinator that is missing."""
    directory = coordinator.RayDirectory(RAY_NAMESPACE, storage)
    grid = client.Grid(directory, TableEmbedders(directory))
    grid.logs.tails.note = TailGauge()
    return grid
