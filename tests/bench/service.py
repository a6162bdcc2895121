"""What a server does over HTTP: `PYTHONPATH=src:. python tests/bench/service.py [section …]`.

Sections: load, rank, recall, search, modes, upsert, memory, delay, open, build, many; all of them
without an argument. One server of its own serves all but the last two. The machines are
shared: trust the ratios, taken in alternating rounds, and the CPU time; not one figure alone.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray
from tests.support.data import DataSet, Rows, mixture, wordnet
from tests.support.http_load import (
    SEARCH,
    UPSERT,
    Connection,
    Drive,
    Rate,
    drive,
    in_process,
    search,
    send_all,
    start_in_process,
    tool,
)
from tests.support.served import Served, served

from mindgrid.shards.ivf import IvfIndex
from mindgrid.shards.vectors import Block, Vectors

ROWS = int(os.environ.get("BENCH_ROWS", "100000"))
DIMENSIONS = 384
BATCH = 500
LOADERS = 4
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
SECONDS = int(os.environ.get("BENCH_SECONDS", "8"))
QUERIES = 1_000
DELAY_RUNS = 3
DELAY_EVERY_S = 0.02
MANY, MANY_ROWS = 1_000, 100
MAIN, WORDNET = "mixture", "wordnet"
PARTS = ("front", "host", "haproxy", "other")


def main() -> None:
    """Run the chosen sections."""
    every = ["rank", "recall", "search", "modes", "upsert", "memory", "delay", "open"]
    chosen = sys.argv[1:] or ["load", *every, "build", "many"]
    unknown = set(chosen) - {"load", *every, "build", "many"}
    if unknown:
        sys.exit(f"no such section: {', '.join(sorted(unknown))}")
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, ray {version('ray')}, faiss {version('faiss-cpu')}; "
        f"clients: {tool()}"
    )
    data = mixture(ROWS, QUERIES, DIMENSIONS)
    if set(chosen) & {"load", *every}:
        spare = [f"spare-{run}" for run in range(DELAY_RUNS)]
        with (
            tempfile.TemporaryDirectory(prefix="mindgrid-bench-") as folder,
            served(Path(folder), [MAIN, WORDNET, *spare], DIMENSIONS) as server,
        ):
            _load(server, data)
            sections = {
                "rank": lambda: _rank(server, data),
                "recall": lambda: _recall(server, data),
                "search": lambda: _search(server, data),
                "modes": lambda: _modes(server, data),
                "upsert": lambda: _upsert(server, data),
                "memory": lambda: _memory(server),
                "delay": lambda: _delay(server, data, spare),
                "open": lambda: _open(server, data),
            }
            for name in every:
                if name in chosen:
                    sections[name]()
    if "build" in chosen:
        _build(data)
    if "many" in chosen:
        _many()


# Loading


def words(rng: np.random.Generator, count: int, beyond: int = 0) -> list[str]:
    """Return words by Zipf's law, of 50,000; without the `beyond` most frequent, its stop words."""
    ranks = np.exp(rng.uniform(np.log(beyond + 1), np.log(50_000), count)).astype(int)
    return [f"word{rank}" for rank in ranks.tolist()]


def batches(namespace: str, rows: Rows, prefix: str = "r") -> list[bytes]:
    """Return the bodies of upserts of BATCH rows each; row 7 is the record `r0000007`."""
    rng = np.random.default_rng(4)
    return [
        orjson.dumps(
            {
                "namespace": namespace,
                "records": [
                    {
                        "id": f"{prefix}{number:07}",
                        "content": " ".join(words(rng, 18)),
                        "metadata": {"topic": f"t{number % 100}", "rare": f"r{number % 10_000}"},
                        "vector": rows[number],
                    }
                    for number in range(start, min(start + BATCH, len(rows)))
                ],
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        for start in range(0, len(rows), BATCH)
    ]


def load(port: int, namespace: str, rows_file: str, wait_for: str = "") -> float:
    """Load the rows and return the seconds it took; with `wait_for`, once that file exists."""
    bodies = batches(namespace, np.load(rows_file))
    while wait_for and not Path(wait_for).exists():
        time.sleep(0.01)
    return send_all(port, UPSERT, bodies, LOADERS)


def _load(server: Served, data: DataSet) -> None:
    before = _costs(server)
    seconds = _loaded(server, MAIN, data.rows)
    after = _costs(server)
    started = time.perf_counter()
    tail = _wait_until_indexed(server, MAIN, len(data.rows))
    indexed_s = seconds + time.perf_counter() - started
    bytes_each = sum(map(len, batches(MAIN, data.rows[:BATCH]))) / BATCH
    print(
        f"load {len(data.rows):,} x {DIMENSIONS} in batches of {BATCH} over {LOADERS} connections, "
        f"{bytes_each:.0f} bytes a record: {len(data.rows) / seconds:,.0f} records/s durable and "
        f"visible, {len(data.rows) / indexed_s:,.0f} with the index ({indexed_s - seconds:.1f} s "
        f"more; {tail} rows stay in the tail, which is searched exactly)"
    )
    used = {part: 1e6 * (after[part] - before[part]) / len(data.rows) for part in PARTS}
    print("  CPU µs a record until visible: " + _shown(used))


def _loaded(server: Served, namespace: str, rows: Rows) -> float:
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, rows)
        return in_process(load, server.port, namespace, file.name)


def _wait_until_indexed(server: Served, namespace: str, rows: int) -> int:
    """Return how many rows are in the tail, once all others are in the index if there is one."""
    while True:
        found = server.shards().get(namespace)
        if found is not None and found.rows >= rows:
            sealed = found.rows - found.tail_rows
            if found.tail_rows < 8_192 and (found.indexed_rows == sealed or sealed < 32_768):
                return found.tail_rows
        time.sleep(0.1)


def _costs(server: Served) -> dict[str, float]:
    return {part: server.cost(part).cpu_s for part in PARTS}


def _shown(by_part: dict[str, float]) -> str:
    return ", ".join(f"{part} {value:.0f}" for part, value in by_part.items())


# Answers


def _rank(server: Served, data: DataSet) -> None:
    picks = np.random.default_rng(1).choice(len(data.rows), QUERIES, replace=False)
    connection = server.connect()
    first = 0
    for number in picks.tolist():
        hits = _asked(connection, MAIN, data.rows[number], topK=1)
        first += hits == [f"r{number:07}"]
    print(f"rank 1 for its own vector: {first} of {len(picks)} sampled records")


def _recall(server: Served, data: DataSet) -> None:
    found = wordnet()
    if found is None:
        print("recall on wordnet: skipped, no shared data (set MINDGRID_DATA)")
    else:
        _loaded(server, WORDNET, found.rows)
        _wait_until_indexed(server, WORDNET, len(found.rows))
    for namespace, some in ((WORDNET, found), (MAIN, data)):
        if some is None:
            continue
        connection = server.connect()
        true = np.argsort(-(some.queries @ some.rows.T), axis=1)[:, :10]
        hits = 0
        for query, expected in zip(some.queries, true.tolist(), strict=True):
            answer = _asked(connection, namespace, query, topK=10)
            hits += len({f"r{number:07}" for number in expected} & set(answer))
        print(f"recall@10 on {some.name}, one shard: {hits / true.size:.4f}")


def _asked(
    connection: Connection, namespace: str, vector: NDArray[np.float32], **more: object
) -> list[str]:
    body = {"namespace": namespace, "queryVector": vector.tolist(), **more}
    return [id for id, _ in search(connection, body)]


# Rates


def _search(server: Served, data: DataSet) -> None:
    bodies = [_body(vector) for vector in data.queries[:200]]
    print("searches by vector, top 10, beside a constant answer of that size:")
    for clients in (1, 8, 32):
        _beside_constant(server, "all rows", bodies, clients)


def _modes(server: Served, data: DataSet) -> None:
    """Filtered searches, whose recall must be 1, and those by words."""
    rng = np.random.default_rng(5)
    print("32 clients, top 10, beside a constant answer of that size:")
    for name, key, values in (("1 %", "topic", 100), ("0.01 %", "rare", 10_000)):
        filters = [{key: f"{key[0]}{n}"} for n in rng.integers(0, values, 200).tolist()]
        queries = list(zip(data.queries[:200], filters, strict=True))
        _beside_constant(
            server, f"filtered to {name}", [_body(vector, filter=f) for vector, f in queries], 32
        )
        _check_filtered(server, data, queries[:100], values)
    texts = [" ".join(words(rng, 3, beyond=50)) for _ in range(200)]
    for mode in ("SPARSE", "HYBRID"):
        bodies = [
            orjson.dumps({"namespace": MAIN, "queryText": t, "mode": f"SEARCH_MODE_{mode}"})
            for t in texts
        ]
        _beside_constant(server, f"{mode}, 3 words that are no stop words", bodies, 32)


def _check_filtered(
    server: Served,
    data: DataSet,
    queries: Sequence[tuple[NDArray[np.float32], dict[str, str]]],
    values: int,
) -> None:
    """Compare with all rows that match, by NumPy."""
    connection = server.connect()
    found = wanted = 0
    for vector, filter in queries:
        ((_, value),) = filter.items()
        rows = np.arange(int(value[1:]), len(data.rows), values)
        best = rows[np.argsort(-(data.rows[rows] @ vector))[:10]]
        ids = _asked(connection, MAIN, vector, filter=filter, idsOnly=True, topK=10)
        wanted += len(best)
        found += len(set(ids) & {f"r{row:07}" for row in best.tolist()})
    print(f"    recall {found / wanted:.4f} of {wanted} wanted")


def _beside_constant(server: Served, name: str, bodies: Sequence[bytes], clients: int) -> None:
    """Print the rate of these searches, and its share of a constant answer's in the same rounds."""
    connection = server.connect()
    sizes = [len(connection.post(SEARCH, body)) for body in bodies]
    constant = f"/bench/constant?bytes={round(statistics.mean(sizes))}"
    rates: dict[str, list[Rate]] = {SEARCH: [], constant: []}
    cpu: dict[str, dict[str, float]] = {}
    for _ in range(ROUNDS):
        slices: dict[str, list[Rate]] = {SEARCH: [], constant: []}
        used: dict[str, dict[str, float]] = {path: dict.fromkeys(PARTS, 0.0) for path in slices}
        # By turns, second by second: a machine that others use changes its pace within a round.
        for _ in range(SECONDS):
            for path, found in slices.items():
                before = _costs(server)
                found.append(drive(Drive(server.port, path, bodies, clients, 1.0)))
                after = _costs(server)
                for part in PARTS:
                    used[path][part] += after[part] - before[part]
        for path, found in slices.items():
            rates[path].append(_together(found))
            answers = sum(rate.answers for rate in found)
            cpu[path] = {part: 1e6 * used[path][part] / answers for part in PARTS}
    ours, theirs = (
        statistics.median(rate.each_s for rate in rates[path]) for path in (SEARCH, constant)
    )
    best = min(rates[SEARCH], key=lambda rate: rate.p99_ms)
    print(
        f"  {name}, {clients:2} clients: {ours:6,.0f}/s of {theirs:6,.0f}/s, ratio "
        f"{ours / theirs:.2f} (rounds {_ratios(rates[SEARCH], rates[constant])}); p50 "
        f"{best.p50_ms:.1f}, p99 {best.p99_ms:.1f} ms; CPU µs each: {_shown(cpu[SEARCH])}; "
        f"constant: {_shown(cpu[constant])}"
    )


def _together(slices: Sequence[Rate]) -> Rate:
    """Return the mean rate, and the worst of the percentiles, of slices of equal length."""
    return Rate(
        statistics.mean(one.each_s for one in slices),
        max(one.p50_ms for one in slices),
        max(one.p99_ms for one in slices),
        sum(one.answers for one in slices),
    )


def _ratios(ours: Sequence[Rate], theirs: Sequence[Rate]) -> str:
    return " ".join(f"{a.each_s / b.each_s:.2f}" for a, b in zip(ours, theirs, strict=True))


def _body(vector: NDArray[np.float32], **more: object) -> bytes:
    body = {"namespace": MAIN, "queryVector": vector, "topK": 10, **more}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _upsert(server: Served, data: DataSet) -> None:
    bodies = [
        orjson.dumps(
            {"namespace": MAIN, "records": [{"id": f"new-{n % 997}", "vector": vector}]},
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        for n, vector in enumerate(data.queries)
    ]
    rates = [drive(Drive(server.port, UPSERT, bodies, 8, 4.0)) for _ in range(ROUNDS)]
    rate = statistics.median(rate.each_s for rate in rates)
    print(f"upserts of one record, 8 clients: {rate:,.0f}/s, p99 {rates[-1].p99_ms:.1f} ms")


def _memory(server: Served) -> None:
    for part in ("front", "host"):
        cost = server.cost(part)
        print(f"memory of {part}: {cost.rss_mib:.0f} MiB, {cost.own_mib:.0f} not mapped from files")


# Under load, and after a kill


def _delay(server: Served, data: DataSet, spare: Sequence[str]) -> None:
    idle = [_latencies(server, data, None) for _ in spare]
    busy = []
    with tempfile.TemporaryDirectory() as folder:
        rows_file = str(Path(folder) / "rows.npy")
        np.save(rows_file, data.rows)
        for namespace in spare:
            go = Path(folder) / f"go-{namespace}"
            loading = start_in_process(load, server.port, namespace, rows_file, str(go))
            time.sleep(10)  # until the client has put its bodies together
            go.touch()
            busy.append(_latencies(server, data, _indexed(server, namespace, loading)))
    for name, runs in (("idle", idle), ("while rows are loaded and indexed", busy)):
        shown = "; ".join(
            " ".join(f"{ms:.1f}" for ms in np.percentile(run, [50, 99, 100])) + f" {len(run)}"
            for run in runs
        )
        print(f"searches of one client, {name} (p50, p99, worst ms, how many): {shown}")
    p99 = [max(float(np.percentile(run, 99)) for run in runs) for runs in (idle, busy)]
    more = p99[1] - p99[0]
    print(f"  p99, worst of {len(spare)}: {p99[0]:.1f} and {p99[1]:.1f} ms, {more:.1f} more")


def _indexed(server: Served, namespace: str, loading: Future[float]) -> Future[int]:
    """Return what ends when all is loaded, sealed and indexed."""

    def wait() -> int:
        loading.result()
        return _wait_until_indexed(server, namespace, ROWS)

    return ThreadPoolExecutor(1).submit(wait)


def _latencies(server: Served, data: DataSet, until: Future[int] | None) -> list[float]:
    """Return the times in ms of a thousand searches and more, until `until` is done."""
    bodies = [_body(vector) for vector in data.queries]
    connection = server.connect()
    times: list[float] = []
    while len(times) < QUERIES or not (until is None or until.done()):
        start = time.perf_counter()
        connection.post(SEARCH, bodies[len(times) % len(bodies)])
        took = time.perf_counter() - start
        times.append(1e3 * took)
        time.sleep(max(0.0, DELAY_EVERY_S - took) if until else 0.001)
    connection.close()
    return times


def _open(server: Served, data: DataSet) -> None:
    body = _body(data.queries[0])
    connection = server.connect()
    before = connection.post(SEARCH, body)
    connection.close()
    for wait_s in (0.0, 15.0):
        server.kill_host()
        started = time.perf_counter()
        if wait_s:
            # Ray starts the process anew, and imports what it needs; no shard is open then.
            time.sleep(wait_s)
            started = time.perf_counter()
        connection = server.connect()
        after = connection.post(SEARCH, body)
        took = time.perf_counter() - started
        connection.close()
        what = "a new host opens the namespace" if wait_s else "the host is killed"
        same = "the same answer" if before == after else "ANOTHER ANSWER"
        print(f"from when {what} to the first answer: {took:.2f} s ({same})")


def _build(data: DataSet) -> None:
    vectors = Vectors(DIMENSIONS, [Block.of(data.rows)])
    wall, cpu = time.perf_counter(), time.process_time()
    index = IvfIndex.build(vectors)
    print(
        f"index of {len(vectors):,} rows built in {time.perf_counter() - wall:.1f} s, CPU "
        f"{time.process_time() - cpu:.1f} s, tuned to recall {index.recall:.3f}"
    )


def _many() -> None:
    names = [f"small-{number:04}" for number in range(MANY)]
    rows = mixture(MANY_ROWS, 1, DIMENSIONS).rows
    with tempfile.TemporaryDirectory(prefix="mindgrid-bench-") as folder:
        server = Served(Path(folder), names, DIMENSIONS, [])
        try:
            ready_s = server.start()
            fresh = server.cost("host")
            started = time.perf_counter()
            connection = server.connect()
            for name in names:
                connection.post(UPSERT, batches(name, rows)[0])
            filled_s = time.perf_counter() - started
            full = server.cost("host")
            server.stop()
            again_s = server.start()
            connection = server.connect()
            started = time.perf_counter()
            for name in names:
                assert _asked(connection, name, rows[3], topK=1) == ["r0000003"]
            opened_s = time.perf_counter() - started
            opened = server.cost("host")
        finally:
            server.stop()
    print(
        f"{MANY:,} namespaces of {MANY_ROWS} records on one host: ready in {ready_s:.1f} s empty, "
        f"{again_s:.1f} s full; filled one after the other in {filled_s:.0f} s; after a restart "
        f"each opened and searched in {1e3 * opened_s / MANY:.1f} ms; host {fresh.rss_mib:.0f} MiB "
        f"empty, {full.rss_mib:.0f} filled, {opened.rss_mib:.0f} after the restart with all open"
    )


if __name__ == "__main__":
    main()
