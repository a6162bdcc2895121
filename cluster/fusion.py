"""HYBRID: what the lanes of meaning and of words found, fused into one ranking.

    query ─► DENSE lane ─► depth best ─┐
          └► SPARSE lane ─► depth best ┴─► fuse ─► top_k ids ─► their records

Pure, and the same for one shard as for many: the lanes are merged over all shards first, so the
ranks are those of the whole namespace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from mindgrid.shards.errors import MindgridError, Unavailable
from mindgrid.shards.types import (
    NO_VECTOR,
    Answer,
    Explanation,
    Fusion,
    FusionMethod,
    Hit,
    Mode,
    Query,
    Record,
    Selection,
    Want,
)


def lanes(query: Query) -> list[Query]:
    """Return the lane queries of one query: its own, or one by meaning and one by words.

    Of several, or where hits are to be explained, only the ids are asked for.
    """
    if query.mode is not Mode.HYBRID:
        return [query]
    dense = replace(query, mode=Mode.DENSE, top_k=query.depth, want=Want.ID, text="")
    sparse = replace(query, mode=Mode.SPARSE, top_k=query.depth, want=Want.ID, vector=NO_VECTOR)
    return [dense, sparse]


def fused(query: Query, answers: Sequence[Answer]) -> Answer:
    """Return the query's answer, its hits without records where `lanes` asked for ids only.

    `answers` are those of its lanes over the whole namespace, at one instant.
    """
    if query.mode is not Mode.HYBRID:
        (answer,) = answers
        return explained(query, answer) if query.explain else answer
    dense, sparse = answers
    found = _found(dense, sparse)
    score = _rrf if query.fusion.method is FusionMethod.RRF else _Convex(dense, sparse)
    weights = query.fusion.weights
    exact = [-score(query.fusion, weights, lanes_) for lanes_ in found.values()]
    # Negative, so that the best come first; rounded before they are compared, as they are shown.
    ranked = sorted(zip(np.array(exact, np.float32).tolist(), found, strict=True))
    hits = tuple(
        Hit(id, -negative, None, Explanation(*found[id]) if query.explain else None)
        for negative, id in ranked[: query.top_k]
    )
    return Answer(
        hits,
        max(dense.instant, sparse.instant),
        dense.exact and sparse.exact,
        dense.scanned + sparse.scanned,
    )


def explained(query: Query, answer: Answer) -> Answer:
    """Return the answer of one lane with what that lane said of each hit."""
    hits: list[Hit] = []
    for rank, hit in enumerate(answer.hits, 1):
        if query.mode is Mode.DENSE:
            why = Explanation(dense_rank=rank, dense_score=hit.score)
        else:
            why = Explanation(sparse_rank=rank, sparse_score=hit.score)
        hits.append(replace(hit, explanation=why))
    return replace(answer, hits=tuple(hits))


def needs_stats(lane: Query) -> bool:
    """Return whether the words of a lane must be counted over all shards before it is asked."""
    return lane.mode is Mode.SPARSE and lane.stats is None and lane.top_k > 0


def of_hits(query: Query) -> Selection:
    """Return the selection that sees the query's hits, by their ids, as its lanes saw them."""
    return Selection(known_at=query.selection.known_at, include_invalidated=True)


def with_records(answer: Answer, records: Sequence[Record | None]) -> Answer | MindgridError:
    """Return the answer with these records, aligned with its hits.

    Unavailable if one is gone: it was hard-deleted since its lane found it, so the query has to
    start over.
    """
    if any(record is None for record in records):
        return Unavailable(
            "a record", "it was deleted while the search that found it was under way"
        )
    pairs = zip(answer.hits, records, strict=True)
    return replace(answer, hits=tuple(replace(hit, record=record) for hit, record in pairs))


_Lanes = tuple[int, float, int, float]
"""The fields of an Explanation: made by the hundred, and shown for ten."""


def _found(dense: Answer, sparse: Answer) -> dict[str, _Lanes]:
    found: dict[str, _Lanes] = {
        hit.id: (rank, hit.score, 0, 0.0) for rank, hit in enumerate(dense.hits, 1)
    }
    for rank, hit in enumerate(sparse.hits, 1):
        dense_rank, dense_score, _, _ = found.get(hit.id, _NEITHER)
        found[hit.id] = dense_rank, dense_score, rank, hit.score
    return found


_NEITHER: _Lanes = (0, 0.0, 0, 0.0)


def _rrf(fusion: Fusion, weights: tuple[float, float], lanes_: _Lanes) -> float:
    """Cormack, Clarke and Buettcher, Reciprocal Rank Fusion outperforms Condorcet (2009)."""
    dense_rank, _, sparse_rank, _ = lanes_
    score = weights[0] / (fusion.k + dense_rank) if dense_rank else 0.0
    return score + weights[1] / (fusion.k + sparse_rank) if sparse_rank else score


class _Convex:
    """Scores relative to the best of each lane; a lane whose best is not above 0 says nothing.

    Bruch, Gai and Ingber, An Analysis of Fusion Functions for Hybrid Retrieval (2023).
    """

    def __init__(self, dense: Answer, sparse: Answer) -> None:
        self._dense_best = max((hit.score for hit in dense.hits), default=0.0)
        self._sparse_best = max((hit.score for hit in sparse.hits), default=0.0)

    def __call__(self, fusion: Fusion, weights: tuple[float, float], lanes_: _Lanes) -> float:
        dense_rank, dense_score, sparse_rank, sparse_score = lanes_
        score = 0.0
        if dense_rank and self._dense_best > 0.0:
            score += weights[0] * (dense_score / self._dense_best)
        if sparse_rank and self._sparse_best > 0.0:
            score += weights[1] * (sparse_score / self._sparse_best)
        return score
