"""An episodic log over HTTP: `PYTHONPATH=src:. python tests/bench/events.py [section …]`.

Sections: append, batch, replay, session, open, tail, tails; all without an argument. One server of
its own serves them. Beside `append` runs PostgreSQL, where it is installed: the same events, a
counter row a namespace, every commit synced, asked over as many connections by pgbench (in C, as
fast as can be asked) and by asyncpg (as an application asks).
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import orjson
from tests.support.http_load import Connection, Drive, Rate, drive, send_all, tool
from tests.support.served import Served, served

EVENTS = int(os.environ.get("BENCH_EVENTS", "1000000"))
SECONDS = int(os.environ.get("BENCH_SECONDS", "6"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
NAMES = [f"log-{n:02}" for n in range(64)]
APPEND = "/mindd.episodic.v1.Episodic/Append"
RANGE = "/mindd.episodic.v1.Episodic/Range"
TAIL = "/mindd.episodic.v1.Episodic/Tail"
BATCH = "/mindgrid.v1.Events/AppendBatch"
PAYLOAD = base64.b64encode(b'{"text": "When does the next flight to Lisbon leave?"}' * 4).decode()
SESSION, REPLAYED, TAILED, TAILS = 100, 10_000, 500, 1_000


def main() -> None:
    """Run the sections named on the command line."""
    asked = sys.argv[1:] or list(SECTIONS)
    print(f"asked by {tool()}; {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="mindgrid-bench-") as folder:
        logs = [*NAMES, "batches", "long", "tailed"]
        with served(Path(folder), [], 8, logs) as server:
            for name in asked:
                print(f"-- {name}")
                SECTIONS[name](server)


def _append(server: Served) -> None:
    """Closed loops of single events, each durable when it is answered."""
    event = {"type": "message", "role": "tool", "payload": PAYLOAD}
    one = [orjson.dumps({"namespace": NAMES[0], **event})]
    many = [orjson.dumps({"namespace": name, **event}) for name in NAMES]
    with _postgres() as peer:
        for clients in (1, 8, 32):
            for words, bodies in (("one namespace", one), ("64 namespaces", many)):
                ours: list[Rate] = []
                theirs: dict[str, list[float]] = {}
                for _ in range(ROUNDS):
                    plan = Drive(server.port, APPEND, bodies, clients, SECONDS)
                    ours.append(drive(plan))
                    for name, ask in PEERS.items():
                        if peer:
                            theirs.setdefault(name, []).append(ask(peer, clients, len(bodies)))
                rate = statistics.median(one.each_s for one in ours)
                p50 = statistics.median(one.p50_ms for one in ours)
                p99 = statistics.median(one.p99_ms for one in ours)
                line = (
                    f"{clients:2} clients, {words}: {rate:,.0f}/s, p50 {p50:.1f}, p99 {p99:.1f} ms"
                )
                for name, rates in theirs.items():
                    other = statistics.median(rates)
                    line += f"; PostgreSQL by {name} {other:,.0f}/s, ratio {rate / other:.2f}"
                print(line)


def _batch(server: Served) -> None:
    """AppendBatch of 1,000 events over four connections."""
    events = [{"type": "message", "role": "tool", "payload": PAYLOAD}] * 1_000
    body = orjson.dumps({"namespace": "batches", "events": events})
    rates = []
    for _ in range(ROUNDS):
        rates.append(100_000 / send_all(server.port, BATCH, [body] * 100, 4))
    print(f"batches of 1,000: {statistics.median(rates):,.0f} events/s, {len(body)} bytes each")


def _fill(server: Served) -> None:
    """Make the long log, in sessions of 100 whose events lie apart."""
    if _lines(server, RANGE, {"namespace": "long", "limit": 1})[0]:
        return
    bodies = []
    for first in range(0, EVENTS, 1_000):
        events = [
            {
                "type": "message",
                "role": ("user", "assistant", "tool")[n % 3],
                "sessionId": f"session-{n % (EVENTS // SESSION)}",
                "payload": PAYLOAD,
            }
            for n in range(first, first + 1_000)
        ]
        bodies.append(orjson.dumps({"namespace": "long", "events": events}))
    seconds = send_all(server.port, BATCH, bodies, 4)
    print(f"{EVENTS:,} events in {seconds:.0f} s, {EVENTS / seconds:,.0f} events/s")


def _replay(server: Served) -> None:
    """Range over 10,000 events, the whole answer read, beside a constant answer as large."""
    _fill(server)
    times = []
    for n in range(7):
        body = {"namespace": "long", "afterCursor": str(n * REPLAYED), "limit": REPLAYED}
        started = time.perf_counter()
        count, size = _lines(server, RANGE, body)
        times.append(1e3 * (time.perf_counter() - started))
        assert count == REPLAYED
    print(f"replay of {REPLAYED:,} events, {size / 2**20:.1f} MiB: {_spread(times)} ms")


def _session(server: Served) -> None:
    """One session of 100 events out of the long log."""
    _fill(server)
    times = []
    for n in range(20):
        body = {"namespace": "long", "sessionId": f"session-{n * 37 % (EVENTS // SESSION)}"}
        started = time.perf_counter()
        count, _ = _lines(server, RANGE, body)
        times.append(1e3 * (time.perf_counter() - started))
        assert count == SESSION
    print(f"a session of {SESSION} out of {EVENTS:,}: {_spread(times)} ms")


def _open(server: Served) -> None:
    """The first read of the long log after a start, which opens it, and what that holds."""
    _fill(server)
    time.sleep(10)  # What is due is sealed and merged meanwhile.
    server.stop()
    server.start()
    _lines(server, RANGE, {"namespace": NAMES[0], "limit": 1})
    before = server.cost("host").own_mib
    started = time.perf_counter()
    _lines(server, RANGE, {"namespace": "long", "limit": 1})
    seconds = time.perf_counter() - started
    held = (server.cost("host").own_mib - before) * 2**20
    print(f"{EVENTS:,} events opened in {seconds:.2f} s, {held / EVENTS:.0f} bytes each")


def _tail(server: Served) -> None:
    """From before an append is sent until its event is read from a tail."""
    tail = _open_tail(server)
    connection = Connection(server.port)
    body = orjson.dumps({"namespace": "tailed", "type": "message", "payload": PAYLOAD})
    times, acks = [], []
    for _ in range(TAILED):
        started = time.perf_counter()
        connection.post(APPEND, body)
        acks.append(1e3 * (time.perf_counter() - started))
        seen = b""
        while b'"result"' not in seen:
            seen += tail.recv(65_536)
        times.append(1e3 * (time.perf_counter() - started))
        time.sleep(0.005)
    print(f"append to tail: {_spread(times)} ms; to the answer: {_spread(acks)} ms")


def _tails(server: Served) -> None:
    """1,000 tails of one log that are opened, told one event, and dropped; three times."""
    connection = Connection(server.port)
    body = orjson.dumps({"namespace": "tailed", "type": "message"})
    connection.post(APPEND, body)
    for _ in range(ROUNDS):
        before = server.connections("front")
        started = time.perf_counter()
        tails = [_open_tail(server) for _ in range(TAILS)]
        opened = time.perf_counter() - started
        started = time.perf_counter()
        connection.post(APPEND, body)
        for tail in tails:
            seen = b""
            while b'"result"' not in seen:
                seen += tail.recv(65_536)
        told = time.perf_counter() - started
        held = server.cost("front").rss_mib
        assert server.connections("front") >= before + TAILS
        for tail in tails:
            tail.close()
        started = time.perf_counter()
        while server.connections("front") > before:
            assert time.perf_counter() - started < 30, "tails that were dropped are still there"
            time.sleep(0.1)
        gone = time.perf_counter() - started
        print(
            f"{TAILS:,} tails opened in {opened:.1f} s, told in {told:.2f} s, gone after "
            f"{gone:.1f} s; front {held:.0f} MiB with them, "
            f"{server.cost('front').rss_mib:.0f} without"
        )
    until = time.perf_counter() + 30
    while any(server.metric("ray_mindd_tail_subscribers")):
        assert time.perf_counter() < until, "the gauge is not back to 0"
        time.sleep(1)
    print("the gauge is 0")


def _open_tail(server: Served) -> socket.socket:
    tail = socket.create_connection(("127.0.0.1", server.port), 20)
    tail.sendall(_request(TAIL, {"namespace": "tailed"}))
    assert b" 200 " in tail.recv(65_536)
    return tail


def _lines(server: Served, path: str, body: Mapping[str, object]) -> tuple[int, int]:
    """Return how many lines a stream has, and its bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, orjson.dumps(body), headers)
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    assert answer.status == 200, read
    assert b'{"error"' not in read, read[-500:]
    return read.count(b"\n"), len(read)


def _request(path: str, body: Mapping[str, object]) -> bytes:
    content = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _spread(times: list[float]) -> str:
    every = sorted(times)
    return f"p50 {every[len(every) // 2]:.1f}, p99 {every[int(len(every) * 0.99)]:.1f}"


_TABLES = """
create table cursors(ns int primary key, next bigint not null);
create table events(ns int, seq bigint, type text, role text, payload bytea, primary key(ns, seq));
insert into cursors select n, 0 from generate_series(0, 63) n;
"""
_APPEND_SQL = """\\set ns random(0, {last})
with c as (update cursors set next = next + 1 where ns = :ns returning next)
insert into events select :ns, next, 'message', 'tool', decode('{payload}', 'base64') from c
returning seq;
"""
_APPEND_ONE = """
with c as (update cursors set next = next + 1 where ns = $1 returning next)
insert into events select $1, next, 'message', 'tool', $2 from c returning seq
"""


@contextmanager
def _postgres() -> Iterator[Path | None]:
    """Yield the folder of a running PostgreSQL, reached by a socket in it; None without one."""
    if not all(map(shutil.which, ("initdb", "postgres", "pgbench", "psql"))):
        print("PostgreSQL is not installed: no peer")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mindgrid-pg-") as name:
        folder = Path(name)
        if os.geteuid() == 0:
            # It refuses to run as root.
            shutil.chown(folder, "postgres")
        data = str(folder / "data")
        _as_postgres("initdb", "-D", data, "-A", "trust", "-U", "postgres")
        options = ["-D", data, "-k", name, "-c", "listen_addresses="]
        child = subprocess.Popen([*_user(), "postgres", *options], stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                if (folder / ".s.PGSQL.5432").exists():
                    break
                time.sleep(0.1)
            subprocess.run(
                ["psql", "-q", "-h", name, "-U", "postgres"],
                input=_TABLES,
                text=True,
                check=True,
            )
            yield folder
        finally:
            _as_postgres("pg_ctl", "-D", data, "-m", "fast", "stop")
            child.wait(30)


def _pgbench(folder: Path, clients: int, namespaces: int) -> float:
    script = folder / f"append-{namespaces}.sql"
    script.write_text(_APPEND_SQL.format(last=namespaces - 1, payload=PAYLOAD))
    counts = ["-n", "-c", str(clients), "-j", "1", "-T", str(SECONDS), "-M", "prepared"]
    command = [
        "pgbench",
        "-h",
        str(folder),
        "-U",
        "postgres",
        *counts,
        "-f",
        str(script),
        "postgres",
    ]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in said.splitlines() if line.startswith("tps ="))
    return float(line.split()[2])


def _asyncpg(folder: Path, clients: int, namespaces: int) -> float:
    async def ask() -> int:
        pool = await asyncpg.create_pool(
            host=str(folder), user="postgres", min_size=clients, max_size=clients
        )
        payload, counts = base64.b64decode(PAYLOAD), [0] * clients
        until = time.perf_counter() + SECONDS

        async def client(n: int) -> None:
            while time.perf_counter() < until:
                namespace = random.randrange(namespaces)
                await pool.fetchval(_APPEND_ONE, namespace, payload)
                counts[n] += 1

        await asyncio.gather(*map(client, range(clients)))
        await pool.close()
        return sum(counts)

    return asyncio.run(ask()) / SECONDS


def _user() -> list[str]:
    return ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []


def _as_postgres(*command: str) -> None:
    subprocess.run([*_user(), *command], check=True, stdout=subprocess.DEVNULL)


PEERS = {"pgbench": _pgbench, "asyncpg": _asyncpg}
SECTIONS = {
    "append": _append,
    "batch": _batch,
    "replay": _replay,
    "session": _session,
    "open": _open,
    "tail": _tail,
    "tails": _tails,
}

if __name__ == "__main__":
    main()
