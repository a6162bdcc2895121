"""Clients that ask a server as fast as it answers: wrk where it is installed, else bare sockets.

An HTTP library would be what is measured: httpx ends at 1,200 requests/s. Clients run in processes
of their own, since they would share the interpreter's lock with whoever measures.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SEARCH = "/mindd.semantic.v1.Semantic/Search"
UPSERT = "/mindd.semantic.v1.Semantic/Upsert"


class Refused(Exception):
    """The server answered with another status than 200."""


class Connection:
    """One connection that is kept; one request at a time."""

    def __init__(self, port: int) -> None:
        """Connect to a server on this machine."""
        self._socket = socket.create_connection(("127.0.0.1", port), 600)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def post(self, path: str, body: bytes) -> bytes:
        """Return the body of the answer; raises Refused, and OSError if the server leaves."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        answer_head = self._read_until(b"\r\n\r\n").lower()
        length = int(answer_head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = self._read(length)
        if not answer_head.startswith(b"http/1.1 200"):
            raise Refused(answer.decode(errors="replace"))
        return answer

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def _read_until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._receive()
        found, _, self._buffer = self._buffer.partition(end)
        return found

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._receive()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _receive(self) -> None:
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise ConnectionError("the server closed the connection")
        self._buffer += chunk


def search(connection: Connection, body: dict[str, object]) -> list[tuple[str, float]]:
    """Return ids and scores of a search's hits."""
    answer = json.loads(connection.post(SEARCH, json.dumps(body).encode()))
    return [(hit["record"]["id"], hit["score"]) for hit in answer.get("hits", [])]


@dataclass(frozen=True, slots=True)
class Rate:
    """What closed loops reached: answers a second, and the latencies of all in ms."""

    each_s: float
    p50_ms: float
    p99_ms: float
    answers: int


@dataclass(frozen=True, slots=True)
class Drive:
    """So many clients that ask in turn with these bodies, for some seconds."""

    port: int
    path: str
    bodies: Sequence[bytes]
    clients: int
    seconds: float


def drive(plan: Drive) -> Rate:
    """Ask as fast as the answers come; raises Refused if any is not a 200."""
    return _wrk(plan) if shutil.which("wrk") else in_process(_sockets, plan)


def tool() -> str:
    """Return what `drive` asks with."""
    return "wrk" if shutil.which("wrk") else "bare sockets"


_LUA = """\
local requests, at = {}, 0
init = function()
  for body in io.lines("%s") do
    requests[#requests + 1] =
      wrk.format("POST", nil, {["Content-Type"] = "application/json"}, body)
  end
end
request = function()
  at = at %% #requests + 1
  return requests[at]
end
done = function(summary, latency)
  local e = summary.errors
  io.write(string.format("RESULT %%d %%f %%f %%f %%d\\n", summary.requests,
    summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def _wrk(plan: Drive) -> Rate:
    with tempfile.TemporaryDirectory() as name:
        bodies, script = Path(name) / "bodies", Path(name) / "ask.lua"
        bodies.write_bytes(b"\n".join(plan.bodies))
        script.write_text(_LUA % bodies)
        url = f"http://127.0.0.1:{plan.port}{plan.path}"
        counts = ["-t1", f"-c{plan.clients}", f"-d{plan.seconds:.0f}s", "--timeout", "30s"]
        command = ["wrk", *counts, "-s", str(script), url]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    answers, seconds, p50, p99, errors = said.partition("RESULT ")[2].split()
    if int(errors):
        raise Refused(said)
    return Rate(int(answers) / float(seconds), float(p50), float(p99), int(answers))


def _sockets(plan: Drive) -> Rate:
    times: list[list[float]] = [[] for _ in range(plan.clients)]
    end = time.perf_counter() + plan.seconds

    def client(number: int) -> None:
        connection = Connection(plan.port)
        at = number
        while (start := time.perf_counter()) < end:
            connection.post(plan.path, plan.bodies[at % len(plan.bodies)])
            times[number].append(1e3 * (time.perf_counter() - start))
            at += plan.clients
        connection.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(plan.clients) as pool:
        list(pool.map(client, range(plan.clients)))
    seconds = time.perf_counter() - started
    every = sorted(chain.from_iterable(times))
    p50, p99 = (every[int(len(every) * share)] for share in (0.5, 0.99))
    return Rate(len(every) / seconds, p50, p99, len(every))


def send_all(port: int, path: str, bodies: Sequence[bytes], clients: int) -> float:
    """Post every body once, over so many connections; return the seconds that took."""
    left = iter(bodies)
    guard = threading.Lock()

    def client(_: int) -> None:
        connection = Connection(port)
        while True:
            with guard:
                body = next(left, None)
            if body is None:
                return connection.close()
            connection.post(path, body)

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return time.perf_counter() - started


def in_process(work: Callable[..., T], *arguments: object) -> T:
    """Return what `work` returns, called in a process of its own."""
    return start_in_process(work, *arguments).result()


def start_in_process(work: Callable[..., T], *arguments: object) -> Future[T]:
    """Call `work` in a process of its own; the future ends with its result or error."""
    ours, theirs = multiprocessing.Pipe()
    # Not forked: a fork of a process with Ray's threads may hang.
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_run, args=(theirs, work, arguments), daemon=True)
    child.start()
    theirs.close()
    future: Future[T] = Future()

    def wait() -> None:
        try:
            result = ours.recv()
        except EOFError:
            result = RuntimeError(f"the client process ended with {child.exitcode}")
        child.join()
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    threading.Thread(target=wait, daemon=True).start()
    return future


def _run(pipe: Pipe, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        pipe.send(work(*arguments))
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
