"""Semantic namespaces as HTTP clients see them, whatever keeps them: for claims of the contract.

A claim is a test that takes the fixture `notes`, `english` or `many`. It runs wherever a fixture
`callers` says which grid answers: tests/contract/semantic over shards in this process,
tests/ray/test_semantic.py over hosts in Ray. A claim finds its namespace empty, for what it wrote
is hard-deleted after it; its segments stay, so that the next one meets a shard with a past.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

from mindgrid.api.app import Door
from mindgrid.cluster.client import Grid
from mindgrid.cluster.embedders.fake import fake_vector
from mindgrid.cluster.handle import TableEmbedders
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.port import Directory
from mindgrid.cluster.spec import Bounds, GridSpec, NamespaceKey, NamespaceSpec
from mindgrid.shards.config import Driver, ShardConfig
from mindgrid.shards.types import Space

Json = dict[str, Any]
DIMENSIONS = 8
PAST, FUTURE = "2001-01-01T00:00:00Z", "2999-01-01T00:00:00Z"
VERBS = dict.fromkeys(("Upsert", "Search", "Delete", "Expire"), "mindd.semantic.v1.Semantic")
VERBS |= dict.fromkeys(("Get", "List", "Count", "SearchBatch"), "mindgrid.v1.Records")

# Small bounds, so that what claims write is sealed, merged and indexed as well.
_CONFIG = {"seal_rows": 256, "exact_rows_max": 512, "index_rows_min": 1_024, "skew_max_s": 0.0}
_SPACE = Space("fake", "fake", "", DIMENSIONS)


@dataclass(frozen=True, slots=True)
class Layout:
    """What keeps a namespace."""

    driver: Driver
    shards: int
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.driver.value}-{self.shards}-on-{self.hosts}"

    def spaces(self, suffix: str = "") -> tuple[NamespaceSpec, ...]:
        """Return the namespaces that claims use."""
        configs = {
            "notes": ShardConfig(_SPACE, **_CONFIG),  # type: ignore[arg-type]
            "english": ShardConfig(_SPACE, text_search="english", **_CONFIG),  # type: ignore[arg-type]
            "many": ShardConfig(_SPACE, **_CONFIG),  # type: ignore[arg-type]
        }
        return tuple(
            NamespaceSpec(NamespaceKey("semantic", name + suffix), config, self.driver, self.shards)
            for name, config in configs.items()
        )


class Caller:
    """One namespace. Where an answer is no 200, every method but `ask` and `refused` fails."""

    def __init__(self, callers: Callers, namespace: str) -> None:
        """Speak over the connection of `callers`."""
        self._callers = callers
        self.namespace = namespace

    def ask(self, method: str, body: Mapping[str, object]) -> httpx2.Response:
        """Return whatever comes back."""
        return self._callers.post(method, json.dumps({"namespace": self.namespace, **body}))

    def call(self, method: str, **body: object) -> Json:
        """Return the answer to a call."""
        answer = self.ask(method, body)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found

    def refused(self, method: str, http: int = 400, code: int = 3, **body: object) -> str:
        """Return in which words a call is refused, with this status and code."""
        answer = self.ask(method, body)
        assert answer.status_code == http, answer.text
        assert answer.json()["code"] == code, answer.text
        message: str = answer.json()["message"]
        return message

    def upsert(self, *records: Json) -> list[int]:
        """Write records in one batch, and return their versions."""
        return [int(version) for version in self.call("Upsert", records=records)["versions"]]

    def search(self, **query: object) -> list[Json]:
        """Return the hits of a query, by default the nearest hundred to no vector in particular."""
        if not query.keys() & {"queryText", "query_text", "queryVector"}:
            query["queryVector"] = [1.0] * DIMENSIONS
        if not query.keys() & {"topK", "top_k"}:
            query["topK"] = 100
        hits: list[Json] = self.call("Search", **query).get("hits", [])
        return hits

    def ranked(self, **query: object) -> list[str]:
        """Return the ids that a query finds, best first."""
        return [hit["record"]["id"] for hit in self.search(**query)]

    def found(self, **query: object) -> list[str]:
        """Return the ids that a query finds, sorted."""
        return sorted(self.ranked(**query))

    def stored(self, id: str, **selection: object) -> Json:
        """Return all of a record as an audit sees it, or {} where there is none."""
        selected = {"includeInvalidated": True, **selection}
        wanted = {"ids": [id], "includePayload": True, "includeVector": True}
        answer = self.call("Get", selection=selected, **wanted)
        record: Json = answer["results"][0].get("record", {})
        return record

    def delete(self, id: str, hard: bool = False) -> bool:
        """Return whether there was one to delete."""
        return bool(self.call("Delete", id=id, hard=hard).get("existed", False))

    def expire(self, action: str, max_rows: int = 100, **equals: str) -> int:
        """Return how many records were touched; `action` is the end of its name."""
        named = f"EXPIRE_ACTION_{action}"
        answer = self.call("Expire", filter=equals, action=named, maxRows=max_rows)
        return int(answer.get("affected", 0))

    def now(self) -> str:
        """Return the instant at which the namespace reads now."""
        read_at: str = self.call("Count")["readAt"]
        return read_at

    def clear(self) -> None:
        """Leave the namespace as one that was never written to."""
        self.expire("HARD_DELETE", 1_000_000)


class Callers:
    """The door of one grid; `at` speaks with one of its namespaces."""

    def __init__(self, runner: asyncio.Runner, grid: Grid, suffix: str = "") -> None:
        """Take the loop that the grid belongs to; namespaces have `suffix` in their names."""
        self._runner = runner
        self._suffix = suffix
        transport = httpx2.ASGITransport(app=Door(grid), raise_app_exceptions=True)
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://door")

    def at(self, name: str) -> Caller:
        """Return a caller of one namespace."""
        return Caller(self, name + self._suffix)

    def post(self, method: str, content: str) -> httpx2.Response:
        """Return the answer to a body as it stands."""
        headers = {"content-type": "application/json"}
        path = f"/{VERBS[method]}/{method}"
        return self._runner.run(self._http.post(path, content=content, headers=headers))

    def close(self) -> None:
        """Let go of the connection."""
        self._runner.run(self._http.aclose())


@contextmanager
def callers_of(runner: asyncio.Runner, directory: Directory, suffix: str = "") -> Iterator[Callers]:
    """Yield callers over the grid of a directory."""
    embedders = TableEmbedders(directory)
    grid = Grid(directory, embedders)
    callers = Callers(runner, grid, suffix)
    try:
        yield callers
    finally:
        callers.close()
        runner.run(grid.close())
        runner.run(embedders.close())


@contextmanager
def local_callers(storage: Path, layout: Layout) -> Iterator[Callers]:
    """Yield callers over shards in this process."""
    spec = GridSpec(storage, layout.spaces(), layout.hosts, Bounds(retry_first_s=0.01))
    with asyncio.Runner() as runner:
        cluster = LocalCluster(spec)
        runner.run(cluster.start())
        try:
            with callers_of(runner, cluster) as callers:
                yield callers
        finally:
            runner.run(cluster.close())


@pytest.fixture
def notes(callers: Callers) -> Iterator[Caller]:
    """A namespace whose words are taken as they are."""
    caller = callers.at("notes")
    yield caller
    caller.clear()


@pytest.fixture
def english(callers: Callers) -> Iterator[Caller]:
    """A namespace of English texts."""
    caller = callers.at("english")
    yield caller
    caller.clear()


@dataclass(frozen=True, slots=True)
class Many:
    """A namespace of `ROWS` records that no claim changes, and what is in it.

    The n-th has the id `r00000` + n, and in its metadata `n`; every hundredth has the key `1 %`,
    every thousandth `0.1 %`, and one of all `0.01 %`.
    """

    caller: Caller
    vectors: NDArray[np.float32]


ROWS = 10_000
SHARES = {"1 %": 100, "0.1 %": 1_000, "0.01 %": 10_000}


def fill(caller: Caller) -> Many:
    """Write the records of `Many`."""
    vectors = np.random.default_rng(7).integers(-9, 10, (ROWS, DIMENSIONS)).astype(np.float32)
    vectors[:, 0] += 0.5  # No vector is zero.
    for start in range(0, ROWS, 1_000):
        rows = range(start, start + 1_000)
        caller.upsert(
            *(
                {
                    "id": f"r{n:05}",
                    "vector": vectors[n].tolist(),
                    "metadata": {"n": str(n)}
                    | {share: "yes" for share, each in SHARES.items() if n % each == 7},
                }
                for n in rows
            )
        )
    return Many(caller, vectors)


def record(id: str, **more: object) -> Json:
    """Return a record with some content, and whatever more it is to have."""
    return {"id": id, "content": f"text of {id}", **more}


def instant(text: str) -> datetime:
    """Return a time that an answer shows; the texts themselves do not sort by time."""
    return datetime.fromisoformat(text)


def meaning(text: str) -> list[float]:
    """Return the vector that a text is given, each value as an answer spells it."""
    return [float(str(value)) for value in fake_vector(text, DIMENSIONS)]


def cosine(one: list[float], other: list[float]) -> float:
    """Return the score of two vectors as answers show it."""
    first, second = (np.array(v, np.float32).astype(np.float64) for v in (one, other))
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))
