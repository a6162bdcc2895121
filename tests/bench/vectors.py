"""Recall, time and size of exact and approximate vector search. Seeded; prints the machine.

    PYTHONPATH=src:. python tests/bench/vectors.py [mixture rows]

Times are CPU time of the calling thread (all of it on one core), since the machines are shared, and
wall time where threads compete."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# NumPy's own BLAS threads would compete with what is measured.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import faiss
import numpy as np
from numpy.typing import NDArray
from tests.support.data import DataSet, mixture, wordnet

from mindgrid.shards.background import background_pool
from mindgrid.shards.ivf import Bitmap, IvfIndex
from mindgrid.shards.vectors import Block, Positions, Vectors

T = TypeVar("T")

K = 10
QUERIES = 300
BATCH = 32
BLOCK_ROWS = 65_536


def main() -> None:
    """Print one section per data set."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"faiss {faiss.__version__}, numpy {np.__version__}"
    )
    for data in (wordnet(), mixture(rows, 1_000)):
        if data is None:
            print("wordnet: skipped, no shared data (set MINDGRID_DATA)")
            continue
        _section(data)


def _section(data: DataSet) -> None:
    vectors = Vectors(data.rows.shape[1], _blocks(data.rows))
    print(f"\n{data.name}: {len(vectors)} x {vectors.dimensions}, {len(vectors.blocks)} blocks")
    wall, cpu = time.perf_counter(), time.thread_time()
    index = IvfIndex.build(vectors)
    print(
        f"build {time.perf_counter() - wall:.1f} s, CPU {time.thread_time() - cpu:.1f} s, "
        f"tuned on the rows to {index.recall:.3f} as {index.meta.code}"
    )
    for level in index.meta.levels:
        print(f"  {level}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = sum(path.stat().st_size for path in index.save(folder))
        _, load_ms = _timed(lambda: IvfIndex.load(folder))
    print(f"  {size / 1e6:.1f} MB, raw {data.rows.nbytes / 1e6:.0f} MB; loads in {load_ms:.1f} ms")

    queries = data.queries[:QUERIES]
    every = [vectors.exact(queries[i : i + BATCH], K) for i in range(0, QUERIES, BATCH)]
    truth = [scored.positions for part in every for scored in part]
    print(f"{'':26}recall@10  ms/query  batch of {BATCH}  scanned  candidates")
    _approximate("ivf", index, vectors, queries, truth, None)
    rng = np.random.default_rng(5)
    for share in (0.5, 0.2, 0.1, 0.01):
        mask = rng.random(len(vectors)) < share
        allowed = np.flatnonzero(mask)
        name = f"{share:.0%} allowed"
        true = [vectors.exact(query[None], K, allowed)[0].positions for query in queries]
        _approximate(f"ivf, {name}", index, vectors, queries, true, mask)
        _exact(f"exact, {name}", vectors, queries, allowed)
    _exact("exact, all", vectors, queries, None)
    for k in (100, 1_000):
        true = [vectors.exact(query[None], k)[0].positions for query in queries[:50]]
        _approximate(f"ivf, top {k}", index, vectors, queries[:50], true, None, k)
    _delay(data, vectors, index)


def _approximate(
    name: str,
    index: IvfIndex,
    vectors: Vectors,
    queries: NDArray[np.float32],
    truth: list[Positions],
    mask: NDArray[np.bool_] | None,
    k: int = K,
) -> None:
    bitmap = None if mask is None else Bitmap.of(mask)
    hits, times, scanned, count = 0, [], 0, 0

    def search(some: NDArray[np.float32]) -> list[Positions]:
        nonlocal scanned, count
        answers = []
        for query, found in zip(some, index.search(some, k, bitmap), strict=True):
            scanned += found.scanned
            count += len(found.positions)
            answers.append(vectors.exact(query[None], k, found.positions)[0].positions)
        return answers

    for query, true in zip(queries, truth, strict=True):
        answers, ms = _timed(lambda query=query: search(query[None]))  # type: ignore[misc]
        hits += min(k, int(np.isin(answers[0], true).sum()))
        times.append(ms)
    n = len(queries)
    scanned_each, count_each = scanned // n, count // n
    batch = min(_timed(lambda: search(queries[:BATCH]))[1] for _ in range(5)) / BATCH
    print(
        f"{name:26}{hits / k / n:9.3f}{np.median(times):10.3f}{batch:13.3f}"
        f"{scanned_each:9d}{count_each:12d}"
    )


def _exact(
    name: str, vectors: Vectors, queries: NDArray[np.float32], allowed: Positions | None
) -> None:
    times = [
        _timed(lambda query=query: vectors.exact(query[None], K, allowed))[1]  # type: ignore[misc]
        for query in queries[:40]
    ]
    batch = min(_timed(lambda: vectors.exact(queries[:BATCH], K, allowed))[1] for _ in range(3))
    n = len(vectors) if allowed is None else len(allowed)
    print(f"{name:26}{1:9.3f}{np.median(times):10.3f}{batch / BATCH:13.3f}{n:9d}")


def _delay(data: DataSet, vectors: Vectors, index: IvfIndex) -> None:
    """Print the wall time of searches alone, and beside an index being built."""

    def search(i: int) -> float:
        query = data.queries[i % len(data.queries)][None]
        start = time.perf_counter()
        vectors.exact(query, K, index.search(query, K)[0].positions)
        return (time.perf_counter() - start) * 1e3

    def report(name: str, times: list[float]) -> None:
        p50, p99, worst = np.percentile(times, [50, 99, 100])
        print(
            f"{name}: searches p50 {p50:.2f}, p99 {p99:.2f}, "
            f"worst {worst:.1f} ms of {len(times)} (wall, one client)"
        )

    report("alone", [search(i) for i in range(1_000)])
    pool = background_pool(1, "build")
    built = pool.submit(IvfIndex.build, vectors)
    pool.shutdown(wait=False)
    times: list[float] = []
    while not built.done():
        times.append(search(len(times)))
        time.sleep(0.001)
    report("beside a build", times)
    two: list[list[float]] = [[], []]
    threads = [
        threading.Thread(target=lambda out=out: out.extend(search(i) for i in range(1_000)))
        for out in two
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    each_s = 2_000 / (time.perf_counter() - start)
    print(f"two threads: {each_s:.0f} searches/s (wall)")


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.thread_time()
    result = work()
    return result, (time.thread_time() - start) * 1e3


def _blocks(rows: NDArray[np.float32]) -> list[Block]:
    return [Block.of(rows[low : low + BLOCK_ROWS]) for low in range(0, len(rows), BLOCK_ROWS)]


if __name__ == "__main__":
    main()
