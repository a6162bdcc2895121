"""The answer of a whole namespace from the answers of its shards."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import chain

from mindgrid.shards.scores import WordStats
from mindgrid.shards.types import Answer, Hit


def merge(answers: Sequence[Answer], top_k: int) -> Answer:
    """Return the `top_k` best hits of all answers to one query, best first.

    Ties go to the smaller id, so the result does not depend on which shard answered first. It is
    exact only if every answer is, for a shard's missed record may have been the best of all.
    """
    assert answers, "a namespace has at least one shard"
    if len(answers) == 1:
        return answers[0]
    hits = sorted(chain.from_iterable(answer.hits for answer in answers), key=_rank)
    return Answer(
        hits=tuple(hits[:top_k]),
        instant=max(answer.instant for answer in answers),
        exact=all(answer.exact for answer in answers),
        scanned=sum(answer.scanned for answer in answers),
        stats=_sum([answer.stats for answer in answers if answer.stats is not None]),
    )


def _sum(stats: Sequence[WordStats]) -> WordStats | None:
    """Return what the shards count together; None unless they were asked to."""
    return functools.reduce(operator.add, stats) if stats else None


def _rank(hit: Hit) -> tuple[float, str]:
    return -hit.score, hit.id
