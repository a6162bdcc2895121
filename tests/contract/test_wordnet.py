"""Over HTTP, on real texts and vectors: each mode finds what a computation by hand finds.

5,000 WordNet glosses in five shards on two hosts, and queries that are none of them: 100, and 500
in `make soak`. Skipped where the data is absent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray
from tests.support.data import glosses, wordnet

from mindgrid.api.app import Door
from mindgrid.cluster.client import Grid
from mindgrid.cluster.embedders.fake import fake_vector
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.spec import GridSpec, NamespaceKey, NamespaceSpec
from mindgrid.shards.analysis import analyzer_of
from mindgrid.shards.config import Driver, ShardConfig
from mindgrid.shards.types import Space

ROWS, TOP_K, DEPTH = 5_000, 10, 50
CONFIG = ShardConfig(Space("fake", "fake", "", 384), text_search="english", seal_rows=512)
IDS = [f"g{n:05}" for n in range(ROWS)]
Scores = NDArray[np.float64]


class Fake:
    """The embedder that `provider: fake` names."""

    async def embed(self, namespace: NamespaceKey, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.array([fake_vector(text, 384) for text in texts], np.float32)


class Offline:
    """What each mode must answer, by NumPy and bm25s."""

    def __init__(self, texts: list[str], vectors: NDArray[np.float32]) -> None:
        self._rows = vectors.astype(np.float64)
        self._rows /= np.linalg.norm(self._rows, axis=1, keepdims=True)
        self._analyzer = analyzer_of("english")
        terms = [self._analyzer.document(text).terms for text in texts]
        self._bm25 = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        self._bm25.index(terms, show_progress=False)
        self._words = {word for words in terms for word in words}

    def dense(self, vector: NDArray[np.float32]) -> Scores:
        query = vector.astype(np.float64)
        scores: Scores = self._rows @ (query / np.linalg.norm(query))
        return scores

    def sparse(self, text: str) -> Scores:
        terms = [term for term in self._analyzer.query(text) if term in self._words]
        if not terms:
            return np.zeros(ROWS)
        # It leaves out the constant factor k1 + 1, and a term counts as often as it is asked for.
        return np.asarray(self._bm25.get_scores(terms), np.float64) * 2.2


def ranks(scores: Scores) -> dict[int, int]:
    """Return the rank of each of the best rows, ties to the smaller id, as they are shown."""
    shown = scores.astype(np.float32)
    order = np.lexsort((np.arange(ROWS), -shown))[:DEPTH]
    return {int(row): rank for rank, row in enumerate(order, 1) if shown[row] != 0.0}


def check(hits: Sequence[Mapping[str, Any]], scores: Scores, slack: float) -> None:
    """Check that these are the best by `scores`, in order, but for what is within `slack`."""
    found = [int(hit["record"]["id"][1:]) for hit in hits]
    assert len(found) == len(set(found)) == min(TOP_K, int(np.count_nonzero(scores)))
    right = np.sort(scores)[::-1][: len(found)]
    assert np.allclose(scores[found], right, rtol=slack, atol=slack)
    assert np.allclose([hit["score"] for hit in hits], right, rtol=slack, atol=slack)


def check_fused(hits: Sequence[Mapping[str, Any]], dense: Scores, sparse: Scores) -> int:
    """Check an RRF answer; return 1 if a near tie within a lane makes its ranks ambiguous."""
    lanes = [ranks(dense), ranks(sparse)]
    fused = np.zeros(ROWS)
    for lane in lanes:
        for row, rank in lane.items():
            fused[row] += 1.0 / (60 + rank)
    found = [int(hit["record"]["id"][1:]) for hit in hits]
    order = np.lexsort((np.arange(ROWS), -fused.astype(np.float32)))[:TOP_K]
    if found == order.tolist():
        return 0
    near = [np.diff(np.sort(lane)[::-1][: DEPTH + 1]) for lane in (dense, sparse)]
    assert any(np.any((gaps > -1e-5) & (gaps != 0.0)) for gaps in near), (found, order)
    return 1


@pytest.mark.skipif(glosses() is None, reason="the WordNet data set is absent")
@pytest.mark.parametrize("queries", [100, pytest.param(500, marks=pytest.mark.soak)])
def test_every_mode_answers_as_computed_offline(tmp_path: Path, queries: int) -> None:
    texts, data = glosses(), wordnet()
    assert texts is not None
    assert data is not None
    vectors = data.rows
    offline = Offline(texts[:ROWS], vectors[:ROWS])
    faked = np.array([fake_vector(text, 384) for text in texts[:ROWS]], np.float32)
    of_fakes = Offline(texts[:1], faked)

    def ask(connection: HTTPConnection, method: str, body: Mapping[str, object]) -> Any:
        connection.request(
            "POST",
            f"/mindd.semantic.v1.Semantic/{method}",
            json.dumps(body),
            {"content-type": "application/json"},
        )
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    def search(connection: HTTPConnection, namespace: str, **body: object) -> Any:
        query = {"namespace": namespace, "topK": TOP_K, "idsOnly": True, **body}
        return ask(connection, "Search", query).get("hits", [])

    def claim(port: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        for start in range(0, ROWS, 500):
            part = range(start, start + 500)
            real = [
                {"id": IDS[n], "content": texts[n], "vector": vectors[n].tolist()} for n in part
            ]
            ask(connection, "Upsert", {"namespace": "real", "records": real})
            fake = [{"id": IDS[n], "content": texts[n]} for n in part]
            ask(connection, "Upsert", {"namespace": "fake", "records": fake})
        ambiguous = 0
        for n in range(ROWS, ROWS + queries):
            text = texts[n]
            hits = search(connection, "real", queryVector=vectors[n].tolist())
            check(hits, offline.dense(vectors[n]), 1e-6)
            sparse = offline.sparse(text)
            hits = search(connection, "real", queryText=text, mode="SEARCH_MODE_SPARSE")
            check(hits, sparse, 1e-5)
            hits = search(connection, "fake", queryText=text, mode="SEARCH_MODE_HYBRID")
            ambiguous += check_fused(hits, of_fakes.dense(fake_vector(text, 384)), sparse)
        connection.close()
        assert ambiguous < queries / 20
        print(f"{queries} queries in three modes agree; {ambiguous} have near ties")

    async def main() -> None:
        spaces = tuple(
            NamespaceSpec(NamespaceKey("semantic", name), CONFIG, Driver.LANCE, 5)
            for name in ("real", "fake")
        )
        async with LocalCluster(GridSpec(tmp_path, spaces, 2)) as cluster:
            grid = Grid(cluster, Fake())
            config = uvicorn.Config(Door(grid), "127.0.0.1", 0, log_level="warning", lifespan="off")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                await asyncio.to_thread(claim, server.servers[0].sockets[0].getsockname()[1])
            finally:
                server.should_exit = True
                await serving
                await grid.close()

    asyncio.run(main())
