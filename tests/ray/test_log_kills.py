"""A log whose writers, tails and readers lose nothing to whatever is killed, and see no gap.

Over HTTP against a real server. What each client was told is kept, and compared with the log that
is there at the end.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from random import Random

import pytest
from tests.support.log_callers import EPISODIC, EVENTS
from tests.support.log_history import (
    Attempt,
    Entry,
    Followed,
    Read,
    check_attempts,
    check_log,
    check_read,
    check_tail,
)
from tests.support.servers import SILENCE_MAX_S, WAIT_S, Json, KillableServer, Refused, eventually

pytestmark = pytest.mark.ray

WRITERS, TAILS, READERS = 16, 8, 4
FAILED_PRECONDITION = 9
AGAIN = (4, 14)
"""The codes of what may be asked again: DEADLINE_EXCEEDED, UNAVAILABLE."""
IDLE_S = 20.0
"""A tail says at least every 15 s that it is still there."""
END = "end"
"""The name of the last event."""
PATIENCE_S = (WAIT_S, WAIT_S, WAIT_S, 0.03)
"""How long a writer waits for an answer; some hang up too early to know."""
BROKEN = (OSError, http.client.HTTPException)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    logs = ["quick", "long", "whole"]
    started = KillableServer(tmp_path_factory.mktemp("server"), hosts=2, logs=logs)
    try:
        started.start()
        yield started
    finally:
        started.close()


def entry(event: Json) -> Entry:
    """Return what the wire says of an event."""
    name = base64.b64decode(event["payload"]).decode()
    return Entry(
        int(event["cursor"]), event["id"], event["timestamp"], name, event.get("sessionId", "")
    )


class Clients:
    """Threads that write, follow and read one log, and what they were told."""

    def __init__(self, server: KillableServer, namespace: str) -> None:
        self._server = server
        self._namespace = namespace
        self._stop = threading.Event()
        self._edge = 0
        self.attempts: list[list[Attempt]] = [[] for _ in range(WRITERS)]
        self.tails: list[Followed] = []
        self.reads: list[Read] = []
        self.interruptions = self.kills = 0

    def run(self, kills: Iterator[Callable[[], object]], seconds: float) -> None:
        """Go on for so long and kill by turns; return once every tail is at the end."""
        with ThreadPoolExecutor(WRITERS + TAILS + READERS) as pool:
            writers = [pool.submit(self._write, at) for at in range(WRITERS)]
            others = [pool.submit(self._follow, n) for n in range(TAILS)]
            others += [pool.submit(self._read, n) for n in range(READERS)]
            try:
                self._kill(kills, time.monotonic() + seconds, [*writers, *others])
            finally:
                self._stop.set()
                for one in writers:
                    one.exception()
                self._append(self.attempts[0], END, Random())
            for one in (*writers, *others):
                one.result()

    def check(self) -> None:
        """Compare what all were told with the log."""
        log = self._range({})
        attempts = [attempt for some in self.attempts for attempt in some]
        check_log(log)
        check_attempts(log, attempts)
        for tail in self.tails:
            check_tail(log, tail, attempts)
        for read in self.reads:
            check_read(log, read)
        answered = sum(bool(attempt.acknowledged) for attempt in attempts)
        print(
            f"{len(log)} events; {answered} of {len(attempts)} appends answered, "
            f"{sum(len(attempt.repeats) for attempt in attempts)} of them again; "
            f"{sum(attempt.refused for attempt in attempts)} refused; "
            f"tails resumed {sum(tail.resumed for tail in self.tails)} times; "
            f"{len(self.reads)} ranges; {self.interruptions} calls interrupted; "
            f"{self.kills} kills"
        )
        # A quiet history would show nothing.
        assert self.kills > 2
        assert len(self.tails) == TAILS
        assert all(len(some) > 5 for some in self.attempts)
        assert self.interruptions
        assert len(self.reads) > READERS
        assert any(attempt.repeats for attempt in attempts)
        assert any(tail.resumed for tail in self.tails)

    def _kill(
        self, kills: Iterator[Callable[[], object]], end: float, running: Sequence[Future[None]]
    ) -> None:
        random = Random(7)
        while time.monotonic() < end and not any(one.done() for one in running):
            time.sleep(random.uniform(1.0, 4.0))
            next(kills)()
            self.kills += 1
        wanted = [len(some) + 3 for some in self.attempts]
        eventually(
            lambda: (
                all(len(s) >= w for s, w in zip(self.attempts, wanted, strict=True))
                or any(one.done() for one in running)
            )
        )

    def _write(self, at: int) -> None:
        random = Random(at)
        mine = self.attempts[at]
        while not self._stop.is_set():
            name = f"{at}-{len(mine)}"
            kind = random.randrange(10)
            if kind < 6:
                self._append(mine, name, random)
            elif kind < 8:
                self._append_many(mine, name, random)
            elif kind < 9:
                self._append_once(mine, name, random)
            else:
                self._append_once(mine, name, random, self._edge)

    def _append(self, mine: list[Attempt], name: str, random: Random) -> None:
        """Append with a dedup key until it is answered, and then perhaps once more."""
        attempt = Attempt((name,), time.monotonic())
        mine.append(attempt)
        body = {**self._event(name), "dedupKey": name}
        answer = self._until_answered("Append", body, random)
        attempt.acknowledged = self._acknowledged([answer["event"]])
        if random.random() < 0.25:
            repeat = self._until_answered("Append", body, random)
            attempt.repeats.append(self._acknowledged([repeat["event"]]))

    def _append_many(self, mine: list[Attempt], name: str, random: Random) -> None:
        """Append a batch under a transaction id until it is answered."""
        names = tuple(f"{name}.{n}" for n in range(random.randint(2, 5)))
        attempt = Attempt(names, time.monotonic())
        mine.append(attempt)
        body = {
            "events": [self._event(name) for name in names],
            "transactionId": name,
            "includePayload": True,
        }
        answer = self._until_answered("AppendBatch", body, random)
        attempt.acknowledged = self._acknowledged(answer["events"])

    def _append_once(
        self, mine: list[Attempt], name: str, random: Random, expected: int | None = None
    ) -> None:
        """Append without a key, so only once."""
        attempt = Attempt((name,), time.monotonic(), expected)
        mine.append(attempt)
        body = self._event(name)
        if expected is not None:
            body["expectedCursor"] = str(expected)
        with self._passing():
            try:
                answer = self._call("Append", body, random.choice(PATIENCE_S))
            except ConnectionRefusedError:
                attempt.refused = True
            except Refused as refusal:
                if refusal.code != FAILED_PRECONDITION or expected is None:
                    raise
                attempt.refused = True
            else:
                attempt.acknowledged = self._acknowledged([answer["event"]])

    def _until_answered(self, method: str, body: Json, random: Random) -> Json:
        while True:
            with self._passing():
                return self._call(method, body, random.choice(PATIENCE_S))

    def _follow(self, at: int) -> None:
        """Follow the log to its end over as many connections as it takes, and some more."""
        random = Random(at)
        historical = at % 2 == 0
        tail: Followed | None = None
        while tail is None or not tail.seen or tail.seen[-1].name != END:
            edge = self._edge
            body: Json = {"namespace": self._namespace}
            if historical or (tail and tail.seen):
                after = tail.seen[-1].cursor if tail and tail.seen else 0
                body.update(includeHistorical=True, afterCursor=str(after))
            with self._passing(), self._server.stream(f"{EPISODIC}/Tail", body, IDLE_S) as lines:
                if tail is None or not tail.seen:
                    tail = self._begun(tail, Followed(historical, time.monotonic(), edge))
                else:
                    tail.resumed += 1
                self._take(lines, tail, random.randint(1, 2_000))

    def _begun(self, before: Followed | None, tail: Followed) -> Followed:
        """Put a tail in the place of one that saw nothing."""
        if before is not None:
            self.tails.remove(before)
        self.tails.append(tail)
        return tail

    def _take(self, lines: Iterator[bytes], tail: Followed, count: int) -> None:
        """Take so many lines, or fewer where it breaks off."""
        for line in islice(lines, count):
            if not line.endswith(b"\n"):
                return  # broken off
            if line == b"\n":
                continue
            event = self._result(line)
            tail.seen.append(entry(event))
            if tail.seen[-1].name == END:
                return

    def _read(self, at: int) -> None:
        random = Random(at)
        while not self._stop.is_set():
            edge = self._edge
            after = random.choice([0, random.randint(0, edge + 5), max(0, edge - 20)])
            before = random.choice([0, 0, after + random.randint(1, 60)])
            limit = random.choice([0, 0, random.randint(1, 40)])
            session = random.choice(["", f"writer {random.randrange(WRITERS)}"])
            reverse = random.random() < 0.3
            bounds = {
                "afterCursor": str(after),
                "beforeCursor": str(before),
                "limit": limit,
                "reverse": reverse,
                "sessionId": session,
            }
            with self._passing():
                answer = self._range(bounds)
                self.reads.append(Read(after, before, limit, reverse, session, edge, answer))

    def _range(self, bounds: Json) -> tuple[Entry, ...]:
        body = json.dumps({"namespace": self._namespace, **bounds}).encode()
        status, answer = self._server.ask("POST", f"{EPISODIC}/Range", body)
        if status != 200:
            raise Refused(status, 14, answer.decode())
        return tuple(entry(self._result(line)) for line in answer.split(b"\n") if line)

    def _result(self, line: bytes) -> Json:
        part: Json = json.loads(line)
        if "error" in part:
            raise Refused(200, part["error"]["code"], part["error"]["message"])
        event: Json = part["result"]
        return event

    def _event(self, name: str) -> Json:
        payload = base64.b64encode(name.encode()).decode()
        return {"type": "note", "payload": payload, "sessionId": f"writer {name.split('-')[0]}"}

    def _call(self, method: str, body: Json, wait_s: float) -> Json:
        service = EVENTS if method == "AppendBatch" else EPISODIC
        return self._server.call(method, body, self._namespace, service, wait_s)

    def _acknowledged(self, events: Sequence[Json]) -> tuple[Entry, ...]:
        found = tuple(entry(event) for event in events)
        self._edge = max(self._edge, found[-1].cursor)
        return found

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Let pass what may be asked again, a moment later; all else is a failure."""
        try:
            yield
        except (*BROKEN, Refused) as error:
            if isinstance(error, Refused) and error.code not in AGAIN:
                raise
            self.interruptions += 1
            time.sleep(0.05)


def killing(server: KillableServer) -> Iterator[Callable[[], object]]:
    """Yield kills of a host and of the coordinator, and hosts that fall asleep and wake up.

    One of two sleeps for so long that it is replaced meanwhile.
    """
    host, coordinator = "ray::Host", "ray::Coord"
    return cycle(
        [
            partial(server.kill, host),
            partial(server.pause, host, SILENCE_MAX_S + 2.0),
            partial(server.kill, coordinator),
            partial(server.kill, host),
            partial(server.pause, host, 0.5),
            partial(server.kill, coordinator),
        ]
    )


def killing_more(server: KillableServer) -> Iterator[Callable[[], object]]:
    """Yield kills of what takes the rest of the server along."""
    return cycle(
        [partial(server.kill_head, name) for name in ("raylet", "gcs_server")]
        + [server.kill_and_start]
    )


def survive(
    server: KillableServer, namespace: str, kills: Iterator[Callable[[], object]], seconds: float
) -> None:
    clients = Clients(server, namespace)
    clients.run(kills, seconds)
    clients.check()


def test_half_a_minute_of_kills_loses_no_event_and_leaves_no_gap(server: KillableServer) -> None:
    survive(server, "quick", killing(server), 30.0)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_five_minutes_of_kills_lose_no_event_and_leave_no_gap(server: KillableServer) -> None:
    survive(server, "long", killing(server), 300.0)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_killed_head_and_a_killed_server_lose_no_event(server: KillableServer) -> None:
    survive(server, "whole", killing_more(server), 240.0)
