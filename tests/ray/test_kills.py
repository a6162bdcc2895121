"""A real server over HTTP: it refuses what is bad, and loses nothing to whatever is killed.

One server serves all claims, since it takes longer to start than most of them to test.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
from tests.support.servers import SEMANTIC, Json, KillableServer, Refused, eventually

from mindgrid.cluster.spec import NamespaceKey, shard_folder

pytestmark = pytest.mark.ray

WRITERS = 8
RECORDS = 4
"""Of each writer, written again and again."""
ROUNDS = 2
SOAK_ROUNDS = 20
BODY_BYTES_MAX = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    started = KillableServer(
        tmp_path_factory.mktemp("server"),
        {"kept": 2, "damaged": 2, "refused": 1, "facts": 5},
        hosts=2,
    )
    try:
        started.start()
        yield started
    finally:
        started.close()


# What bad input gets


def refused(server: KillableServer, method: str, body: Json | bytes) -> Refused:
    """Return the refusal of a request, after checking that the server goes on."""
    with pytest.raises(Refused) as refusal:
        server.call(method, body, "refused")
    record = {"id": "good", "vector": [1.0] * 8}
    assert server.call("Upsert", {"records": [record]}, "refused")["ids"] == ["good"]
    return refusal.value


def upsert(**record: object) -> Json:
    return {"records": [{"id": "bad", **record}]}


def spelled(value: str) -> bytes:
    """Return an upsert with a number that Python would not spell."""
    vector = ", ".join([value, *["1"] * 7])
    record = f'{{"id": "bad", "vector": [{vector}]}}'
    return f'{{"namespace": "refused", "records": [{record}]}}'.encode()


REFUSED: dict[str, tuple[str, Json | bytes, str]] = {
    "no JSON": ("Upsert", b'{"namespace": "refused", "records": [', ""),
    "no object": ("Upsert", b"[]", ""),
    "no UTF-8": ("Upsert", b'{"namespace": "\xff"}', ""),
    "an unknown field": ("Upsert", {"recordz": []}, "recordz"),
    "an unknown field of a record": ("Upsert", upsert(contentt="a"), "contentt"),
    "a wrong type": ("Upsert", upsert(content=7), "content"),
    "a short vector": ("Upsert", upsert(vector=[1.0] * 7), "7 values.*8 dimensions"),
    "a long vector": ("Upsert", upsert(vector=[1.0] * 9), "9 values.*8 dimensions"),
    "a long query vector": ("Search", {"queryVector": [1.0] * 9}, "9 values.*8 dimensions"),
    "NaN": ("Upsert", upsert(vector=["NaN", *[1.0] * 7]), r"records\[0\]\.vector"),
    "infinity": ("Upsert", upsert(vector=[*[1.0] * 7, "-Infinity"]), r"records\[0\]\.vector"),
    "a bare NaN": ("Upsert", spelled("NaN"), ""),
    "a bare Infinity": ("Upsert", spelled("Infinity"), ""),
    "a zero vector": ("Upsert", upsert(vector=[0.0] * 8), "all zeros"),
    "a zero query vector": ("Search", {"queryVector": [0.0] * 8}, "all zeros"),
    "more than float32": ("Upsert", upsert(vector=[1e39, *[1.0] * 7]), "float32"),
    "more than float64": ("Upsert", spelled("1e999"), ""),
    "a long id": ("Upsert", {"records": [{"id": "ü" * 257, "content": "a"}]}, "512"),
    "a lone surrogate": ("Upsert", b'{"namespace": "refused", "records": [{"id": "\\ud800"}]}', ""),
    "an empty record": ("Upsert", {"records": [{}]}, "content or vector"),
    "neither text nor vector": ("Search", {}, "query_text"),
    "both text and vector": ("Search", {"queryText": "a", "queryVector": [1.0] * 8}, "not both"),
    "a negative top_k": ("Search", {"queryText": "a", "topK": -1}, ""),
    "a huge top_k": ("Search", {"queryText": "a", "topK": 10_001}, "10000"),
    "no id": ("Delete", {}, "id"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_by_name_and_writes_nothing(server: KillableServer, what: str) -> None:
    method, body, words = REFUSED[what]
    answer = refused(server, method, body)
    assert (answer.http, answer.code) == (400, 3), answer
    assert answer.message
    assert "Traceback" not in answer.message
    found = server.call("Search", {"queryVector": [1.0] * 8, "idsOnly": True}, "refused")
    assert [hit["record"]["id"] for hit in found["hits"]] == ["good"]
    assert re.search(words, answer.message), answer.message


def test_an_unknown_namespace_is_named(server: KillableServer) -> None:
    for method, body in (("Upsert", upsert(content="a")), ("Search", {"queryText": "a"})):
        with pytest.raises(Refused) as refusal:
            server.call(method, body, "nowhere")
        assert (refusal.value.http, refusal.value.code) == (404, 5)
        assert "nowhere" in refusal.value.message


def test_a_declared_body_over_the_limit_is_refused(server: KillableServer) -> None:
    body = json.dumps({"namespace": "refused", **upsert(content="a" * BODY_BYTES_MAX)}).encode()
    answer = refused(server, "Upsert", body)
    assert (answer.http, answer.code) == (413, 8)
    assert f"{len(body)} bytes is over the limit of {BODY_BYTES_MAX} bytes" in answer.message


def test_a_chunked_body_over_the_limit_is_refused(server: KillableServer) -> None:
    chunk = b"a" * (1 << 16)
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        head = f"POST {SEMANTIC}/Upsert HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(BODY_BYTES_MAX // len(chunk) + 2):
            connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        connection.sendall(b"0\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        answer = json.loads(response.read())
    assert (response.status, answer["code"]) == (413, 8)
    assert str(BODY_BYTES_MAX) in answer["message"]


# What is killed


@dataclass
class Writes:
    """What one record was told: acknowledged versions, and how many attempts had no answer."""

    acknowledged: int = 0
    contents: dict[int, str] = field(default_factory=dict)
    """Of each version that was acknowledged, and of those that may have been written."""
    unanswered: list[str] = field(default_factory=list)
    """Contents written since the last acknowledgement, of which some may be there."""


class Writers:
    """Eight threads that each write their records again and again, one a request."""

    def __init__(self, server: KillableServer, name: str) -> None:
        self._server = server
        self._name = name
        self._stop = threading.Event()
        self.records: dict[str, Writes] = {}
        self.acknowledged = [0] * WRITERS
        self.refusals: list[str] = []

    def run(self, kill: Callable[[], None]) -> None:
        """Write, `kill` in the midst of it, and write on until it is back."""
        with ThreadPoolExecutor(WRITERS) as pool:
            running = [pool.submit(self._write, at) for at in range(WRITERS)]
            try:
                self._wait_for_more(12)
                kill()
                self._wait_for_more(12)
            finally:
                self._stop.set()
            for one in running:
                one.result()

    def _wait_for_more(self, count: int) -> None:
        wanted = [done + count for done in self.acknowledged]
        eventually(lambda: all(d >= w for d, w in zip(self.acknowledged, wanted, strict=True)))

    def _write(self, at: int) -> None:
        step = 0
        while not self._stop.is_set():
            step += 1
            id = f"{self._name}-{at}-{step % RECORDS}"
            writes = self.records.setdefault(id, Writes())
            content = f"{id} step {step}"
            record = {"id": id, "content": content, "metadata": {"who": id}}
            try:
                answer = self._server.call("Upsert", {"records": [record]})
            except ConnectionRefusedError:
                time.sleep(0.05)  # nobody has seen it
            except (OSError, http.client.HTTPException, Refused) as error:
                # It may have been written, or may even be written later.
                writes.unanswered.append(content)
                self.refusals.append(str(error))
                time.sleep(0.05)
            else:
                (version,) = answer["versions"]
                version = int(version)
                between = version - writes.acknowledged - 1
                assert 0 <= between <= len(writes.unanswered), f"{id}: {version} after {writes}"
                writes.acknowledged, writes.unanswered = version, []
                writes.contents[version] = content
                self.acknowledged[at] += 1

    def check(self) -> None:
        """Check that every record is there once, as it was last acknowledged or written since."""
        for id, writes in self.records.items():
            if not writes.acknowledged and not writes.unanswered:
                continue
            found = self._server.call("Search", {"queryText": id, "filter": {"who": id}})
            hits = found.get("hits", [])
            if not hits:
                assert not writes.acknowledged, f"{id} is lost: {writes}"
                continue
            (hit,) = hits
            version, content = int(hit["record"]["version"]), hit["record"]["content"]
            if version == writes.acknowledged:
                assert content == writes.contents[version], f"{id}: {hit} after {writes}"
            else:
                more = version - writes.acknowledged
                assert 0 < more <= len(writes.unanswered), f"{id}: {hit} after {writes}"
                assert content in writes.unanswered, f"{id}: {hit} after {writes}"
        print(f"{sum(self.acknowledged)} writes; refused meanwhile: {len(self.refusals)}")


def kill_host(server: KillableServer) -> None:
    server.kill("ray::Host")


def kill_coordinator(server: KillableServer) -> None:
    server.kill("ray::Coord")


def kill_raylet(server: KillableServer) -> None:
    server.kill_head("raylet")


def kill_gcs(server: KillableServer) -> None:
    server.kill_head("gcs_server")


class Revisers:
    """Threads that replace a fact by the next one, in another shard, beside threads that read.

    A reader must always find exactly one fact of a chain: never the new one beside the old one it
    supersedes, and never neither.
    """

    def __init__(self, server: KillableServer, name: str) -> None:
        self._server = server
        self._name = name
        self._stop = threading.Event()
        self.revised = [0] * WRITERS
        self.reads = self.refused = 0

    def run(self, seconds: float, kills: Sequence[Callable[[KillableServer], None]]) -> None:
        """Write and read, and kill by turns in the midst of it."""
        with ThreadPoolExecutor(2 * WRITERS) as pool:
            for chain in range(WRITERS):
                self._revise(chain, 0)
            running = [pool.submit(self._write, chain) for chain in range(WRITERS)]
            running += [pool.submit(self._read, chain) for chain in range(WRITERS)]
            try:
                for kill in kills:
                    time.sleep(seconds / (len(kills) + 1))
                    kill(self._server)
                time.sleep(seconds / (len(kills) + 1))
                wanted = [done + 3 for done in self.revised]
                eventually(lambda: all(d >= w for d, w in zip(self.revised, wanted, strict=True)))
            finally:
                self._stop.set()
            for one in running:
                one.result()
        for chain in range(WRITERS):
            assert self._facts(chain) == [self._fact(chain, self.revised[chain])]
        print(f"{sum(self.revised)} revisions, {self.reads} reads; refused: {self.refused}")

    def _fact(self, chain: int, number: int) -> str:
        return f"{self._name}-{chain}-{number}"

    def _revise(self, chain: int, number: int) -> None:
        fact = {
            "id": self._fact(chain, number),
            "content": "a fact",
            "metadata": {"chain": f"{self._name}-{chain}"},
            "supersedes": [self._fact(chain, number - 1)] if number else [],
            "ifVersion": 0,
        }
        body: Json = {"records": [fact], "transactionId": self._fact(chain, number)}
        while True:
            try:
                answer = self._server.call("Upsert", body, "facts")
            except (OSError, http.client.HTTPException, Refused) as error:
                self._note(error)
            else:
                assert answer["versions"] == ["1"]
                self.revised[chain] = number
                return

    def _write(self, chain: int) -> None:
        while not self._stop.is_set():
            self._revise(chain, self.revised[chain] + 1)

    def _read(self, chain: int) -> None:
        while not self._stop.is_set():
            at_least = self.revised[chain]
            try:
                facts = self._facts(chain)
            except (OSError, http.client.HTTPException, Refused) as error:
                self._note(error)
                continue
            self.reads += 1
            assert len(facts) == 1, f"chain {chain} shows {facts}"
            assert int(facts[0].rsplit("-", 1)[1]) >= at_least, f"{facts} after {at_least}"

    def _facts(self, chain: int) -> list[str]:
        wanted = {"queryText": "a fact", "filter": {"chain": f"{self._name}-{chain}"}}
        found = self._server.call("Search", {**wanted, "topK": 10, "idsOnly": True}, "facts")
        return [hit["record"]["id"] for hit in found.get("hits", [])]

    def _note(self, error: Exception) -> None:
        """Count what no answer was; one that says anything but to try again is a failure."""
        if isinstance(error, Refused) and error.code not in (4, 14):
            raise error
        self.refused += 1
        time.sleep(0.05)


KILLS = {
    "host": (kill_host, kill_host),
    "coordinator": (kill_coordinator, kill_coordinator),
    "head": (kill_raylet, kill_gcs),
    "server": (KillableServer.kill_and_start,) * 2,
}


def survive(server: KillableServer, what: str, rounds: int) -> None:
    kills = KILLS[what]
    every: list[Writers] = []
    for round_ in range(rounds):
        started = time.monotonic()
        writers = Writers(server, f"{what}-{rounds}-{round_}")
        kill = kills[round_ % len(kills)]
        writers.run(partial(kill, server))
        every.append(writers)
        for one in every:
            one.check()
        print(f"{kill.__name__}: {time.monotonic() - started:.1f} s")


@pytest.mark.parametrize("what", ["host", "coordinator", "head"])
def test_writers_under_a_kill_lose_nothing_and_write_nothing_twice(
    server: KillableServer, what: str
) -> None:
    survive(server, what, ROUNDS)


def test_no_reader_sees_a_fact_beside_the_one_it_supersedes_nor_neither(
    server: KillableServer,
) -> None:
    Revisers(server, "quick").run(6, [kill_host, kill_coordinator])


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_no_reader_sees_both_or_neither_for_a_minute_of_kills(server: KillableServer) -> None:
    Revisers(server, "long").run(60, [kill_host, kill_coordinator] * 4)


def test_a_server_killed_whole_loses_nothing_and_names_the_shard_that_was_damaged_meanwhile(
    server: KillableServer,
) -> None:
    records = [{"id": f"d{n}", "content": f"text {n}"} for n in range(200)]
    server.call("Upsert", {"records": records}, "damaged")
    folder = shard_folder(server.storage, NamespaceKey("semantic", "damaged"), 1, 1)
    eventually(lambda: any(folder.glob("segment-*/vectors.f32")))
    survive(server, "server", ROUNDS - 1)

    def kill_and_damage() -> None:
        server.kill_all()
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        server.start()

    damaged = sorted(folder.glob("segment-*/vectors.f32"))[0]
    writers = Writers(server, "damage")
    writers.run(kill_and_damage)
    writers.check()
    for method, body in (("Search", {"queryText": "text 7"}), ("Upsert", {"records": records})):
        with pytest.raises(Refused) as refusal:
            server.call(method, body, "damaged")
        assert (refusal.value.http, refusal.value.code) == (500, 15), refusal.value
        assert str(damaged) in refusal.value.message
    for namespace in ("refused", "kept"):
        server.call("Upsert", {"records": [{"id": "more", "content": "more"}]}, namespace)
        found = server.call("Search", {"queryText": "more"}, namespace)
        assert found["hits"][0]["record"]["id"] == "more"


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("what", KILLS)
def test_writers_under_many_kills_lose_nothing(server: KillableServer, what: str) -> None:
    survive(server, what, SOAK_ROUNDS)
