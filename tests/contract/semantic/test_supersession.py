"""What a record does to those it supersedes, in the same batch and across shards."""

from __future__ import annotations

from tests.support.callers import FUTURE, PAST, Caller, record

THEN = "2015-01-01T00:00:00Z"


def test_the_superseded_ends_where_the_new_begins(notes: Caller) -> None:
    olds = [f"old{n}" for n in range(8)]
    notes.upsert(*(record(id) for id in olds), record("bystander"))
    notes.upsert(record("new", supersedes=olds, source="log/42"))
    assert notes.found() == ["bystander", "new"]
    new = notes.stored("new")
    assert new["supersedes"] == olds
    assert new["source"] == "log/42"
    for id in olds:
        old = notes.stored(id)
        assert old["validTo"] == new["validFrom"]
        assert "deletedAt" not in old
    assert "validTo" not in notes.stored("bystander")


def test_a_new_record_may_begin_in_the_past_or_in_the_future(notes: Caller) -> None:
    notes.upsert(*(record(id, validFrom=PAST) for id in ("a", "b")))
    notes.upsert(record("since", validFrom=THEN, supersedes=["a"]))
    assert notes.stored("a")["validTo"] == THEN
    assert notes.found(asOf="2010-01-01T00:00:00Z") == ["a", "b"]
    assert notes.found(asOf=THEN) == ["b", "since"]
    notes.upsert(record("next", validFrom=FUTURE, supersedes=["b"]))
    assert notes.found() == ["b", "since"]
    assert notes.found(asOf=FUTURE) == ["next", "since"]


def test_an_end_is_never_put_off(notes: Caller) -> None:
    notes.upsert(
        record("ended", validFrom=PAST, validTo=THEN), record("ending", validTo=FUTURE), record("x")
    )
    notes.upsert(record("new", supersedes=["ended", "ending"]))
    assert notes.stored("ended")["validTo"] == THEN, "it ended before the new one began"
    assert notes.stored("ending")["validTo"] == notes.stored("new")["validFrom"]


def test_a_tombstone_is_left_as_it_is(notes: Caller) -> None:
    notes.upsert(record("gone"), record("written as gone", deletedAt=PAST))
    notes.delete("gone")
    before = notes.stored("gone")
    notes.upsert(record("new", supersedes=["gone", "written as gone"]))
    assert notes.stored("gone") == before
    assert "validTo" not in notes.stored("written as gone")


def test_itself_and_the_missing_are_ignored(notes: Caller) -> None:
    assert notes.upsert(record("a", supersedes=["a", "missing", "a"])) == [1]
    assert notes.upsert(record("a", supersedes=["a"])) == [2]
    assert notes.found(includeInvalidated=True) == ["a"]
    assert notes.found() == ["a"]
    assert "validTo" not in notes.stored("a")


def test_later_records_of_a_batch_see_the_earlier_ones(notes: Caller) -> None:
    batch = [record("a"), record("b", supersedes=["a"]), record("c", supersedes=["b"])]
    notes.upsert(*batch)
    assert notes.found() == ["c"]
    notes.clear()
    notes.upsert(*reversed(batch))
    assert notes.found() == ["a", "b", "c"], "what comes later is not there yet"
    notes.upsert(record("d", supersedes=["a"]), record("a"))
    assert notes.found() == ["a", "b", "c", "d"], "what is written again begins anew"
    notes.upsert(record("a"), record("e", supersedes=["a"]), record("a", validFrom=PAST))
    assert notes.stored("a")["version"] == "4"
    assert "validTo" not in notes.stored("a")


def test_a_chain_can_be_read_back(notes: Caller) -> None:
    for n in range(5):
        notes.upsert(record(f"v{n}", supersedes=[f"v{n - 1}"] if n else []))
    assert notes.found() == ["v4"]
    id, chain = "v4", []
    while id:
        chain.append(id)
        id = next(iter(notes.stored(id).get("supersedes", [])), "")
    assert chain == ["v4", "v3", "v2", "v1", "v0"]
    for n in range(4):
        instant = notes.stored(f"v{n}")["validFrom"]
        assert notes.found(asOf=instant) == [f"v{n}"], "each fact held until the next"
