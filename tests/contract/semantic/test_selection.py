"""Which records a search looks at: filter, predicates, the window of created_at, and how many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tests.support.callers import PAST, ROWS, SHARES, Caller, Json, Many, record


def predicate(key: str, op: str, *values: str) -> Json:
    return {"key": key, "op": f"PREDICATE_OP_{op}", "values": list(values)}


def test_a_filter_is_exact_and_its_parts_are_anded(notes: Caller) -> None:
    notes.upsert(
        record("a", metadata={"topic": "food", "lang": "en"}),
        record("b", metadata={"topic": "food", "lang": "de"}),
        record("c", metadata={"topic": "Food"}),
        record("d", metadata={"topic": ""}),
        record("e"),
    )
    assert notes.found(filter={"topic": "food"}) == ["a", "b"]
    assert notes.found(filter={"topic": "food", "lang": "de"}) == ["b"]
    assert notes.found(filter={"topic": ""}) == ["d"], "without the key there is no value"
    assert notes.found(filter={"topic": "foo"}) == []
    assert notes.found(filter={"unheard": "food"}) == []
    assert notes.found(filter={}) == ["a", "b", "c", "d", "e"]


# The value under "n" of each record; "none" has no such key.
VALUES = {
    "one": "1",
    "one as well": "1.0",
    "two": "2",
    "ten": "10",
    "minus": "-3.5",
    "huge": "1e300",
    "word": "two",
    "empty": "",
    "blank": " 2",
    "hex": "0x2",
    "score": "1_0",
    "nan": "NaN",
    "inf": "inf",
    "arabic": "٢",
}


COMPARISONS = [
    ("EQ", ["1"], ["one"]),
    ("EQ", ["NaN"], ["nan"]),
    ("EQ", [""], ["empty"]),
    ("NEQ", ["1"], sorted(VALUES.keys() - {"one"})),
    ("IN", ["1", "two", "7"], ["one", "word"]),
    ("IN", ["10"], ["ten"]),
    ("GT", ["1"], ["huge", "ten", "two"]),
    ("GTE", ["1"], ["huge", "one", "one as well", "ten", "two"]),
    ("GTE", ["1.0e0"], ["huge", "one", "one as well", "ten", "two"]),
    ("LT", ["2"], ["minus", "one", "one as well"]),
    ("LTE", ["2"], ["minus", "one", "one as well", "two"]),
    ("LT", ["-3.5"], []),
]


def test_each_predicate_compares_as_it_says_and_skips_what_is_no_number(notes: Caller) -> None:
    notes.upsert(*(record(id, metadata={"n": value}) for id, value in VALUES.items()))
    notes.upsert(record("none", metadata={"m": "1"}))
    for op, values, found in COMPARISONS:
        assert notes.found(predicates=[predicate("n", op, *values)]) == found, (op, values)


def test_filter_and_all_predicates_are_anded(notes: Caller) -> None:
    notes.upsert(*(record(f"r{n}", metadata={"n": str(n), "odd": "ny"[n % 2]}) for n in range(10)))
    window = [predicate("n", "GTE", "2"), predicate("n", "LT", "8"), predicate("n", "NEQ", "5")]
    assert notes.found(predicates=window, filter={"odd": "y"}) == ["r3", "r7"]
    assert notes.found(predicates=[*window, predicate("n", "IN", "2", "4", "9")]) == ["r2", "r4"]
    assert notes.found(predicates=[*window, predicate("m", "EQ", "2")]) == []


WRONG = [
    (predicate("", "EQ", "a"), "predicates[1].key: must not be empty"),
    ({"key": "n", "values": ["a"]}, "predicates[1].op: is unset"),
    (predicate("n", "UNSPECIFIED", "a"), "predicates[1].op: is unset"),
    (predicate("n", "EQ"), "predicates[1].values: EQ takes exactly one value, but has 0"),
    (predicate("n", "GT", "1", "2"), "GT takes exactly one value, but has 2"),
    (predicate("n", "IN"), "IN takes one or more values"),
    *((predicate("n", op, "two"), "'two' is not a") for op in ("GT", "GTE", "LT", "LTE")),
    *((predicate("n", "GT", text), "is not a finite") for text in ("NaN", "inf", "0x1", "")),
]


def test_a_predicate_that_nothing_could_be_compared_with_is_refused(notes: Caller) -> None:
    right = predicate("n", "EQ", "a")
    for wrong, words in WRONG:
        assert words in notes.refused("Search", queryText="x", predicates=[right, wrong])


def test_the_window_of_created_at_is_open_on_both_sides(notes: Caller) -> None:
    days = {f"d{n}": f"2020-01-{n:02}T00:00:00Z" for n in range(1, 6)}
    notes.upsert(*(record(id, createdAt=day) for id, day in days.items()), record("now"))
    assert notes.found(createdAfter=days["d2"]) == ["d3", "d4", "d5", "now"]
    assert notes.found(createdBefore=days["d2"]) == ["d1"]
    assert notes.found(createdAfter=days["d2"], createdBefore=days["d4"]) == ["d3"]
    assert notes.found(createdAfter=days["d2"], createdBefore="2020-01-02T00:00:00.000001Z") == []
    assert notes.found(createdAfter="2020-01-01T23:59:59.999999Z", createdBefore=days["d3"]) == [
        "d2"
    ]
    assert notes.found(createdBefore=PAST) == []


def test_the_window_adds_nothing_to_the_score(notes: Caller) -> None:
    notes.upsert(*(record(f"r{n}", createdAt=f"20{n:02}-01-01T00:00:00Z") for n in range(10, 20)))
    scores = {hit["record"]["id"]: hit["score"] for hit in notes.search()}
    recent = notes.search(createdAfter="2014-06-01T00:00:00Z")
    assert {hit["record"]["id"]: hit["score"] for hit in recent} == {
        f"r{n}": scores[f"r{n}"] for n in range(15, 20)
    }
    assert [hit["score"] for hit in recent] == sorted(hit["score"] for hit in recent)[::-1]


def test_top_k_0_is_10_and_10000_the_most(notes: Caller) -> None:
    notes.upsert(*(record(f"r{n:02}") for n in range(12)))
    assert len(notes.found(topK=0)) == 10
    assert len(notes.found(topK=None)) == 10
    assert len(notes.found(topK=1)) == 1
    assert len(notes.found(topK=10_000)) == 12
    assert "top_k: is 10001" in notes.refused("Search", queryText="x", topK=10_001)


def nearest(many: Many, query: list[float], rows: NDArray[np.int64]) -> list[str]:
    """Return the ids of the rows, nearest first, as answers rank them."""
    vectors, asked = many.vectors[rows].astype(np.float64), np.array(query)
    cosines = vectors @ asked / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(asked))
    return [f"r{rows[at]:05}" for at in np.lexsort((rows, -cosines.astype(np.float32)))]


def test_a_rare_filter_still_fills_the_answer(many: Many) -> None:
    query = [0.3, -1.0, 2.0, 0.1, 0.7, -0.2, 1.5, -0.9]
    asked = {"queryVector": query, "idsOnly": True}
    for share, each in SHARES.items():
        expected = nearest(many, query, np.arange(7, ROWS, each))
        for top_k in (10, 10_000):
            found = many.caller.ranked(filter={share: "yes"}, topK=top_k, **asked)
            assert found == expected[:top_k], share
    expected = nearest(many, query, np.arange(7, ROWS, 1_000))
    assert many.caller.ranked(predicates=[predicate("0.1 %", "NEQ", "no")], **asked) == expected


def test_a_search_returns_top_k_of_many(many: Many) -> None:
    for top_k in (10, 10_000):
        found = many.caller.ranked(topK=top_k, idsOnly=True)
        assert len(found) == len(set(found)) == top_k
    half = [predicate("n", "LT", str(ROWS // 2))]
    found = many.caller.ranked(topK=1_000, idsOnly=True, predicates=half)
    assert len(found) == len(set(found)) == 1_000
    assert max(found) < f"r{ROWS // 2:05}"


def test_an_exact_search_misses_nothing_and_says_so(many: Many) -> None:
    query = [float(value) for value in many.vectors[3] + 0.25]
    asked = {"queryVector": query, "topK": 100, "idsOnly": True, "exact": True}
    answer = many.caller.ask("Search", asked)
    found = answer.json()
    expected = nearest(many, query, np.arange(ROWS))[:100]
    assert [hit["record"]["id"] for hit in found["hits"]] == expected
    assert found["exact"]
    assert found["scanned"] == str(ROWS)
    assert answer.headers["mindgrid-exact"] == "true"
    assert answer.headers["mindgrid-scanned"] == str(ROWS)


def test_headers_and_answer_say_the_same_of_every_search(many: Many) -> None:
    for filter in ({}, {"1 %": "yes"}):
        answer = many.caller.ask("Search", {"queryText": "x", "filter": filter})
        found = answer.json()
        assert answer.headers["mindgrid-exact"] == ("true" if found.get("exact") else "false")
        assert answer.headers["mindgrid-scanned"] == found.get("scanned", "0")
        if filter:
            assert found["exact"], "so few are compared one by one"
