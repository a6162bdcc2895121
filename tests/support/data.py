"""Data for tests and benchmarks: seeded vectors, and the shared data sets where they are."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DataSet:
    """Rows to index and held-out queries of the same distribution, unit length, float32."""

    name: str
    rows: Rows
    queries: Rows


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """What somebody said or did in an episode; `id` is its `episode` and `seq`, from 1 on."""

    id: str
    episode: str
    seq: int
    kind: str
    actor: str
    tool: str | None
    content: str
    metadata: dict[str, float]


def mixture(
    rows: int,
    queries: int,
    dimensions: int = 384,
    clusters: int = 200,
    noise: float = 1.0,
    seed: int = 7,
) -> DataSet:
    """Return points around `clusters` random centres, with Zipf-skewed weights.

    Centres and noise have standard deviation 1 and `noise` per component. With noise 1 a point's
    nearest ones are of its cluster, and within a cluster all are about equally far: which ten are
    nearest is decided by a few percent of the distance, hard for codes and easy for cells.
    """
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, dimensions), np.float32)
    weights = 1.0 / np.arange(1, clusters + 1) ** 0.5
    owner = rng.choice(clusters, rows + queries, p=weights / weights.sum())
    points = rng.standard_normal((rows + queries, dimensions), np.float32)
    points *= np.float32(noise)
    points += centres[owner]
    points = _unit(points)
    return DataSet(f"mixture {rows // 1000}k", points[:rows], points[rows:])


def data_folder() -> Path:
    """Return where the shared data sets are, or would be."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("MINDGRID_DATA", beside))


def wordnet() -> DataSet | None:
    """Return 50,000 sentence embeddings and 1,000 held-out ones; None where the data is absent."""
    folder = data_folder() / "wordnet"
    if not folder.is_dir():
        return None
    return DataSet(
        "wordnet 50k",
        _unit(np.load(folder / "vectors.f16.npy").astype(np.float32)),
        _unit(np.load(folder / "queries.f16.npy").astype(np.float32)),
    )


def glosses() -> list[str] | None:
    """Return the 50,000 sentences of `wordnet`; None where the data is absent."""
    lines = _json_lines("wordnet/glosses.jsonl.gz")
    return None if lines is None else [line["content"] for line in lines]


def airline() -> list[AgentEvent] | None:
    """Return 5,108 events, one of 200 episodes after the other; None where the data is absent."""
    lines = _json_lines("airline/events.jsonl.gz")
    return None if lines is None else [AgentEvent(**line) for line in lines]


def _json_lines(name: str) -> list[dict[str, Any]] | None:
    """Return what each line of a data file holds; None where the file is absent."""
    path = data_folder() / name
    if not path.is_file():
        return None
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _unit(rows: Rows) -> Rows:
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows
