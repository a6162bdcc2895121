"""Episodic namespaces as HTTP clients see them, whatever keeps them: for claims of the contract.

A claim is a test that takes the fixture `log`: a log that nobody wrote to yet. It runs wherever a
fixture `desk` says which grid answers, as in `callers`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

from mindgrid.api.app import Door
from mindgrid.cluster.client import Grid
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.port import Directory
from mindgrid.cluster.spec import Bounds, GridSpec, LogSpec, NamespaceKey
from mindgrid.shards.config import Driver
from mindgrid.shards.episodic.types import LogConfig
from tests.support.streams import Stream

Json = dict[str, Any]
T = TypeVar("T")
EPISODIC, EVENTS = "/mindd.episodic.v1.Episodic", "/mindgrid.v1.Events"
LOGS = 160
"""Each claim takes a log of its own."""
SMALL = LogConfig(seal_events=64, seal_after_s=1.0, merge_fanout=3, recent_events=64)


def log_specs(driver: Driver) -> tuple[LogSpec, ...]:
    """Return the logs that claims use up."""
    return tuple(
        LogSpec(NamespaceKey("episodic", f"log-{n:03}"), SMALL, driver) for n in range(LOGS)
    )


class Followed:
    """A tail that is open."""

    def __init__(self, runner: asyncio.Runner, stream: Stream) -> None:
        """Take a stream whose answer has begun."""
        self.stream = stream
        self._runner = runner

    def next(self, count: int = 1) -> list[Json]:
        """Return the next events; blank lines are skipped."""
        return [self._event() for _ in range(count)]

    def cursors(self, count: int) -> list[int]:
        """Return the cursors of the next events."""
        return [int(event["cursor"]) for event in self.next(count)]

    def error(self) -> Json:
        """Return the error that ends the stream, whatever comes before it."""
        while True:
            line = self._line()
            assert line is not None, "it ended without an error"
            if b'"error"' in line[:8]:
                error: Json = json.loads(line)["error"]
                assert self._line() is None
                return error

    def is_quiet(self, for_s: float = 0.3) -> bool:
        """Return whether nothing comes for so long."""
        try:
            self._runner.run(self.stream.line(for_s))
        except TimeoutError:
            return True
        return False

    def leave(self) -> None:
        """Hang up."""
        self._runner.run(self.stream.leave())

    def _event(self) -> Json:
        while True:
            line = self._line()
            assert line is not None, "the tail has ended"
            if line:
                event: Json = json.loads(line)["result"]
                return event

    def _line(self) -> bytes | None:
        return self._runner.run(self.stream.line())


class LogCaller:
    """One log. Where an answer is no 200, every method but `ask` and `refused` fails."""

    def __init__(self, desk: Desk, namespace: str) -> None:
        """Speak with the door of `desk`."""
        self.desk = desk
        self.namespace = namespace

    def ask(self, method: str, **body: object) -> httpx2.Response:
        """Return whatever comes back."""
        service = EVENTS if method in ("AppendBatch", "Describe") else EPISODIC
        content = json.dumps({"namespace": self.namespace, **body})
        return self.desk.post(f"{service}/{method}", content)

    def call(self, method: str, **body: object) -> Json:
        """Return the answer to a call."""
        answer = self.ask(method, **body)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found

    def at_once(self, method: str, bodies: list[Json]) -> list[Json]:
        """Return the answers to calls that are all under way at the same time."""
        contents = [json.dumps({"namespace": self.namespace, **body}) for body in bodies]
        answers = self.desk.posts(f"{EPISODIC}/{method}", contents)
        assert all(answer.status_code == 200 for answer in answers)
        return [answer.json() for answer in answers]

    def refused(self, method: str, http: int = 400, code: int = 3, **body: object) -> str:
        """Return in which words a call is refused, with this status and code."""
        answer = self.ask(method, **body)
        assert answer.status_code == http, answer.text
        assert answer.json()["code"] == code, answer.text
        message: str = answer.json()["message"]
        return message

    def append(self, text: str = "hi", **more: object) -> Json:
        """Append one event and return it."""
        event = {"type": "message", "payload": base64.b64encode(text.encode()).decode(), **more}
        stored: Json = self.call("Append", **event)["event"]
        return stored

    def fill(self, count: int, **more: object) -> None:
        """Append so many events, a batch at a time."""
        for start in range(0, count, 1_000):
            size = min(1_000, count - start)
            events = [{"type": "message", **more} for _ in range(size)]
            self.call("AppendBatch", events=events)

    def range(self, **bounds: object) -> list[Json]:
        """Return the events of a range."""
        answer = self.ask("Range", **bounds)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/x-ndjson"
        # Not `splitlines`: it splits at U+2028 and others too, which JSON need not escape.
        return [json.loads(line)["result"] for line in answer.text.split("\n") if line]

    def extent(self) -> tuple[int, int]:
        """Return the oldest cursor that is there, and the newest that was given."""
        told = self.call("Describe")
        return int(told.get("firstCursor", 0)), int(told.get("lastCursor", 0))

    def cursors(self, **bounds: object) -> list[int]:
        """Return the cursors of a range."""
        return [int(event["cursor"]) for event in self.range(**bounds)]

    def expire(self, action: str, max_rows: int = 100, **bounds: object) -> int:
        """Return how many events were touched; `action` is the end of its name."""
        named = f"EXPIRE_ACTION_{action}"
        return int(self.call("Expire", action=named, maxRows=max_rows, **bounds).get("affected", 0))

    def tail(self, **body: object) -> Followed:
        """Follow the log; the live edge is fixed when this returns."""
        return self.desk.stream(f"{EPISODIC}/Tail", {"namespace": self.namespace, **body})

    def replay(self, after: int = 0, **body: object) -> Followed:
        """Follow the log from a cursor."""
        return self.tail(includeHistorical=True, afterCursor=str(after), **body)


class Desk:
    """The door of one grid, in this process; `log` hands out logs that were never used."""

    def __init__(self, runner: asyncio.Runner, grid: Grid) -> None:
        """Take the loop that the grid belongs to."""
        self.runner = runner
        self.grid = grid
        self.door = Door(grid)
        transport = httpx2.ASGITransport(app=self.door, raise_app_exceptions=True)
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://door", timeout=60)
        self._numbers = itertools.count()
        self._streams: list[Followed] = []

    def log(self) -> LogCaller:
        """Return a log of the claim's own."""
        return LogCaller(self, f"log-{next(self._numbers):03}")

    def post(self, path: str, content: str) -> httpx2.Response:
        """Return the whole answer."""
        return self.posts(path, [content])[0]

    def posts(self, path: str, contents: list[str]) -> list[httpx2.Response]:
        """Return the whole answers to calls that are all under way at the same time."""
        headers = {"content-type": "application/json"}

        async def post() -> list[httpx2.Response]:
            calls = (self._http.post(path, content=one, headers=headers) for one in contents)
            return await asyncio.gather(*calls)

        return self.runner.run(post())

    def stream(self, path: str, body: Json) -> Followed:
        """Return a stream that has begun."""

        async def begin() -> Stream:
            stream = Stream(self.door, path, body)
            assert await stream.begun() == 200, await stream.line()
            return stream

        followed = Followed(self.runner, self.runner.run(begin()))
        self._streams.append(followed)
        return followed

    def tails(self, log: LogCaller) -> int:
        """Return how many subscribers the log has."""
        return self.grid.logs.tails.count(NamespaceKey("episodic", log.namespace))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the grid's loop."""
        return self.runner.run(work)

    def close(self) -> None:
        """Hang up all tails, and let go of the connection."""
        for stream in self._streams:
            stream.leave()
        self.runner.run(self._http.aclose())


@contextmanager
def desk_of(runner: asyncio.Runner, directory: Directory) -> Iterator[Desk]:
    """Yield a desk over the grid of a directory."""
    grid = Grid(directory)
    desk = Desk(runner, grid)
    try:
        yield desk
    finally:
        desk.close()
        runner.run(grid.close())


@dataclass(frozen=True, slots=True)
class LocalLogs:
    """A cluster in this process, and the desk over it."""

    cluster: LocalCluster
    desk: Desk


@contextmanager
def local_logs(storage: Path, driver: Driver, hosts: int = 1) -> Iterator[LocalLogs]:
    """Yield logs in this process."""
    bounds = Bounds(deadline_s=10.0, retry_first_s=0.01, retry_most_s=0.1)
    spec = GridSpec(storage, (), hosts, bounds, log_specs(driver))
    with asyncio.Runner() as runner:
        cluster = LocalCluster(spec)
        runner.run(cluster.start())
        try:
            with desk_of(runner, cluster) as desk:
                yield LocalLogs(cluster, desk)
        finally:
            runner.run(cluster.close())


@pytest.fixture
def log(desk: Desk) -> LogCaller:
    """A log that nobody wrote to yet."""
    return desk.log()
