"""What was known at one instant (`known_at`) of what held at another (`as_of`)."""

from __future__ import annotations

from tests.support.callers import FUTURE, PAST, Caller, Json, record


def contents(notes: Caller, **query: object) -> dict[str, str]:
    return {hit["record"]["id"]: hit["record"]["content"] for hit in notes.search(**query)}


def test_what_was_known_and_what_held_are_two_questions(notes: Caller) -> None:
    notes.upsert(record("a", content="until 2020", validFrom=PAST, validTo="2020-01-01T00:00:00Z"))
    first = notes.now()
    notes.upsert(record("a", content="until 2010", validFrom=PAST, validTo="2010-01-01T00:00:00Z"))
    second = notes.now()
    notes.upsert(record("a", content="from 2015", validFrom="2015-01-01T00:00:00Z"))
    held: list[dict[str, str]] = [
        {"asOf": "2005-01-01T00:00:00Z"},
        {"asOf": "2017-01-01T00:00:00Z"},
        {},
    ]
    asked = {
        "first": [contents(notes, knownAt=first, **as_of) for as_of in held],
        "second": [contents(notes, knownAt=second, **as_of) for as_of in held],
        "now": [contents(notes, **as_of) for as_of in held],
    }
    assert asked == {
        "first": [{"a": "until 2020"}, {"a": "until 2020"}, {}],
        "second": [{"a": "until 2010"}, {}, {}],
        "now": [{}, {"a": "from 2015"}, {"a": "from 2015"}],
    }


def test_without_as_of_validity_is_that_of_the_instant_known(notes: Caller) -> None:
    notes.upsert(record("old"), record("ending"))
    before = notes.now()
    notes.upsert(record("new", supersedes=["old"]))
    notes.expire("INVALIDATE", 1)
    assert notes.found(knownAt=before) == ["ending", "old"]
    assert "validTo" not in notes.stored("old", knownAt=before)
    assert notes.stored("new", knownAt=before) == {}
    assert notes.found(knownAt=before, asOf=FUTURE) == ["ending", "old"], "no end was known"


def test_a_tombstone_is_known_from_its_deletion_on(notes: Caller) -> None:
    notes.upsert(record("a"))
    before = notes.now()
    notes.delete("a")
    after = notes.now()
    notes.upsert(record("a", content="revived"))
    assert contents(notes, knownAt=before) == {"a": "text of a"}
    assert contents(notes, knownAt=after) == {}
    assert contents(notes, knownAt=after, includeInvalidated=True) == {"a": "text of a"}
    assert contents(notes) == {"a": "revived"}


def test_a_hard_deleted_record_is_known_at_no_instant(notes: Caller) -> None:
    notes.upsert(record("a"), record("b"))
    before = notes.now()
    notes.delete("a", hard=True)
    notes.upsert(record("a", content="another"))
    assert notes.found(knownAt=before, includeInvalidated=True) == ["b"]
    assert notes.stored("a", knownAt=before) == {}


def test_every_mode_looks_at_the_past(notes: Caller) -> None:
    notes.upsert(*(record(f"r{n}", content=f"apple {n}", metadata={"k": "old"}) for n in range(5)))
    before = notes.now()
    asked: Json = {"queryText": "apple 3", "includeVector": True}
    modes = [f"SEARCH_MODE_{mode}" for mode in ("DENSE", "SPARSE", "HYBRID")]
    dense, *others = (notes.search(**asked, mode=mode) for mode in modes)
    notes.upsert(*(record(f"r{n}", content=f"pear {n}", metadata={"k": "new"}) for n in range(3)))
    notes.delete("r3")
    asked |= {"knownAt": before, "filter": {"k": "old"}}
    assert notes.search(**asked) == dense
    for mode, expected in zip(modes[1:], others, strict=True):
        # Their scores rest on how often a word is there now.
        found = notes.search(**asked, mode=mode)
        assert [hit["record"] for hit in found] == [hit["record"] for hit in expected]


def test_the_future_is_not_known_and_long_ago_nothing_was(notes: Caller) -> None:
    notes.upsert(record("a"))
    for method, body in (
        ("Search", {"queryText": "x", "knownAt": FUTURE}),
        ("Count", {"selection": {"knownAt": FUTURE}}),
    ):
        assert "known_at: " in (words := notes.refused(method, **body))
        assert "future" in words
    answer = notes.ask("Search", {"queryText": "x", "knownAt": PAST})
    if answer.status_code == 200:
        assert "hits" not in answer.json(), "as long as nothing is forgotten, nothing was known"
    else:
        assert "known_at: lies before " in answer.text
