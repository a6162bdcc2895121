"""The door over a fake grid: every refusal's status and words, and no 500 for any bytes at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import httpx2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindgrid.api import openapi
from mindgrid.api.app import Door
from mindgrid.api.wire import status
from mindgrid.cluster.client import Batch
from mindgrid.cluster.logs import Extent
from mindgrid.cluster.tails import Tail
from mindgrid.shards import errors
from mindgrid.shards.clock import Instant
from mindgrid.shards.driver import Found
from mindgrid.shards.episodic.ids import KEY_BYTES, event_id
from mindgrid.shards.episodic.rules import stored
from mindgrid.shards.episodic.types import Appended, Event, EventAction, EventDraft, EventRange
from mindgrid.shards.types import (
    Answer,
    Deleted,
    Draft,
    ExpireAction,
    Expired,
    Fusion,
    FusionMethod,
    Hit,
    Mode,
    Query,
    Record,
    Scan,
    Scanned,
    Selection,
    Upserted,
    Want,
)

T = TypeVar("T")
LIMIT = 4096
SEMANTIC = "/mindd.semantic.v1.Semantic"
NOW = Instant(1_700_000_000_000_000)


class FakeLogs:
    """Logs that nothing was ever written to, and that cannot be followed."""

    async def append(
        self,
        namespace: str,
        drafts: Sequence[EventDraft],
        expected_cursor: int | None = None,
        transaction_id: str = "",
        deadline_s: float | None = None,
        batch: bool = True,
    ) -> Appended:
        key = b"k" * KEY_BYTES
        stored_ = [stored(d, event_id(key, n), n, NOW) for n, d in enumerate(drafts, 1)]
        return Appended(tuple(stored_), NOW)

    async def expire(
        self,
        namespace: str,
        action: EventAction,
        max_rows: int,
        before_cursor: int = 0,
        before_time: Instant | None = None,
        transaction_id: str = "",
    ) -> Expired:
        return Expired(affected=0, committed_at=NOW)

    async def range(
        self, namespace: str, range: EventRange, limit: int = 0
    ) -> AsyncIterator[tuple[Event, ...]]:
        async def none() -> AsyncIterator[tuple[Event, ...]]:
            for part in list[tuple[Event, ...]]():
                yield part

        return none()

    async def describe(self, namespace: str) -> Extent:
        return Extent(1, 0)

    async def tail(self, namespace: str, range: EventRange, historical: bool = False) -> Tail:
        raise errors.NotFound("namespace", namespace)


class FakeGrid:
    """Remembers what it was asked; fails with `error` where there is one."""

    def __init__(self) -> None:
        self.logs = FakeLogs()
        self.forget()

    def forget(self) -> None:
        self.error: BaseException | None = None
        self.drafts: list[Draft] = []
        self.transactions: list[str] = []
        self.queries: list[tuple[str, Query, str]] = []
        self.expired: tuple[str, dict[str, str], ExpireAction, int, str] | None = None
        self.blocked: asyncio.Event | None = None
        self.written = 0
        self.dropped = 0

    async def _begin(self) -> None:
        if self.blocked is not None:
            try:
                await self.blocked.wait()
            except asyncio.CancelledError:
                self.dropped += 1
                raise
        if self.error is not None:
            raise self.error

    async def search(self, namespace: str, query: Query, text: str = "") -> Answer:
        self.queries.append((namespace, query, text))
        await self._begin()
        record = Record(
            id="a",
            content="apple pie",
            vector=np.array([0.1, 1.0], dtype=np.float32),
            payload=b"hi",
            metadata={"topic": "food"},
            created_at=NOW,
            valid_from=NOW,
            valid_to=None,
            deleted_at=None,
            supersedes=(),
            source="",
            version=3,
        )
        hit = Hit("a", 0.5, None if query.want is Want.ID else record)
        return Answer((hit,), NOW, exact=True, scanned=7)

    async def search_batch(self, namespace: str, queries: Sequence[tuple[Query, str]]) -> Batch:
        await self._begin()
        return Batch([await self.search(namespace, *query) for query in queries], NOW)

    async def find(
        self, namespace: str, ids: Sequence[str], want: Want, selection: Selection
    ) -> Found:
        await self._begin()
        return Found((None,) * len(ids), NOW)

    async def page(self, namespace: str, scan: Scan) -> Scanned:
        await self._begin()
        return Scanned((), more=False, count=2, instant=NOW)

    async def upsert(
        self, namespace: str, drafts: Sequence[Draft], transaction_id: str = ""
    ) -> tuple[tuple[str, ...], Upserted]:
        self.drafts += drafts
        self.transactions.append(transaction_id)
        await self._begin()
        self.written += 1
        return tuple(draft.id for draft in drafts), Upserted((1,) * len(drafts), NOW)

    async def delete(
        self, namespace: str, id: str, hard: bool = False, transaction_id: str = ""
    ) -> Deleted:
        await self._begin()
        return Deleted(existed=True, committed_at=NOW)

    async def expire(
        self,
        namespace: str,
        equals: Mapping[str, str],
        action: ExpireAction,
        max_rows: int,
        transaction_id: str = "",
    ) -> Expired:
        await self._begin()
        self.expired = (namespace, dict(equals), action, max_rows, transaction_id)
        return Expired(affected=3, committed_at=NOW)

    async def ready(self) -> None:
        await self._begin()


GRID = FakeGrid()


@pytest.fixture(scope="module")
def door() -> Door:
    # One for all tests, since the OpenAPI document takes a while to make.
    return Door(GRID, LIMIT)


@pytest.fixture
def grid() -> FakeGrid:
    GRID.forget()
    return GRID


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _ask(
    door: Door,
    method: str,
    path: str,
    content: bytes | AsyncIterator[bytes] = b"",
    headers: dict[str, str] | None = None,
) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        # Whatever the application raises would surface here: nothing may.
        transport = httpx2.ASGITransport(app=door, raise_app_exceptions=True)
        async with httpx2.AsyncClient(transport=transport, base_url="http://door") as client:
            sent = {"content-type": "application/json"} if headers is None else headers
            return await client.request(method, path, content=content, headers=sent)

    return _run(ask())


def _post(door: Door, verb: str, body: object) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _ask(door, "POST", f"{SEMANTIC}/{verb}", content)


def _refused(answer: httpx2.Response, http: int, code: int) -> str:
    assert answer.status_code == http, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["code", "message"]
    assert body["code"] == code
    assert "Traceback" not in body["message"]
    message: str = body["message"]
    return message


def test_a_search_answers_in_protobuf_json(door: Door, grid: FakeGrid) -> None:
    answer = _post(
        door,
        "Search",
        {"namespace": "notes", "query_text": "apple", "topK": 2, "include_vector": True},
    )
    assert answer.status_code == 200
    assert answer.json() == {
        "hits": [
            {
                "record": {
                    "id": "a",
                    "content": "apple pie",
                    "payload": "aGk=",
                    "vector": [0.1, 1.0],
                    "metadata": {"topic": "food"},
                    "createdAt": "2023-11-14T22:13:20Z",
                    "validFrom": "2023-11-14T22:13:20Z",
                    "version": "3",
                },
                "score": 0.5,
            }
        ],
        "exact": True,
        "scanned": "7",
    }
    ((namespace, query, text),) = grid.queries
    assert (namespace, text, query.top_k) == ("notes", "apple", 2)
    assert query.want == Want.VALUES | Want.VECTOR


def test_everything_a_search_says_reaches_the_engine(door: Door, grid: FakeGrid) -> None:
    body = {
        "namespace": "notes",
        "queryVector": [0.5, -1],
        "filter": {"a": "b"},
        "predicates": [{"key": "n", "op": "PREDICATE_OP_GTE", "values": ["3"]}],
        "createdAfter": "2024-01-01T00:00:00.5Z",
        "created_before": "2024-01-02T01:00:00+01:00",
        "asOf": "2024-01-03T00:00:00Z",
        "includeInvalidated": True,
        "includePayload": True,
        "exact": True,
    }
    assert _post(door, "Search", body).status_code == 200
    ((_, query, _),) = grid.queries
    assert query.vector.tolist() == [0.5, -1.0]
    assert query.exact
    assert query.want == Want.VALUES | Want.PAYLOAD
    selection = query.selection
    assert selection.equals == {"a": "b"}
    assert [(p.key, p.op.name, p.values) for p in selection.predicates] == [("n", "GTE", ("3",))]
    assert selection.created_after == 1_704_067_200_500_000
    assert selection.created_before == 1_704_153_600_000_000
    assert selection.as_of == 1_704_240_000_000_000
    assert selection.include_invalidated


def test_ids_only_overrides_payload_and_vector(door: Door, grid: FakeGrid) -> None:
    body = {"namespace": "n", "queryText": "a", "idsOnly": True, "includePayload": True}
    assert _post(door, "Search", body).json()["hits"] == [{"record": {"id": "a"}, "score": 0.5}]
    assert grid.queries[0][1].want is Want.ID


def test_an_upsert_answers_ids_and_versions(door: Door, grid: FakeGrid) -> None:
    body = {"namespace": "n", "records": [{"id": "x", "content": "y", "ifVersion": "0"}, {}]}
    answer = _post(door, "Upsert", body).json()
    assert answer["versions"] == ["1", "1"]
    assert answer["ids"] == ["x", ""], "the grid names what has no name, here a fake one"
    assert [draft.if_version for draft in grid.drafts] == [0, None]
    assert len(grid.drafts[0].vector) == 0


def test_a_transaction_id_reaches_the_grid_as_it_is(door: Door, grid: FakeGrid) -> None:
    body = {"namespace": "n", "records": [{"content": "y"}]}
    _post(door, "Upsert", {**body, "transactionId": "t"})
    _post(door, "Upsert", body)
    assert grid.transactions == ["t", ""]


def test_a_delete_says_whether_there_was_one(door: Door, grid: FakeGrid) -> None:
    answer = _post(door, "Delete", {"namespace": "n", "id": "a"})
    assert (answer.status_code, answer.json()) == (200, {"existed": True})


@pytest.mark.parametrize("action", ["EXPIRE_ACTION_SOFT_DELETE", 2, "2"])
def test_an_expire_says_how_many_were_touched(door: Door, grid: FakeGrid, action: object) -> None:
    body = {"namespace": "n", "filter": {"topic": "food"}, "action": action, "max_rows": 100}
    answer = _post(door, "Expire", body)
    assert (answer.status_code, answer.json()) == (200, {"affected": "3"})
    assert grid.expired == ("n", {"topic": "food"}, ExpireAction.SOFT_DELETE, 100, "")


@pytest.mark.parametrize("action", [None, 0, 4, "EXPIRE_ACTION_UNSPECIFIED"])
def test_an_expire_without_an_action_is_refused(door: Door, grid: FakeGrid, action: object) -> None:
    answer = _post(door, "Expire", {"namespace": "n", "action": action, "maxRows": 1})
    assert "EXPIRE_ACTION_INVALIDATE" in _refused(answer, 400, 3)
    assert grid.expired is None


BAD_BODIES = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b'{"namespace": "n"} x', "not JSON"),
    (b'{"topK": NaN}', "NaN"),
    (b"\xff", "not UTF-8 at byte 0"),
    (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
    (b"[]", "must be an object (SearchRequest)"),
    (b"null", "must be an object"),
    (b"[" * 4000, "nested too deeply"),
    (b'{"namspace": "n"}', "namspace: is not a field of SearchRequest; did you mean namespace?"),
    (b'{"namespace": "a", "namespace": "b"}', "'namespace' stands twice"),
    (b'{"topK": 1, "top_k": 2}', "top_k: is given twice"),
    (b'{"filter": {"a": "1", "a": "2"}}', "'a' stands twice"),
    (b'{"filter": {"a": 1}}', "filter['a']: must be a string, not 1"),
    (b'{"predicates": [{"op": "NO"}]}', "predicates[0].op: must be one of PREDICATE_OP_"),
    (b'{"predicates": [{"key": "k"}]}', "predicates[0].op: is unset"),
    (b'{"topK": -1}', "top_k: must be a whole number from 0 to 4294967295, not -1"),
    (b'{"topK": true}', "top_k: must be a whole number"),
    (b'{"queryVector": [1, "x"]}', "query_vector[1]: must be a number, not 'x'"),
    (b'{"queryVector": [0, 1e39]}', "query_vector[1]: is 1e+39, which is beyond float32"),
    (b'{"queryVector": [null]}', "query_vector[0]"),
    (b'{"asOf": "yesterday"}', "as_of: must be an RFC 3339 time"),
    (b'{"asOf": "0001-01-01T00:00:00+00:01"}', "as_of: must lie within the years 1 to 9999"),
    (b'{"mode": 9}', "mode: is 9; use one of SEARCH_MODE_DENSE, SEARCH_MODE_SPARSE"),
    (b'{"fusion": {"method": 7}}', "fusion.method: is 7; use one of FUSION_METHOD_RRF"),
    (b'{"includePayload": "true"}', "include_payload: must be true or false"),
    (b'{"queryText": "\\ud800"}', "query_text: has a lone surrogate"),
]


@pytest.mark.parametrize(("body", "words"), BAD_BODIES)
def test_a_bad_body_is_refused_by_field(
    door: Door, grid: FakeGrid, body: bytes, words: str
) -> None:
    assert words in _refused(_post(door, "Search", body), 400, 3)


def test_a_record_of_a_batch_is_named_by_its_place(door: Door, grid: FakeGrid) -> None:
    body = {"records": [{"id": "a"}, {"id": "b", "payload": "!!"}]}
    assert "records[1].payload: is not base64" in _refused(_post(door, "Upsert", body), 400, 3)
    beyond = {"records": [{"id": "a", "vector": [1, 2, 1e300]}]}
    message = _refused(_post(door, "Upsert", beyond), 400, 3)
    assert "records[0].vector[2]: is 1e+300, which is beyond float32" in message


def test_lanes_and_their_fusion_arrive_as_they_were_asked(door: Door, grid: FakeGrid) -> None:
    body = {
        "namespace": "n",
        "queryText": "a",
        "mode": "SEARCH_MODE_HYBRID",
        "rerankCandidateK": 7,
        "explain": True,
        "fusion": {"method": "FUSION_METHOD_CONVEX", "sparseWeight": 0.5, "k": 9},
    }
    _post(door, "Search", body)
    _post(door, "Search", {"namespace": "n", "queryText": "a", "fusion": {}})
    (_, first, _), (_, second, _) = grid.queries
    assert (first.mode, first.depth, first.explain) == (Mode.HYBRID, 7, True)
    assert first.fusion == Fusion(FusionMethod.CONVEX, None, 0.5, 9)
    assert (second.mode, second.fusion) == (Mode.DENSE, Fusion())


def test_an_answer_says_in_its_headers_what_its_recall_rests_on(door: Door, grid: FakeGrid) -> None:
    answer = _post(door, "Search", {"namespace": "n", "queryText": "a"})
    assert answer.headers["mindgrid-exact"] == "true"
    assert answer.headers["mindgrid-scanned"] == "7"


@pytest.mark.parametrize("path", sorted(openapi.method_paths()))
def test_every_method_of_the_protos_has_a_route(door: Door, grid: FakeGrid, path: str) -> None:
    answer = _ask(door, "POST", path, b"{}")
    assert answer.status_code in (200, 400, 404, 501), "400 where something must be set"
    message = _refused(_ask(door, "GET", path), 405, 12)
    assert "takes POST, not GET" in message


ERRORS: list[tuple[BaseException, int, int]] = [
    (errors.InvalidRequest("id", "must not be empty"), 400, 3),
    (errors.NotFound("namespace", "n"), 404, 5),
    (errors.PreconditionFailed("a", 1, 2), 400, 9),
    (errors.CursorMismatch(3, 5), 400, 9),
    (errors.Lagged("episodic/events", 7, "1024 events"), 429, 8),
    (errors.LostEvents("episodic/events", 7, 0), 500, 15),
    (errors.ClusterReplaced("127.0.0.1:1"), 503, 14),
    (errors.Unimplemented("later"), 501, 12),
    (errors.Unauthenticated("no token"), 401, 16),
    (errors.PermissionDenied("not yours"), 403, 7),
    (errors.TooLarge(2, 1), 413, 8),
    (errors.TextRefused(3, "a text", "too long"), 400, 3),
    (errors.Exhausted("the queue", 3), 429, 8),
    (errors.Unavailable("shard 1", "no host"), 503, 14),
    (errors.DeadlineExceeded("the search", 2.0), 504, 4),
    (errors.Moved("shard 1", 2), 503, 14),
    (errors.Locked("a", "key", 1), 503, 14),
    (errors.InDoubt("shard 1", 7), 503, 14),
    (errors.Corruption("file", "bad digest"), 500, 15),
    (errors.StorageLocked("folder", "pid 1"), 503, 14),
    (errors.FormatTooNew("file", 2, 1), 503, 14),
    (errors.ConfigError("line 1", "no"), 503, 14),
]


@pytest.mark.parametrize(("error", "http", "code"), ERRORS)
@pytest.mark.parametrize("verb", ["Search", "Upsert", "Delete"])
def test_each_error_has_its_status_and_words(
    door: Door, grid: FakeGrid, verb: str, error: BaseException, http: int, code: int
) -> None:
    grid.error = error
    assert _refused(_post(door, verb, {}), http, code) == str(error)


def test_every_error_class_has_a_status() -> None:
    raised = {type(error) for error, _, _ in ERRORS}
    roots = {errors.MindgridError, errors.CallerError, errors.RetryError, errors.OperatorError}
    assert set(errors.BY_NAME.values()) - roots == raised


def test_a_bug_tells_the_caller_nothing_and_the_log_everything(
    door: Door, grid: FakeGrid, caplog: pytest.LogCaptureFixture
) -> None:
    grid.error = RuntimeError("secret detail")
    message = _refused(_post(door, "Search", {}), 500, 13)
    assert "secret" not in message
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


def test_a_declared_body_over_the_limit_is_refused(door: Door, grid: FakeGrid) -> None:
    body = b'{"namespace": "' + b"n" * LIMIT + b'"}'
    message = _refused(_post(door, "Search", body), 413, 8)
    assert str(LIMIT) in message
    assert str(len(body)) in message
    assert not grid.queries


def test_a_chunked_body_over_the_limit_is_refused(door: Door, grid: FakeGrid) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    answer = _ask(
        door, "POST", f"{SEMANTIC}/Search", chunks(), {"content-type": "application/json"}
    )
    assert str(LIMIT) in _refused(answer, 413, 8)


def test_a_chunked_body_within_the_limit_is_read_whole(door: Door, grid: FakeGrid) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in (b'{"namespace"', b': "n", ', b'"queryText": "a"}'):
            yield piece

    answer = _ask(
        door, "POST", f"{SEMANTIC}/Search", chunks(), {"content-type": "application/json"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/jsonp"},
    ],
)
def test_only_json_is_taken(door: Door, grid: FakeGrid, headers: dict[str, str]) -> None:
    answer = _ask(door, "POST", f"{SEMANTIC}/Search", b"{}", headers)
    assert "content-type: must be application/json" in _refused(answer, 400, 3)


def test_json_may_name_its_charset(door: Door, grid: FakeGrid) -> None:
    headers = {"content-type": "Application/JSON; charset=UTF-8"}
    assert _ask(door, "POST", f"{SEMANTIC}/Search", b"{}", headers).status_code == 200


def test_a_compressed_body_is_refused(door: Door, grid: FakeGrid) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    message = _refused(_ask(door, "POST", f"{SEMANTIC}/Search", b"{}", headers), 400, 3)
    assert "content-encoding" in message


@pytest.mark.parametrize("path", ["/", "/nowhere", f"{SEMANTIC}/Nothing", "/docs/assets/none.js"])
def test_an_unknown_route_is_a_json_error(door: Door, grid: FakeGrid, path: str) -> None:
    assert f"there is no {path}" in _refused(_ask(door, "GET", path), 404, 5)


def test_the_constant_route_is_only_there_for_the_bench(door: Door, grid: FakeGrid) -> None:
    _refused(_ask(door, "POST", "/bench/constant", b"{}"), 404, 5)
    bench = Door(grid, LIMIT, bench=True)
    assert len(_ask(bench, "POST", "/bench/constant?bytes=3000", b"{}").content) == 3000
    assert len(_ask(bench, "POST", f"/bench/constant?bytes={'9' * 5000}").content) == 1200
    _refused(_ask(bench, "POST", "/bench/constant", b" " * (LIMIT + 1)), 413, 8)


def test_health_is_the_grids(door: Door, grid: FakeGrid) -> None:
    assert _ask(door, "GET", "/healthz").json() == {"status": "ok"}
    grid.error = errors.Unavailable("host-1", "it is not appointed yet")
    assert "host-1" in _refused(_ask(door, "GET", "/healthz"), 503, 14)
    _refused(_ask(door, "POST", "/healthz"), 405, 12)


def test_the_documentation_needs_no_network(door: Door, grid: FakeGrid) -> None:
    page = _ask(door, "GET", "/docs")
    assert page.status_code == 200
    assert "://" not in page.text
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        assert f"/docs/assets/{asset}" in page.text
        assert _ask(door, "GET", f"/docs/assets/{asset}").status_code == 200


def test_the_openapi_document_holds_every_method_and_message(door: Door, grid: FakeGrid) -> None:
    document = _ask(door, "GET", "/openapi.json").json()
    assert set(openapi.method_paths()) < set(document["paths"])
    schemas = document["components"]["schemas"]
    record = schemas["mindd.semantic.v1.Record"]["properties"]
    assert record["createdAt"]["format"] == "date-time"
    assert record["vector"]["items"]["type"] == "number"
    assert "UUID" in record["id"]["description"]

    def references(tree: object) -> set[str]:
        if isinstance(tree, dict):
            own = {tree["$ref"]} if "$ref" in tree else set()
            return own.union(*(references(value) for value in tree.values()))
        if isinstance(tree, list):
            return set().union(*(references(value) for value in tree))
        return set()

    assert references(document) == {f"#/components/schemas/{name}" for name in schemas}


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }


def _messages(*bodies: dict[str, Any]) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
    left = list(bodies)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    return receive


def test_a_client_that_leaves_in_its_body_is_no_failure(door: Door, grid: FakeGrid) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    receive = _messages(
        {"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}
    )
    _run(door(_scope(f"{SEMANTIC}/Search"), receive, send))
    assert sent[0]["status"] == 499
    assert not grid.queries


@pytest.mark.parametrize(("verb", "dropped", "written"), [("Search", 1, 0), ("Upsert", 0, 1)])
def test_a_cancelled_call_drops_its_search_but_ends_its_write(
    door: Door, grid: FakeGrid, verb: str, dropped: int, written: int
) -> None:
    async def run() -> None:
        grid.blocked = asyncio.Event()

        async def send(message: Any) -> None:
            raise AssertionError("a cancelled call answers nothing")

        receive = _messages({"type": "http.request", "body": b'{"namespace": "n"}'})
        call = asyncio.ensure_future(door(_scope(f"{SEMANTIC}/{verb}"), receive, send))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        grid.blocked.set()
        await asyncio.sleep(0.01)

    _run(run())
    assert (grid.dropped, grid.written) == (dropped, written)


def test_every_gatable_code_has_the_contracts_http_status() -> None:
    contract = {3: 400, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409, 11: 400, 12: 501, 13: 500}
    contract |= {14: 503, 15: 500, 16: 401, 1: 499, 2: 500, 4: 504}
    assert contract == status.HTTP


KEYS = st.sampled_from(
    ["namespace", "queryText", "query_vector", "topK", "records", "id", "filter", "asOf", "hard"]
) | st.text(max_size=3)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([1e39, 2**64, "2024-01-01T00:00:00Z", "aGk="]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.binary(max_size=60) | st.dictionaries(KEYS, VALUES, max_size=6).map(
    lambda tree: json.dumps(tree).encode()
)
PATHS = st.sampled_from(
    [
        *(f"{SEMANTIC}/{verb}" for verb in ("Search", "Upsert", "Delete", "Expire", "x")),
        *("/healthz", "/docs", "/openapi.json", "/bench/constant", "/docs/assets/../../x", "/%ff"),
    ]
)
HEADERS = st.sampled_from(
    [
        {"content-type": "application/json"},
        {},
        {"content-type": "text/é".encode("latin-1").decode("latin-1")},
        {"content-type": "application/json", "content-length": "9" * 5000},
    ]
)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    method=st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "HEAD", "OPTIONS"]),
    path=PATHS,
    body=BODIES,
    headers=HEADERS,
)
def test_no_request_makes_a_500(
    door: Door, grid: FakeGrid, method: str, path: str, body: bytes, headers: dict[str, str]
) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = _ask(door, method, path, body, sent)  # type: ignore[arg-type]
    assert answer.status_code != 500
    if answer.status_code >= 400 and method != "HEAD":
        assert list(answer.json()) == ["code", "message"]
