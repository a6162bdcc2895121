"""How far an index must look to reach a recall: found on sampled rows, not guessed.

A search looks into `nprobe` cells and hands the `depth` rows with the best estimates to exact
scoring. So its recall is the share of the true k best among those candidates, and one search with
a large depth tells it for every smaller one. Among the pairs that reach the goal the cheapest is
taken by a cost in units of one compared code, measured once (tests/bench/vectors.py) and constant
here: times taken on a busy machine would make the choice a matter of luck.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.vectors import Positions, Rows, Scored, Vectors

SAMPLES = 256
LEVELS = (10, 40, 160, 640, 2_560, 10_240)
"""Tuned at 10; a larger top_k, or a filter that thins out the neighbours, needs the others."""
_ROWS_PER_K = 64
"""Up to a 64th of the rows: where more are asked for, exact search costs no more (of 100,000 rows
2,560 take half the cells and 18,000 exact scores). In small indexes up to a quarter, so that tests
meet them."""
_SAMPLES_VALUES = 10_240
"""Of the deeper levels each sample says more; k times the samples is at most this, but 16 at least.
"""
_DEPTH_MIN = 400
_DEPTH_PER_K = 12
_CONFIDENCE = 1.64
"""The goal must lie below the mean by so many standard errors: one-sided 95 %, so that queries
which were not sampled reach it too."""

Nearest = Callable[[Rows, int, int], Positions]
"""(queries, nprobe, depth) -> (queries, depth) positions, best estimate first, -1 where none."""


@dataclass(frozen=True, slots=True)
class Level:
    """To find the true `k` best with the mean `recall`: look into `nprobe` cells, score `depth`."""

    k: int
    nprobe: int
    depth: int
    recall: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What one candidate's exact score and one centroid cost, in compared codes."""

    candidate: float
    centroid: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows that serve as queries, and the true neighbours of each, itself left out."""

    positions: Positions
    queries: Rows
    truth: tuple[Scored, ...]

    @classmethod
    def draw(cls, vectors: Vectors, positions: Positions, rng: np.random.Generator) -> Sample:
        """Draw from `positions`, sorted, at most SAMPLES rows, and search them exactly."""
        picks = np.sort(rng.choice(positions, min(SAMPLES, len(positions)), replace=False))
        # The first ones are the sample of the deeper levels.
        rng.shuffle(picks)
        queries = vectors.gather(picks)
        allowed = None if len(positions) == len(vectors) else positions
        ks = level_ks(max(2, len(positions)))
        found: list[Scored] = []
        for low in range(0, len(picks), 32):
            # Itself beside the k; and only the first queries are asked for the deepest k.
            k = max(k for k in ks if low == 0 or low < _samples(k)) + 1
            found += vectors.exact(queries[low : low + 32], k, allowed)
        truth = (_without(scored, own) for scored, own in zip(found, picks.tolist(), strict=True))
        return cls(picks, queries, tuple(truth))


def tune(
    sample: Sample, nearest: Nearest, nlist: int, rows: int, recall: float, costs: Costs
) -> tuple[tuple[Level, ...], bool]:
    """Return a level for each of `level_ks`, and whether the first reaches `recall`.

    A level that cannot reach it gets every cell and the greatest depth.
    """
    if rows == 1:
        return (Level(1, nlist, rows, 1.0),), True
    levels: list[Level] = []
    reached = True
    for k in level_ks(rows):
        start = levels[-1].nprobe if levels else 1
        level, enough = _level(sample, nearest, nlist, rows, recall, costs, k, start)
        reached &= enough or bool(levels)
        levels.append(level)
    return tuple(levels), reached


def level_ks(rows: int) -> list[int]:
    """Return the k that an index of so many rows, at least two, is tuned for; at least one."""
    top = max(min(LEVELS[0], rows - 1), min(LEVELS[2], rows // 4), rows // _ROWS_PER_K)
    ks = {k for k in LEVELS if k <= top}
    # In a large index the next level would cost more than those who ask for so many can gain.
    return sorted(ks | {top}) if top < LEVELS[3] else sorted(ks)


def covers(levels: Sequence[Level], k: int, share: float) -> bool:
    """Tell whether `plan` can answer for this k from what was measured."""
    return k <= levels[-1].k * share


def plan(levels: Sequence[Level], k: int, share: float) -> tuple[float, float]:
    """Return (nprobe, depth) for the `k` best among rows of which a filter leaves this share.

    The k nearest of a tenth of the rows lie about as far out as the 10 k nearest of all, so cells
    are chosen for k / share; of the candidates only the allowed ones are kept. Between the levels
    both are interpolated as powers of k. Not rounded or bounded.
    """
    assert covers(levels, k, share)
    nprobe, depth = _at(levels, k / share)
    return nprobe, max(_at(levels, k)[1], depth * share)


def _at(levels: Sequence[Level], k: float) -> tuple[float, float]:
    if k <= levels[0].k:
        return levels[0].nprobe, levels[0].depth
    low, high = next(pair for pair in itertools.pairwise(levels) if k <= pair[1].k)
    power = math.log(k / low.k) / math.log(high.k / low.k)
    nprobe = low.nprobe * max(1.0, high.nprobe / low.nprobe) ** power
    return nprobe, low.depth * max(1.0, high.depth / low.depth) ** power


def _level(
    sample: Sample,
    nearest: Nearest,
    nlist: int,
    rows: int,
    recall: float,
    costs: Costs,
    k: int,
    start: int,
) -> tuple[Level, bool]:
    n = min(_samples(k), len(sample.queries))
    depth_max = min(rows, max(_DEPTH_MIN, _DEPTH_PER_K * k))
    truths = [_top(scored, k) for scored in sample.truth[:n]]
    cheapest: tuple[float, Level] | None = None
    mean = np.zeros(depth_max)
    for nprobe in _grid(nlist):
        if nprobe < start:
            continue
        scan = nprobe * rows / nlist
        if cheapest is not None and scan >= cheapest[0]:
            break
        found = nearest(sample.queries[:n], nprobe, depth_max)
        curves = _curves(found, truths, k)
        mean = curves.mean(axis=0)
        sure = mean - _CONFIDENCE * curves.std(axis=0) / np.sqrt(n)
        enough = np.flatnonzero(sure >= recall)
        if not enough.size:
            continue
        depth = int(enough[0]) + 1
        cost = scan + costs.candidate * depth + costs.centroid * nlist
        if cheapest is None or cost < cheapest[0]:
            cheapest = cost, Level(k, nprobe, depth, float(mean[depth - 1]))
    if cheapest is None:
        return Level(k, nlist, depth_max, float(mean[-1])), False
    return cheapest[1], True


def _curves(found: Positions, truths: Sequence[Positions], k: int) -> NDArray[np.float64]:
    """Return for each query the recall that each depth reaches: (n, depth) float64."""
    # One look-up for all: each position is made different for each query, and 0 stands for none.
    width = 2 + max(int(found.max()), *(int(truth.max()) for truth in truths))
    true = np.concatenate([truth + (1 + i * width) for i, truth in enumerate(truths)])
    keys = found + (1 + width * np.arange(len(found))[:, np.newaxis])
    keys[found < 0] = 0
    hits = np.isin(keys, true)
    # Rows that tie with the k-th are all true, so there can be more than k of them.
    curves: NDArray[np.float64] = np.minimum(np.cumsum(hits, axis=1), k) / k
    return curves


def _top(scored: Scored, k: int) -> Positions:
    at = len(scored.scores) - k
    top: Positions = scored.positions[scored.scores >= np.partition(scored.scores, at)[at]]
    return top


def _without(scored: Scored, position: int) -> Scored:
    keep = scored.positions != position
    return Scored(scored.positions[keep], scored.scores[keep])


def _samples(k: int) -> int:
    return max(16, min(SAMPLES, _SAMPLES_VALUES // k))


def _grid(nlist: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, … and nlist."""
    steps = {step << i for i in range(nlist.bit_length()) for step in (1, 3)}
    return [*sorted(step for step in steps if step < nlist), nlist]
