"""`mindgrid.v1.Records` over HTTP: by id, in pages, counted, and many queries in one call."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.grids import local_grid, namespace, run

from mindgrid.api.app import Door
from mindgrid.shards.config import Driver

Json = dict[str, Any]
LAYOUTS = [
    (Driver.MEMORY, 1, 1),
    (Driver.LANCE, 1, 1),
    (Driver.LANCE, 5, 1),
    (Driver.LANCE, 5, 2),
]


class Client:
    """Speaks to a door of its own as any HTTP client does."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def call(self, method: str, body: Json) -> Json:
        answer = await self.ask(method, body)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found

    async def ask(self, method: str, body: Json) -> httpx2.Response:
        service = "mindd.semantic.v1.Semantic"
        if method in ("Get", "List", "Count", "SearchBatch"):
            service = "mindgrid.v1.Records"
        return await self._http.post(
            f"/{service}/{method}",
            content=json.dumps({"namespace": "n", **body}),
            headers={"content-type": "application/json"},
        )

    async def pages(self, **body: object) -> list[list[str]]:
        """Return the ids of each page until the last."""
        pages: list[list[str]] = []
        token = ""
        while token or not pages:
            answer = await self.call("List", {"pageToken": token, **body})
            pages.append([record["id"] for record in answer.get("records", [])])
            token = answer.get("nextPageToken", "")
        return pages


@asynccontextmanager
async def client(folder: Path, driver: Driver, shards: int, hosts: int) -> AsyncIterator[Client]:
    async with local_grid(folder, namespace("n", shards, driver), hosts=hosts) as (grid, _):
        transport = httpx2.ASGITransport(app=Door(grid), raise_app_exceptions=True)
        async with httpx2.AsyncClient(transport=transport, base_url="http://door") as http:
            yield Client(http)


def on_all_layouts(tmp_path: Path, claim: Callable[[Client], Awaitable[None]]) -> None:
    for number, layout in enumerate(LAYOUTS):

        async def main(number: int = number, layout: tuple[Driver, int, int] = layout) -> None:
            async with client(tmp_path / str(number), *layout) as one:
                await claim(one)

        run(main)


def flat(pages: list[list[str]]) -> list[str]:
    return [id for page in pages for id in page]


def record(number: int, **more: object) -> Json:
    return {
        "id": f"r{number:02}",
        "content": f"text {number}",
        "payload": "aGk=",
        "metadata": {"odd": "yes" if number % 2 else "no", "n": str(number)},
        **more,
    }


def test_records_come_back_by_id_with_what_was_asked(tmp_path: Path) -> None:
    async def claim(one: Client) -> None:
        await one.call("Upsert", {"records": [record(1), record(2)]})
        answer = await one.call("Get", {"ids": ["r02", "none", "r01", "r02"]})
        found = [result.get("record", {}) for result in answer["results"]]
        assert [one.get("content") for one in found] == ["text 2", None, "text 1", "text 2"]
        assert "payload" not in found[0]
        assert "vector" not in found[0]
        answer = await one.call("Get", {"ids": ["r01"], "includePayload": True})
        assert answer["results"][0]["record"]["payload"] == "aGk="
        selected = {"selection": {"filter": {"odd": "yes"}}, "ids": ["r01", "r02"]}
        answer = await one.call("Get", selected)
        assert ["record" in result for result in answer["results"]] == [True, False]
        again = {"ids": ["r01"], "selection": {"knownAt": answer["readAt"]}}
        await one.call("Upsert", {"records": [record(1, content="newer")]})
        answer = await one.call("Get", again)
        assert answer["results"][0]["record"]["content"] == "text 1"
        assert answer["results"][0]["record"]["version"] == "1"

    on_all_layouts(tmp_path, claim)


def test_pages_hold_every_record_once_in_the_order_of_ids(tmp_path: Path) -> None:
    async def claim(one: Client) -> None:
        records = [record(n) for n in range(40)]
        await one.call("Upsert", {"records": records[20:] + records[:20]})
        await one.call("Delete", {"id": "r05"})
        ids = [f"r{n:02}" for n in range(40) if n != 5]
        pages = await one.pages(pageSize=7)
        assert [len(page) for page in pages] == [7, 7, 7, 7, 7, 4]
        assert flat(pages) == ids
        odd = {"filter": {"odd": "yes"}, "predicates": [number_below("20")]}
        assert flat(await one.pages(pageSize=3, selection=odd)) == [
            id for id in ids if int(id[1:]) % 2 and int(id[1:]) < 20
        ]
        everything = {"includeInvalidated": True}
        assert len(flat(await one.pages(selection=everything))) == 40
        short = await one.call("List", {"idsOnly": True, "pageSize": 1})
        assert short["records"] == [{"id": "r00", "version": "1"}]

    on_all_layouts(tmp_path, claim)


def number_below(value: str) -> Json:
    return {"key": "n", "op": "PREDICATE_OP_LT", "values": [value]}


def test_what_is_written_between_pages_repeats_and_skips_nothing(tmp_path: Path) -> None:
    async def claim(one: Client) -> None:
        await one.call("Upsert", {"records": [record(n) for n in range(0, 40, 2)]})
        seen: list[str] = []
        token, number = "", 1
        while token or not seen:
            answer = await one.call("List", {"pageToken": token, "pageSize": 3})
            seen += [found["id"] for found in answer["records"]]
            token = answer.get("nextPageToken", "")
            # New ones before and behind, and every record seen so far written anew.
            await one.call("Upsert", {"records": [record(number), record(39 - number)]})
            await one.call("Upsert", {"records": [record(int(id[1:])) for id in seen[:2]]})
            number += 4
        assert seen == sorted(set(seen))
        assert set(seen) >= {f"r{n:02}" for n in range(0, 40, 2)}

    on_all_layouts(tmp_path, claim)


def test_a_count_is_exact(tmp_path: Path) -> None:
    async def claim(one: Client) -> None:
        assert (await one.call("Count", {})).get("count", "0") == "0"
        await one.call("Upsert", {"records": [record(n) for n in range(25)]})
        await one.call("Delete", {"id": "r01"})
        assert (await one.call("Count", {}))["count"] == "24"
        odd = {"selection": {"filter": {"odd": "yes"}}}
        assert (await one.call("Count", odd))["count"] == "11"
        every = {"selection": {"includeInvalidated": True}}
        assert (await one.call("Count", every))["count"] == "25"

    on_all_layouts(tmp_path, claim)


def test_the_queries_of_a_batch_share_an_instant_and_fail_by_themselves(tmp_path: Path) -> None:
    async def claim(one: Client) -> None:
        await one.call("Upsert", {"records": [record(n) for n in range(9)]})
        queries: list[Json] = [
            {"queryText": "text 3", "topK": 2},
            {"queryText": "text 3", "topK": 2, "mode": "SEARCH_MODE_SPARSE"},
            {"topK": 2},
            {"queryText": "text", "namespace": "other"},
            {"queryText": "text 3", "topK": 2, "mode": "SEARCH_MODE_HYBRID", "explain": True},
            {"queryText": "text", "filter": {"odd": "yes"}, "idsOnly": True},
        ]
        answer = await one.call("SearchBatch", {"queries": queries})
        results = answer["results"]
        failures = [result.get("failure", {}).get("code") for result in results]
        assert failures == [None, None, 3, 3, None, None]
        assert "queries[3].namespace: is 'other'" in results[3]["failure"]["message"]
        assert "query_text" in results[2]["failure"]["message"]
        singles = [await one.call("Search", queries[n]) for n in (0, 1, 4, 5)]
        assert [results[n]["response"] for n in (0, 1, 4, 5)] == singles
        assert len(singles[3]["hits"]) == 4
        assert (await one.call("SearchBatch", {})).get("results", []) == []

    on_all_layouts(tmp_path, claim)


@pytest.mark.parametrize(
    ("method", "body", "words"),
    [
        ("List", {"pageToken": "!"}, "page_token"),
        ("List", {"pageToken": "YWJj"}, "page_token"),
        ("List", {"pageSize": 10_001}, "page_size: is 10001"),
        ("Get", {"ids": [""]}, r"ids\[0\]: must not be empty"),
        ("Get", {"ids": ["a"] * 10_001}, "at most 10000"),
        ("Count", {"selection": {"predicates": [{"key": "k", "op": 1}]}}, "exactly one value"),
        ("Count", {"selection": {"knownAt": "2999-01-01T00:00:00Z"}}, "known_at: .*future"),
        ("SearchBatch", {"queries": [{}] * 1_001}, "at most 1000"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, method: str, body: Json, words: str) -> None:
    async def claim() -> None:
        async with client(tmp_path, Driver.MEMORY, 2, 2) as one:
            answer = await one.ask(method, body)
            assert (answer.status_code, answer.json()["code"]) == (400, 3), answer.text
            assert re.search(words, answer.json()["message"]), answer.text

    run(claim)
