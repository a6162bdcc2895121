"""What is live and valid now, what a past instant saw, and what deleting and reviving leave."""

from __future__ import annotations

from tests.support.callers import FUTURE, PAST, Caller, instant, record

BETWEEN = {"validFrom": "2010-01-01T00:00:00Z", "validTo": "2020-01-01T00:00:00Z"}


def test_a_search_sees_what_is_live_and_valid_now(notes: Caller) -> None:
    notes.upsert(
        record("live"),
        record("open", validFrom=PAST),
        record("ending", validFrom=PAST, validTo=FUTURE),
        record("ended", **BETWEEN),
        record("not yet", validFrom=FUTURE),
        record("never", validFrom=FUTURE, validTo=PAST),
        record("retracted", deletedAt=PAST),
        record("to be retracted", deletedAt=FUTURE),
    )
    assert notes.found() == ["ending", "live", "open"]
    assert len(notes.found(includeInvalidated=True)) == 8


def test_valid_from_is_now_unless_given_on_each_write(notes: Caller) -> None:
    notes.upsert(record("a"))
    first = notes.stored("a")
    assert first["validFrom"] == first["createdAt"]
    assert "validTo" not in first
    assert "deletedAt" not in first
    notes.upsert(record("a"))
    assert instant(notes.stored("a")["validFrom"]) > instant(first["validFrom"])
    notes.upsert(record("a", validFrom=PAST))
    assert notes.stored("a")["validFrom"] == PAST


def test_valid_from_is_inclusive_and_valid_to_exclusive(notes: Caller) -> None:
    notes.upsert(record("a", **BETWEEN))
    assert notes.found(asOf="2009-12-31T23:59:59.999999Z") == []
    assert notes.found(asOf=BETWEEN["validFrom"]) == ["a"]
    assert notes.found(asOf="2019-12-31T23:59:59.999999Z") == ["a"]
    assert notes.found(asOf=BETWEEN["validTo"]) == []


def test_as_of_looks_at_a_past_or_a_future_instant(notes: Caller) -> None:
    notes.upsert(
        record("past", **BETWEEN), record("now"), record("later", validFrom="2500-01-01T00:00:00Z")
    )
    assert notes.found(asOf="2015-01-01T00:00:00Z") == ["past"]
    assert notes.found() == ["now"]
    assert notes.found(asOf=FUTURE) == ["later", "now"]


def test_as_of_brings_no_tombstone_back(notes: Caller) -> None:
    notes.upsert(record("a", **BETWEEN))
    notes.delete("a")
    assert notes.found(asOf="2015-01-01T00:00:00Z") == []
    notes.upsert(record("b", validFrom=PAST, deletedAt=FUTURE))
    assert notes.found(asOf="2015-01-01T00:00:00Z") == [], "any deleted_at hides, whatever it is"


def test_include_invalidated_bypasses_validity_and_as_of(notes: Caller) -> None:
    notes.upsert(record("ended", **BETWEEN), record("not yet", validFrom=FUTURE), record("gone"))
    notes.delete("gone")
    everything = ["ended", "gone", "not yet"]
    assert notes.found(includeInvalidated=True) == everything
    assert notes.found(includeInvalidated=True, asOf="2015-01-01T00:00:00Z") == everything


def test_a_soft_delete_keeps_the_record_for_audits(notes: Caller) -> None:
    notes.upsert(record("a", metadata={"k": "v"}, payload="aGk="))
    before = notes.stored("a")
    assert notes.delete("a")
    assert notes.found() == []
    assert notes.found(includeInvalidated=True) == ["a"]
    after = notes.stored("a")
    assert instant(after.pop("deletedAt")) > instant(before["createdAt"])
    assert after == before, "nothing else changed, the version neither"


def test_a_hard_delete_removes_it(notes: Caller) -> None:
    notes.upsert(record("a"), record("b"))
    assert notes.delete("a", hard=True)
    assert notes.found(includeInvalidated=True) == ["b"]
    assert notes.stored("a") == {}


def test_existed_says_whether_there_was_something_to_delete(notes: Caller) -> None:
    assert not notes.delete("a"), "it was never there"
    assert not notes.delete("a", hard=True)
    notes.upsert(record("a"))
    assert notes.delete("a")
    assert not notes.delete("a"), "a tombstone is deleted already"
    assert notes.delete("a", hard=True), "unless it is to go for good"
    assert not notes.delete("a", hard=True)
    notes.upsert(record("ended", **BETWEEN), record("not yet", validFrom=FUTURE))
    assert notes.delete("ended")
    assert notes.delete("not yet")


def test_a_delete_without_an_id_is_refused(notes: Caller) -> None:
    assert "id: must not be empty" in notes.refused("Delete", id="")
    assert "id: must not be empty" in notes.refused("Delete", hard=True)


def test_an_upsert_brings_a_deleted_record_back(notes: Caller) -> None:
    notes.upsert(record("a"))
    notes.delete("a")
    assert notes.upsert(record("a", content="anew")) == [2]
    assert notes.found() == ["a"]
    revived = notes.stored("a")
    assert revived["content"] == "anew"
    assert "deletedAt" not in revived


def test_an_upsert_that_sets_deleted_at_writes_a_tombstone(notes: Caller) -> None:
    notes.upsert(record("a"))
    notes.delete("a")
    assert notes.upsert(record("a", deletedAt=PAST)) == [2]
    assert notes.found() == []
    assert notes.stored("a")["deletedAt"] == PAST
    assert not notes.delete("a")
    assert notes.stored("a")["deletedAt"] == PAST


def test_an_upsert_replaces_everything_but_created_at(notes: Caller) -> None:
    notes.upsert(
        record(
            "a",
            payload="aGk=",
            metadata={"k": "v"},
            createdAt=PAST,
            source="log/7",
            supersedes=["x"],
            **BETWEEN,
        )
    )
    notes.upsert(record("a", content="bare"))
    bare = notes.stored("a")
    assert instant(bare.pop("validFrom")) > instant(BETWEEN["validTo"])
    assert len(bare.pop("vector")) == 8
    assert bare == {"id": "a", "content": "bare", "createdAt": PAST, "version": "2"}


def test_created_at_is_that_of_the_first_upsert(notes: Caller) -> None:
    other = "2015-01-01T00:00:00Z"
    for id, given in (("now", None), ("past", PAST), ("future", FUTURE)):
        notes.upsert(record(id, createdAt=given))
        first = notes.stored(id)["createdAt"]
        assert given is None or first == given
        notes.upsert(record(id, createdAt=other))
        assert notes.stored(id)["createdAt"] == first
        notes.delete(id)
        notes.upsert(record(id))
        assert notes.stored(id)["createdAt"] == first, "a tombstone remembers it"
        notes.delete(id, hard=True)
        notes.upsert(record(id, createdAt=other))
        assert notes.stored(id)["createdAt"] == other, "and no one after that"
