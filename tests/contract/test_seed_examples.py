"""The examples of the specification, call by call, in the words that are printed there.

Its `grpcurl` calls are made as the HTTP bodies that they are. Its Python example is made of bodies
too until there is a client; it ends as CONTRACT 1.4 decides, since what it prints for `if_version`
cannot be. The YAML example is that of tests/unit/test_settings.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.callers import Callers, Json, Layout, cosine, local_callers, meaning

from mindgrid.shards.config import Driver

CALLS = [
    (
        "Upsert",
        """{
    "namespace":"notes",
    "records":[
      {"id":"a","content":"apple pie recipe","metadata":{"topic":"food"}},
      {"id":"b","content":"how to debug a Go panic","metadata":{"topic":"code"}}
    ]
  }""",
    ),
    ("Search", """{"namespace":"notes","query_text":"apple","top_k":2}"""),
    (
        "Upsert",
        """{"namespace":"notes","records":[
        {"id":"c","content":"how to debug a Go race","supersedes":["b"]}]}""",
    ),
    (
        "Expire",
        """{"namespace":"notes","filter":{"topic":"food"},
       "action":"EXPIRE_ACTION_SOFT_DELETE","max_rows":100}""",
    ),
]


@pytest.fixture(params=[Layout(Driver.MEMORY, 1), Layout(Driver.LANCE, 5, hosts=2)], ids=str)
def callers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callers]:
    """A cluster that was never written to."""
    with local_callers(tmp_path, request.param) as callers:
        yield callers


def answer(callers: Callers, method: str, body: str) -> Json:
    response = callers.post(method, body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def test_the_grpcurl_calls_answer_as_the_text_around_them_says(callers: Callers) -> None:
    notes = callers.at("notes")
    written, found, revised, expired = (answer(callers, *call) for call in CALLS)
    assert written == {"ids": ["a", "b"], "versions": ["1", "1"]}

    scores = {
        "a": cosine(meaning("apple pie recipe"), meaning("apple")),
        "b": cosine(meaning("how to debug a Go panic"), meaning("apple")),
    }
    assert found["exact"]
    assert [hit["record"]["id"] for hit in found["hits"]] == sorted(
        scores, key=lambda one: -scores[one]
    )
    for hit in found["hits"]:
        assert hit["score"] == pytest.approx(scores[hit["record"]["id"]], abs=1e-6)
        assert hit["record"].keys() == {
            "id",
            "content",
            "metadata",
            "createdAt",
            "validFrom",
            "version",
        }

    assert revised == {"ids": ["c"], "versions": ["1"]}
    assert notes.stored("b")["validTo"] == notes.stored("c")["validFrom"]

    assert expired == {"affected": "1"}
    assert "deletedAt" in notes.stored("a")
    assert notes.found() == ["c"]
    assert notes.found(includeInvalidated=True) == ["a", "b", "c"]


def test_the_python_example_runs_but_for_the_version_of_a_record_yet_to_be(
    callers: Callers,
) -> None:
    notes = callers.at("notes")
    resp = notes.call("Upsert", records=[{"id": "a", "content": "apple pie recipe"}])
    assert (resp["ids"], resp["versions"]) == (["a"], ["1"])

    (hit,) = notes.search(query_text="apple", top_k=3)
    assert hit["record"]["id"] == "a"
    assert hit["score"] == pytest.approx(cosine(meaning("apple pie recipe"), meaning("apple")))

    # Replaced by CONTRACT 1.4: `b` is at version 0, so `if_version=1` fails and `a` stays live.
    revision = {"id": "b", "content": "apple crumble recipe", "supersedes": ["a"]}
    words = notes.refused("Upsert", code=9, records=[{**revision, "if_version": 1}])
    assert "current version is 0" in words
    assert notes.found() == ["a"]
    assert notes.upsert({**revision, "if_version": 0}) == [1]
    assert notes.found() == ["b"]

    assert notes.delete("b")
    assert notes.found() == []
    hits = notes.search(query_text="apple", include_invalidated=True)
    assert sorted(hit["record"]["id"] for hit in hits) == ["a", "b"]

    # No record of the example has a topic, so there is none to invalidate.
    assert notes.expire("INVALIDATE", 100, topic="food") == 0
