"""In which order hits come, with which scores, and what they carry."""

from __future__ import annotations

import pytest
from tests.support.callers import DIMENSIONS, Caller, Json, cosine, meaning, record

ONE, OTHER = [3.0, 4.0] + [0.0] * 6, [0.0] * 7 + [1.0]


def test_hits_come_by_score_with_the_cosine_in_float32(notes: Caller) -> None:
    texts = [f"text {n}" for n in range(40)]
    notes.upsert(*({"id": f"r{n:02}", "content": text} for n, text in enumerate(texts)))
    for query in ({"queryText": "text 3"}, {"queryVector": meaning("text 3")}):
        hits = notes.search(**query)
        scores = {
            f"r{n:02}": cosine(meaning(text), meaning("text 3")) for n, text in enumerate(texts)
        }
        assert hits[0]["record"]["id"] == "r03"
        assert [hit["record"]["id"] for hit in hits] == sorted(
            scores, key=lambda one: (-scores[one], one)
        )
        for hit in hits:
            assert hit.get("score", 0.0) == pytest.approx(scores[hit["record"]["id"]], abs=1e-6)


def test_equal_scores_go_by_id_in_the_order_of_code_points(notes: Caller) -> None:
    ids = ["a", "B", "\uffff", "\U0001f600", "é", "aa", "Z", "10", "9"]
    notes.upsert(*({"id": id, "vector": OTHER} for id in ids))
    notes.upsert({"id": "best", "vector": ONE})
    assert notes.ranked(queryVector=[1.0] * DIMENSIONS) == ["best", *sorted(ids)]
    assert notes.ranked(queryVector=[1.0] * DIMENSIONS, topK=4) == ["best", *sorted(ids)[:3]]


def test_scores_lie_between_minus_1_and_1_whatever_the_length(notes: Caller) -> None:
    scaled = [0.1 * 3**n for n in range(-20, 20)]
    vectors = [[value * scale for value in meaning("x")] for scale in scaled]
    notes.upsert(*({"id": f"r{n:02}", "vector": vector} for n, vector in enumerate(vectors)))
    for query, score in ((meaning("x"), 1.0), ([-value for value in meaning("x")], -1.0)):
        scores = [hit["score"] for hit in notes.search(queryVector=query)]
        assert len(scores) == len(scaled)
        assert all(-1.0 <= found <= 1.0 for found in scores)
        assert scores == pytest.approx([score] * len(scaled), abs=1e-6)


def full(id: str) -> Json:
    return record(id, payload="aGk=", metadata={"k": "v"}, vector=ONE, source="log/7")


def test_hits_carry_content_and_metadata_and_more_if_asked(notes: Caller) -> None:
    notes.upsert(full("a"))
    (plain,) = notes.search()
    assert plain["record"]["content"] == "text of a"
    assert plain["record"]["metadata"] == {"k": "v"}
    assert plain["record"]["source"] == "log/7"
    assert "createdAt" in plain["record"], "so that a caller can rank by it"
    assert plain["record"].keys().isdisjoint({"payload", "vector"})
    (payload,) = notes.search(includePayload=True)
    assert payload["record"] == {**plain["record"], "payload": "aGk="}
    (vector,) = notes.search(includeVector=True)
    assert vector["record"] == {**plain["record"], "vector": ONE}
    (both,) = notes.search(includePayload=True, includeVector=True)
    assert both["record"] == {**plain["record"], "payload": "aGk=", "vector": ONE}


def test_ids_only_returns_id_and_score_whatever_else_is_asked(notes: Caller) -> None:
    notes.upsert(full("a"), full("b"))
    for mode in ("DENSE", "SPARSE", "HYBRID"):
        asked = {"queryText": "text of a", "mode": f"SEARCH_MODE_{mode}"}
        whole = notes.search(**asked)
        short = notes.search(**asked, idsOnly=True, includePayload=True, includeVector=True)
        assert short == [
            {"record": {"id": hit["record"]["id"]}, "score": hit["score"]} for hit in whole
        ]


def test_vectors_are_kept_as_given_and_not_normalised(notes: Caller) -> None:
    given = [0.1, -2.5, 3e-38, 3.0e38, 1e-3, 0.0, 7.0, 16777217.0]
    notes.upsert({"id": "a", "vector": given})
    (hit,) = notes.search(includeVector=True)
    assert hit["record"]["vector"] == [0.1, -2.5, 3e-38, 3.0e38, 1e-3, 0.0, 7.0, 16777216.0]


def test_a_given_vector_is_used_and_the_content_kept(notes: Caller) -> None:
    notes.upsert({"id": "a", "content": "apple", "vector": ONE}, {"id": "b", "content": "apple"})
    (first, second) = notes.search(queryText="apple", includeVector=True)
    assert (first["record"]["id"], first["record"]["vector"]) == ("b", meaning("apple"))
    assert (second["record"]["id"], second["record"]["vector"]) == ("a", ONE)
    assert second["record"]["content"] == "apple"


def test_a_vector_needs_no_content(notes: Caller) -> None:
    notes.upsert({"id": "a", "vector": ONE})
    (hit,) = notes.search(queryVector=ONE)
    assert (hit["record"]["id"], hit["score"]) == ("a", 1.0)
    assert "content" not in hit["record"]


def test_a_query_has_either_text_or_a_vector(notes: Caller) -> None:
    words = notes.refused("Search", queryText="x", queryVector=ONE)
    assert "set either query_text or query_vector, not both" in words
    assert "both are empty" in notes.refused("Search", topK=3)
    assert "both are empty" in notes.refused("Search", queryText="", queryVector=[])


WRONG = [
    ([1.0] * 7, "has 7 values, but the namespace's embedder fake/fake has 8 dimensions"),
    ([1.0] * 9, "has 9 values"),
    ([0.0] * 8, "is all zeros"),
    ([0.0] * 3 + ["NaN"] + [0.0] * 4, "value 3 "),
    ([0.0] * 5 + ["-Infinity"] + [0.0] * 2, "value 5 "),
    ([0.0] * 2 + [1e39] + [0.0] * 5, "[2]: is 1e+39"),
]


def test_a_vector_that_cannot_be_compared_is_refused(notes: Caller) -> None:
    for vector, words in WRONG:
        assert words in notes.refused("Search", queryVector=vector)
        refusal = notes.refused("Upsert", records=[record("a"), {"id": "b", "vector": vector}])
        assert words in refusal
        assert refusal.startswith("records[1].vector")
    assert notes.found() == []


def test_an_empty_namespace_has_no_hits(notes: Caller) -> None:
    for mode in ("DENSE", "SPARSE", "HYBRID"):
        assert notes.search(queryText="x", mode=f"SEARCH_MODE_{mode}") == []
