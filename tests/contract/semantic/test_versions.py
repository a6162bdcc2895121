"""Counting writes, writing on a condition, and batches: all of it or nothing."""

from __future__ import annotations

from tests.support.callers import Caller, Json, record


def test_ids_and_versions_are_aligned_with_the_records(notes: Caller) -> None:
    notes.upsert(record("b"))
    answer = notes.call("Upsert", records=[record("c"), record("b"), record("a"), record("b")])
    assert answer == {"ids": ["c", "b", "a", "b"], "versions": ["1", "2", "1", "3"]}


def test_an_empty_id_is_given_a_uuid(notes: Caller) -> None:
    answer = notes.call("Upsert", records=[record(""), record("", ifVersion=0), {"content": "x"}])
    assert answer["versions"] == ["1", "1", "1"]
    assert len(set(answer["ids"])) == 3
    assert {len(id) for id in answer["ids"]} == {36}
    assert notes.found() == sorted(answer["ids"])
    words = notes.refused("Upsert", code=9, records=[record("", ifVersion=1)])
    assert "current version is 0" in words, "a record that is yet to be named is at version 0"


def test_a_version_rises_by_one_on_each_upsert_and_on_nothing_else(notes: Caller) -> None:
    assert [notes.upsert(record("a", version=77))[0] for _ in range(3)] == [1, 2, 3]
    notes.upsert(record("b", supersedes=["a"]))
    notes.delete("a")
    notes.expire("INVALIDATE")
    notes.expire("SOFT_DELETE")
    assert notes.stored("a")["version"] == "3"
    assert notes.upsert(record("a")) == [4], "a tombstone keeps the counter"
    notes.delete("a", hard=True)
    assert notes.upsert(record("a")) == [1], "nothing keeps it after that"


def test_hits_carry_their_version_and_no_condition(notes: Caller) -> None:
    notes.upsert(record("a"))
    notes.upsert(record("a", ifVersion=1))
    (hit,) = notes.search()
    assert hit["record"]["version"] == "2"
    assert "ifVersion" not in hit["record"]


def test_if_version_writes_only_over_the_version_named(notes: Caller) -> None:
    assert notes.upsert(record("a", ifVersion=0)) == [1]
    assert notes.upsert(record("a", content="second", ifVersion="1")) == [2]
    for stale in (0, 1, 3, 2**64 - 1):
        words = notes.refused("Upsert", code=9, records=[record("a", ifVersion=stale)])
        assert "current version is 2" in words
    assert "current version is 0" in notes.refused(
        "Upsert", code=9, records=[record("new", ifVersion=1)]
    )
    assert notes.stored("a")["content"] == "second"
    assert notes.found() == ["a"]


def test_if_version_0_does_not_take_a_tombstone_for_nothing(notes: Caller) -> None:
    notes.upsert(record("a"))
    notes.delete("a")
    words = notes.refused("Upsert", code=9, records=[record("a", ifVersion=0)])
    assert "current version is 1" in words
    assert notes.upsert(record("a", ifVersion=1)) == [2]
    notes.delete("a", hard=True)
    assert notes.upsert(record("a", ifVersion=0)) == [1]


def test_a_failed_condition_anywhere_in_a_batch_changes_nothing(notes: Caller) -> None:
    notes.upsert(record("kept"))
    before = notes.stored("kept")
    for place in (0, 5, 9):
        batch = [record(f"b{n}", supersedes=["kept"]) for n in range(10)]
        batch[place]["ifVersion"] = 3
        batch.append(record("kept", content="changed"))
        assert f"b{place}" in notes.refused("Upsert", code=9, records=batch)
        assert notes.found(includeInvalidated=True) == ["kept"]
        assert notes.stored("kept") == before


def test_of_an_id_twice_in_a_batch_the_last_wins(notes: Caller) -> None:
    first, last = record("a", content="first", metadata={"k": "1"}), record("a", content="last")
    assert notes.upsert(first, record("b"), last) == [1, 1, 2]
    (hit,) = [hit for hit in notes.search() if hit["record"]["id"] == "a"]
    assert hit["record"]["content"] == "last"
    assert "metadata" not in hit["record"]
    assert hit["record"]["createdAt"] == notes.stored("b")["createdAt"]


def test_a_condition_looks_at_the_state_before_its_batch(notes: Caller) -> None:
    assert notes.upsert(record("a", ifVersion=0), record("a", ifVersion=0)) == [1, 2]
    batch = [record("a", ifVersion=2), record("a", ifVersion=3)]
    assert "current version is 2" in notes.refused("Upsert", code=9, records=batch)
    assert notes.stored("a")["version"] == "2"


def test_a_refused_record_takes_its_batch_along(notes: Caller) -> None:
    words = notes.refused("Upsert", records=[record("a"), {"id": "empty"}, record("b")])
    assert "records[1].content: set content or vector; both are empty" in words
    assert notes.found(includeInvalidated=True) == []


def test_no_records_are_an_empty_answer(notes: Caller) -> None:
    assert notes.call("Upsert", records=[]) == {}
    assert notes.call("Upsert") == {}


def test_a_repeated_transaction_is_answered_and_not_done_again(notes: Caller) -> None:
    records = [record("a"), record(""), record("b")]
    first = notes.call("Upsert", records=records, transactionId="t1")
    assert notes.call("Upsert", records=records, transactionId="t1") == first
    assert notes.stored("a")["version"] == "1"
    assert len(notes.found()) == 3
    deleted = [notes.call("Delete", id="a", transactionId="t2") for _ in range(2)]
    assert deleted == [{"existed": True}] * 2
    expire = {"action": "EXPIRE_ACTION_SOFT_DELETE", "maxRows": 1, "transactionId": "t3"}
    assert [notes.call("Expire", **expire) for _ in range(2)] == [{"affected": "1"}] * 2
    assert len(notes.found()) == 1


def test_another_namespace_knows_nothing_of_it(notes: Caller, english: Caller) -> None:
    notes.upsert(record("a", content="here"))
    assert english.found(includeInvalidated=True) == []
    assert english.upsert(record("a", content="there", ifVersion=0)) == [1]
    english.delete("a", hard=True)
    assert notes.stored("a")["content"] == "here"


def test_a_namespace_that_is_not_configured_is_not_found(notes: Caller) -> None:
    bodies: dict[str, Json] = {
        "Upsert": {"records": [record("a")]},
        "Search": {"queryText": "a"},
        "Delete": {"id": "a"},
        "Expire": {"action": 1, "maxRows": 1},
    }
    for method, body in bodies.items():
        words = notes.refused(method, 404, 5, **body, namespace="nowhere")
        assert "semantic/nowhere" in words
