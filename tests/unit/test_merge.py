"""Merging: the same answer as from one shard that holds everything, in whatever order it came."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from mindgrid.cluster.merge import merge
from mindgrid.shards.clock import Instant
from mindgrid.shards.types import Answer, Hit

scored = st.dictionaries(
    st.text(min_size=1, max_size=3), st.sampled_from([-0.5, 0.0, 0.25, 0.5, 1.0]), max_size=40
)


def answer(hits: list[Hit], *, instant: int = 5, exact: bool = True, scanned: int = 0) -> Answer:
    ordered = sorted(hits, key=lambda hit: (-hit.score, hit.id))
    return Answer(tuple(ordered), Instant(instant), exact, scanned)


@given(scored, st.integers(1, 5), st.integers(1, 50), st.randoms())
def test_merge_equals_one_shard_with_all_records(
    scores: dict[str, float], shards: int, top_k: int, rng: random.Random
) -> None:
    parts: list[list[Hit]] = [[] for _ in range(shards)]
    for id, score in scores.items():
        rng.choice(parts).append(Hit(id, score, None))
    answers = [answer(part) for part in parts]
    rng.shuffle(answers)
    whole = answer([hit for part in parts for hit in part])
    assert merge(answers, top_k).hits[:top_k] == whole.hits[:top_k]


def test_ties_go_to_the_smaller_id() -> None:
    first, second = answer([Hit("b", 0.5, None)]), answer([Hit("a", 0.5, None)])
    assert [hit.id for hit in merge([first, second], 1).hits] == ["a"]


def test_an_answer_is_exact_only_if_every_shards_is() -> None:
    assert merge([answer([]), answer([])], 1).exact
    assert not merge([answer([]), answer([], exact=False)], 1).exact


def test_scanned_vectors_add_up_and_the_instant_is_the_latest() -> None:
    merged = merge([answer([], scanned=3, instant=7), answer([], scanned=4, instant=6)], 1)
    assert (merged.scanned, merged.instant) == (7, 7)
