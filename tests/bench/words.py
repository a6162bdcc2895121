"""Time and size of search by words, beside bm25s on the same terms. Seeded; prints the machine.

    PYTHONPATH=src:. python tests/bench/words.py [documents]

Times are CPU time of the calling thread (all of it on one core), since the machines are shared."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# Threads of NumPy's would compete with what is measured.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import bm25s
import numpy as np
from numpy.typing import NDArray
from tests.support.data import glosses

from mindgrid.shards import scores
from mindgrid.shards.analysis import SIMPLE, Analyzer
from mindgrid.shards.postings import WordBlock, merged
from mindgrid.shards.vectors import Positions
from mindgrid.shards.words import Words, WordTail

T = TypeVar("T")

K = 10
QUERIES = 200
PEER_QUERIES = 20
SEAL_ROWS = 8_192
FREQUENCIES = {"rare": 20, "ordinary": 1_000, "frequent": 10_000, "stop words": 50_000}
"""By name: how many of 100,000 documents hold a term."""
SHARES = (1.0, 0.5, 0.01, 0.0001)


def main() -> None:
    """Print one section per collection."""
    documents = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"PYTHONPATH=src:. python tests/bench/words.py {documents}")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, bm25s {bm25s.__version__}"
    )
    _section(f"{documents} documents of 40 Zipf words", _zipf(documents), SIMPLE)
    texts = glosses()
    if texts is None:
        print("wordnet: skipped, no shared data (set MINDGRID_DATA)")
    else:
        _section(f"{len(texts)} WordNet glosses", texts, "english")


def _zipf(documents: int) -> list[str]:
    """Return texts of 40 words: the word of rank r has weight 1/(r + 1), of 50,000 words."""
    rng = np.random.default_rng(11)
    letters = np.array(list("aeioubcdfghklmnprst"))
    sizes = rng.integers(3, 10, 50_000).tolist()
    vocabulary = np.array(["".join(rng.choice(letters, size)) for size in sizes])
    weights = 1.0 / np.arange(2, 50_002)
    picks = rng.choice(50_000, (documents, 40), p=weights / weights.sum())
    return [" ".join(row) for row in vocabulary[picks].tolist()]


def _section(name: str, texts: list[str], text_search: str) -> None:
    analyzer = Analyzer(text_search)
    block, ms = _timed(lambda: WordBlock.of(texts, analyzer))
    print(f"\n{name}, {text_search}: {len(block.terms)} terms, {len(block.rows)} postings")
    corpus, tokens_ms = _timed(lambda: [analyzer.document(text).terms for text in texts])
    peer = bm25s.BM25(k1=scores.K1, b=scores.B, method="lucene")
    _, peer_ms = _timed(lambda: peer.index(corpus, show_progress=False))
    each, each_peer = ms / len(texts) * 1e3, (tokens_ms + peer_ms) / len(texts) * 1e3
    print(
        f"build {each:.1f} us/text, bm25s on our terms {each_peer:.1f} "
        f"(of these {tokens_ms / len(texts) * 1e3:.1f} are ours): ratio {each_peer / each:.1f}"
    )
    _upkeep(texts, analyzer)
    with tempfile.TemporaryDirectory() as folder:
        size = block.save(Path(folder)).stat().st_size
        block, ms = _timed(lambda: WordBlock.open(Path(folder), len(texts)))
        print(f"{size / len(block.rows):.2f} bytes/posting; opens in {ms:.2f} ms")
        _queries(block, peer)


def _upkeep(texts: list[str], analyzer: Analyzer) -> None:
    blocks = [
        WordBlock.of(texts[low : low + SEAL_ROWS], analyzer)
        for low in range(0, len(texts), SEAL_ROWS)
    ]
    rng = np.random.default_rng(12)
    parts = [(block, rng.random(len(block)) < 0.9) for block in blocks]
    _, merge_ms = _timed(lambda: merged(parts))
    tail = WordTail(analyzer)
    append_us, look_us = [], []
    for text in texts[:2_000]:
        append_us.append(_timed(lambda text=text: tail.append([text]))[1] * 1e3)  # type: ignore[misc]
        look_us.append(_timed(lambda: tail.block.lengths)[1] * 1e3)
    print(
        f"merge of {len(blocks)} blocks, nine rows of ten kept: {merge_ms / len(texts) * 1e3:.1f} "
        f"us/text; a commit of one {np.median(append_us):.1f} us, its first search "
        f"{np.median(look_us):.1f} us more"
    )


def _queries(block: WordBlock, peer: bm25s.BM25) -> None:
    words = Words([block])
    totals = words.totals()
    rng = np.random.default_rng(13)
    masks = {
        share: None if share == 1.0 else np.flatnonzero(rng.random(len(words)) < share)
        for share in SHARES
    }
    counted = rng.random(len(words)) < 0.97
    heads = "".join(f"{share:>18.2%}" for share in SHARES)
    print(f"{'ms p50 / p99':34}{'df alone':>10}{heads}{'bm25s':>10}{'ratio':>8}")
    for name, frequency in FREQUENCIES.items():
        queries = _terms(block, frequency * len(words) // 100_000, rng)
        if not queries:
            continue
        stats = [words.stats(query, None, totals) for query in queries]
        df = float(np.median([s.frequencies for s in stats]))
        pairs = list(zip(queries, stats, strict=True))
        _, count_ms = _timed(lambda: [words.stats(q, counted, totals) for q in queries])  # noqa: B023
        cells, medians = "", {}
        for share, allowed in masks.items():
            times = [
                _timed(lambda q=q, s=s: words.search(q, s, allowed, K))[1]  # type: ignore[misc]  # noqa: B023
                for q, s in pairs
            ]
            p50, p99 = np.percentile(times, [50, 99])
            medians[share] = p50
            cells += f"{p50:10.3f} /{p99:6.3f}"
        theirs = _peer(peer, queries[:PEER_QUERIES], masks[0.01])
        print(
            f"three {name + ',':12} in {df:7.0f} each{count_ms / len(queries):14.3f}{cells}"
            f"{theirs:10.2f}{theirs / medians[0.01]:8.0f}"
        )


def _terms(block: WordBlock, frequency: int, rng: np.random.Generator) -> list[list[str]]:
    """Return queries of three terms, each of about this document frequency."""
    found = np.diff(block.starts.astype(np.int64))
    near = np.flatnonzero((10 * found > 7 * frequency) & (10 * found < 14 * frequency))
    if len(near) < 3:
        return []
    terms = block.terms.array()
    picks = [rng.choice(near, 3, replace=False) for _ in range(QUERIES)]
    return [[terms[int(at)].as_py() for at in pick] for pick in picks]


def _peer(peer: bm25s.BM25, queries: list[list[str]], allowed: Positions | None) -> float:
    """Return the median of bm25s's time for a query under the mask, in ms."""
    mask: NDArray[np.float32] = np.zeros(peer.scores["num_docs"], np.float32)
    mask[allowed] = 1
    return float(
        np.median(
            [
                _timed(
                    lambda q=q: peer.retrieve([q], k=K, weight_mask=mask, show_progress=False)  # type: ignore[misc]
                )[1]
                for q in queries
            ]
        )
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.thread_time()
    result = work()
    return result, (time.thread_time() - start) * 1e3


if __name__ == "__main__":
    main()
