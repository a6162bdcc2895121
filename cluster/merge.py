"""The answer of a whole namespace from the answers of its shards."""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
from collections.abc import Iterable, Sequence

from mindgrid.shards.scores import WordStats
from mindgrid.shards.types import Answer, Hit, Scanned


def merge(answers: Sequence[Answer], top_k: int) -> Answer:
    """Return the `top_k` best hits of all answers to one query, best first.

    Ties go to the smaller id, so the result does not depend on which shard answered first. It is
    exact only if every answer is, for a shard's missed record may have been the best of all.
    """
    assert answers, "a namespace has at least one shard"
    if len(answers) == 1:
        return answers[0]
    hits = sorted(itertools.chain.from_iterable(answer.hits for answer in answers), key=_rank)
    return Answer(
        hits=tuple(hits[:top_k]),
        instant=max(answer.instant for answer in answers),
        exact=all(answer.exact for answer in answers),
        scanned=sum(answer.scanned for answer in answers),
        stats=_sum([answer.stats for answer in answers if answer.stats is not None]),
    )


def merge_pages(pages: Iterable[Scanned], limit: int) -> Scanned:
    """Return the first `limit` records by id of the pages of all shards, each of its first ones."""
    parts = list(pages)
    records = heapq.merge(*(part.records for part in parts), key=lambda record: record.id)
    page = tuple(itertools.islice(records, limit))
    more = any(part.more for part in parts) or sum(len(part.records) for part in parts) > limit
    count = sum(part.count for part in parts)
    return Scanned(page, more, count, max(part.instant for part in parts))


def _sum(stats: Sequence[WordStats]) -> WordStats | None:
    """Return what the shards count together; None unless they were asked to."""
    return functools.reduce(operator.add, stats) if stats else None


def _rank(hit: Hit) -> tuple[float, str]:
    return -hit.score, hit.id
