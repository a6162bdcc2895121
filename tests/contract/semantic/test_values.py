"""Ids, times and bytes come back as they were given, or are refused by name."""

from __future__ import annotations

import base64

from tests.support.callers import Caller, record

ODD_IDS = [
    *("a/b?c=d&e#f", "../..", "%2F", " ", "\t\n", "\x00", "\x7f", "'; --", '"\\', "null", "0"),
    *("日本語", "שלום", "\U0001f600\u200d\U0001f468", "e\u0301", "\u00e9", "\ufeff", "\uffff"),
    *("x" * 512, "é" * 256, "\U0001d11e" * 128),
]


def test_any_text_is_an_id_and_no_two_are_alike(notes: Caller) -> None:
    notes.upsert(*(record(id, supersedes=[id]) for id in ODD_IDS))
    assert notes.found() == sorted(ODD_IDS)
    for id in ODD_IDS:
        stored = notes.stored(id)
        assert (stored["id"], stored["content"]) == (id, f"text of {id}")
        assert stored["supersedes"] == [id]
    for id in ODD_IDS[::2]:
        assert notes.delete(id)
    assert notes.found() == sorted(ODD_IDS[1::2])


def test_an_id_has_512_bytes_at_most(notes: Caller) -> None:
    for id in ("x" * 513, "é" * 257):
        bytes_ = len(id.encode())
        for field, batch in (("id", record(id)), ("supersedes[0]", record("a", supersedes=[id]))):
            words = notes.refused("Upsert", records=[record("b"), batch])
            assert f"records[1].{field}: has {bytes_} UTF-8 bytes, but at most 512" in words
        assert "at most 512" in notes.refused("Delete", id=id)
    words = notes.refused("Upsert", records=[record("a", supersedes=["b", ""])])
    assert words == "records[0].supersedes[1]: must not be empty"


TIMES = {
    "2024-01-01T00:00:00.123456789Z": "2024-01-01T00:00:00.123456Z",
    "2024-01-01T00:00:00.999999999Z": "2024-01-01T00:00:00.999999Z",
    "1969-12-31T23:59:59.9999999Z": "1969-12-31T23:59:59.999999Z",
    "2024-02-29T23:59:59.5+02:00": "2024-02-29T21:59:59.500Z",
    "0001-01-01T00:00:00Z": "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00.0000001Z": "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999999Z": "9999-12-31T23:59:59.999999Z",
}


def test_times_are_cut_to_the_microsecond_and_shown_as_kept(notes: Caller) -> None:
    fields = ("createdAt", "validFrom", "validTo", "deletedAt")
    notes.upsert(
        *(record(f"r{n}", **dict.fromkeys(fields, given)) for n, given in enumerate(TIMES))
    )
    hits = {hit["record"]["id"]: hit["record"] for hit in notes.search(includeInvalidated=True)}
    for n, kept in enumerate(TIMES.values()):
        assert [hits[f"r{n}"][field] for field in fields] == [kept] * 4
        assert [notes.stored(f"r{n}")[field] for field in fields] == [kept] * 4


def test_a_querys_times_are_cut_as_well(notes: Caller) -> None:
    notes.upsert(
        record(
            "a", createdAt="2024-01-01T00:00:00.000001Z", validFrom="2024-01-01T00:00:00.000001Z"
        )
    )
    assert notes.found(createdAfter="2024-01-01T00:00:00.0000009Z") == ["a"]
    assert notes.found(createdAfter="2024-01-01T00:00:00.0000019Z") == []
    assert notes.found(asOf="2024-01-01T00:00:00.0000009Z") == []
    assert notes.found(asOf="2024-01-01T00:00:00.0000019Z") == ["a"]


def test_a_time_outside_of_the_years_1_to_9999_is_refused_on_every_path(notes: Caller) -> None:
    outside = (
        "0000-12-31T23:59:59Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "10000-01-01T00:00:00Z",
    )
    for time in outside:
        for field in ("createdAt", "validFrom", "validTo", "deletedAt"):
            assert "records[0]." in notes.refused("Upsert", records=[record("a", **{field: time})])
        for field in ("asOf", "createdAfter", "createdBefore", "knownAt"):
            notes.refused("Search", **{"queryText": "x", field: time})  # type: ignore[arg-type]
    assert notes.found(includeInvalidated=True) == []


def test_payload_metadata_and_content_come_back_whole(notes: Caller) -> None:
    payload = base64.b64encode(bytes(range(256)) * 40).decode()
    metadata = {"": "", "k": "é\x00\U0001f600", "日本": "x" * 5_000}
    content = "line\r\n\ttab \x00 \U0001f600 " + "word " * 2_000
    notes.upsert(
        {"id": "a", "content": content, "payload": payload, "metadata": metadata, "source": "s/é"},
        record("empty", payload="", metadata={}),
    )
    stored = notes.stored("a")
    assert (stored["payload"], stored["metadata"]) == (payload, metadata)
    assert (stored["content"], stored["source"]) == (content, "s/é")
    assert notes.found(filter=metadata) == ["a"]
    assert notes.stored("empty").keys().isdisjoint({"payload", "metadata", "source"})
