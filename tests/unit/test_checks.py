"""Every value a caller may get wrong is refused by name, and every odd but legal one is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mindgrid.shards.checks import (
    check_command,
    check_draft,
    check_ids,
    check_query,
    numeric,
    to_vector,
)
from mindgrid.shards.clock import YEAR_1, YEAR_9999, Instant
from mindgrid.shards.errors import InvalidRequest
from mindgrid.shards.types import (
    Delete,
    Draft,
    Expire,
    ExpireAction,
    Predicate,
    PredicateOp,
    Query,
    Selection,
    Space,
    Upsert,
    Vector,
)

SPACE = Space("fake", "small", "", 4)
NOTHING = np.empty(0, np.float32)
TINY = float(np.finfo(np.float32).smallest_subnormal)
HUGE = float(np.finfo(np.float32).max)


def vector(*values: float) -> Vector:
    return to_vector(values, "vector")


DRAFT = Draft("a", "apple pie", NOTHING)
QUERY = Query(vector(1, 0, 0, 0))


def refusal(draft: Draft) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_draft(draft, SPACE, 3)
    assert caught.value.field.startswith("records[3].")
    return caught.value


def query_refusal(query: Query, text: str = "") -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_query(query, SPACE, text)
    return caught.value


def selecting(*predicates: Predicate) -> Query:
    return replace(QUERY, selection=Selection(predicates=predicates))


def test_content_alone_or_a_vector_alone_or_both_make_a_record() -> None:
    check_draft(DRAFT, SPACE, 0)
    check_draft(replace(DRAFT, vector=vector(0, 0, 0, 1)), SPACE, 0)
    check_draft(replace(DRAFT, content="", vector=vector(0, 0, 0, 1)), SPACE, 0)


def test_an_empty_record_is_refused() -> None:
    assert "both are empty" in str(refusal(replace(DRAFT, content="")))


def test_a_wrong_length_names_both_lengths() -> None:
    text = str(refusal(replace(DRAFT, vector=vector(1, 2, 3))))
    assert "has 3 values" in text
    assert "4 dimensions" in text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e39, -1e300])
def test_a_value_that_float32_does_not_hold_is_named_by_its_index(bad: float) -> None:
    error = refusal(replace(DRAFT, vector=vector(1, 2, bad, bad)))
    assert error.field == "records[3].vector"
    assert "value 2 " in error.problem


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_vector_without_direction_is_refused(zero: float) -> None:
    assert "all zeros" in str(refusal(replace(DRAFT, vector=vector(zero, 0, zero, 0))))


@pytest.mark.parametrize("edge", [TINY, HUGE, -HUGE])
def test_the_edges_of_float32_are_kept(edge: float) -> None:
    check_draft(replace(DRAFT, vector=vector(edge, edge, 0, edge)), SPACE, 0)


@pytest.mark.parametrize("values", [["a"], [{}], [[1.0], [2.0]], [[1.0], 2.0], 3])
def test_what_is_no_list_of_numbers_is_no_vector(values: list[float]) -> None:
    with pytest.raises(InvalidRequest, match=r"query_vector: must be"):
        to_vector(values, "query_vector")


def test_a_vector_shares_nothing_with_what_it_was_made_of() -> None:
    source = np.ones(4, np.float32)
    made = to_vector(source, "vector")
    source[:] = 9
    assert made.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("id", ["a", "é" * 256, "a/b?c=d&e#f", "\x00", " ", "𝄞" * 128, "../.."])
def test_an_id_is_any_text_up_to_512_bytes(id: str) -> None:
    check_draft(replace(DRAFT, id=id), SPACE, 0)


@pytest.mark.parametrize(
    ("id", "word"),
    [("", "empty"), ("a" * 513, "513"), ("é" * 257, "514"), ("a\ud800", "surrogate")],
)
def test_an_id_that_is_empty_too_long_or_no_text_is_refused(id: str, word: str) -> None:
    assert word in refusal(replace(DRAFT, id=id)).problem
    assert word in refusal(replace(DRAFT, supersedes=("b", id))).problem
    with pytest.raises(InvalidRequest, match=word):
        check_command(Delete("", id), SPACE)
    with pytest.raises(InvalidRequest, match=rf"ids\[1\].*{word}"):
        check_ids(["b", id])


@pytest.mark.parametrize(
    "vector", [[1.0] * 4, np.ones(4), np.ones(4, int), np.ones((2, 2), np.float32), None, "1111"]
)
def test_a_vector_of_another_type_is_refused_and_not_a_traceback(vector: Any) -> None:
    assert "np.asarray" in refusal(replace(DRAFT, vector=vector)).problem
    assert "np.asarray" in query_refusal(replace(QUERY, vector=vector)).problem


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("valid_to", 1.5),
        ("created_at", "now"),
        ("if_version", "1"),
        ("metadata", [1]),
        ("supersedes", "h1"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    assert refusal(replace(DRAFT, **{field: value})).field == f"records[3].{field}"


def test_a_query_of_other_types_is_refused_by_name() -> None:
    assert query_refusal(replace(QUERY, top_k="3")).field == "top_k"
    bad = Predicate("k", "EQ", ("v",))  # type: ignore[arg-type]
    assert query_refusal(replace(QUERY, selection=Selection(predicates=(bad,)))).field == (
        "predicates[0].op"
    )


def test_a_filter_has_a_bounded_number_of_conditions() -> None:
    equals = {f"k{n}": "v" for n in range(200)}
    some = (Predicate("k", PredicateOp.EQ, ("v",)),)
    check_query(replace(QUERY, selection=Selection(equals, some * 56)), SPACE)
    refused = query_refusal(replace(QUERY, selection=Selection(equals, some * 57)))
    assert refused.field == "filter"
    assert "257 conditions, but at most 256" in refused.problem


@pytest.mark.parametrize("max_rows", [0, -1, 2**32])
def test_an_expire_is_bounded(max_rows: int) -> None:
    check_command(Expire("", {}, ExpireAction.INVALIDATE, 1), SPACE)
    with pytest.raises(InvalidRequest, match=f"max_rows: is {max_rows}"):
        check_command(Expire("", {}, ExpireAction.INVALIDATE, max_rows), SPACE)


def test_a_lone_surrogate_is_refused_wherever_text_is_stored() -> None:
    bad = "x\udfff"
    for field, draft in {
        "content": replace(DRAFT, content=bad),
        "source": replace(DRAFT, source=bad),
        "metadata": replace(DRAFT, metadata={"k": bad}),
        "supersedes[0]": replace(DRAFT, supersedes=(bad,)),
    }.items():
        assert refusal(draft).field == f"records[3].{field}"
    assert refusal(replace(DRAFT, metadata={bad: "v"})).field == "records[3].metadata"
    with pytest.raises(InvalidRequest, match="transaction_id"):
        check_command(Upsert(bad, (DRAFT,)), SPACE)
    assert query_refusal(Query(NOTHING), text=bad).field == "query_text"
    assert query_refusal(replace(QUERY, selection=Selection({"k": bad}))).field == "filter"


@pytest.mark.parametrize("field", ["created_at", "valid_from", "valid_to", "deleted_at"])
def test_times_lie_within_the_years_1_to_9999(field: str) -> None:
    for edge in (YEAR_1, YEAR_9999):
        check_draft(_with_time(field, edge), SPACE, 0)
    for outside in (Instant(YEAR_1 - 1), Instant(YEAR_9999 + 1)):
        assert refusal(_with_time(field, outside)).field == f"records[3].{field}"


def _with_time(field: str, time: Instant) -> Draft:
    return Draft("a", "apple pie", NOTHING, **{field: time})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["created_after", "created_before", "as_of", "known_at"])
def test_a_querys_times_have_the_same_bounds(field: str) -> None:
    selection = Selection(**{field: Instant(YEAR_9999 + 1)})  # type: ignore[arg-type]
    assert query_refusal(replace(QUERY, selection=selection)).field == field


def test_a_record_valid_at_no_instant_is_kept_as_given() -> None:
    check_draft(replace(DRAFT, valid_from=Instant(5), valid_to=Instant(4)), SPACE, 0)


def test_if_version_is_an_unsigned_64_bit_number() -> None:
    check_draft(replace(DRAFT, if_version=0), SPACE, 0)
    check_draft(replace(DRAFT, if_version=2**64 - 1), SPACE, 0)
    assert refusal(replace(DRAFT, if_version=-1)).field == "records[3].if_version"
    assert refusal(replace(DRAFT, if_version=2**64)).field == "records[3].if_version"


def test_wrong_types_from_a_handle_are_refused_too() -> None:
    assert "not int" in str(refusal(replace(DRAFT, id=7)))
    assert "not int" in str(refusal(replace(DRAFT, metadata={"n": 7})))
    assert "not str" in str(refusal(replace(DRAFT, payload="x")))


def test_the_bad_draft_of_a_batch_is_named() -> None:
    batch = Upsert("", (DRAFT, DRAFT, replace(DRAFT, id="")))
    with pytest.raises(InvalidRequest, match=r"^records\[2\]\.id: must not be empty$"):
        check_command(batch, SPACE)
    check_command(Upsert("", ()), SPACE)


def test_a_query_has_either_text_or_a_vector() -> None:
    assert check_query(QUERY, SPACE) == QUERY
    assert check_query(Query(NOTHING), SPACE, "apple").top_k == 10
    assert "not both" in str(query_refusal(QUERY, "apple"))
    assert "both are empty" in str(query_refusal(Query(NOTHING)))


def test_a_querys_vector_has_the_rules_of_a_records() -> None:
    assert "has 3 values" in str(query_refusal(Query(vector(1, 2, 3))))
    assert "all zeros" in str(query_refusal(Query(vector(0, 0, 0, 0))))
    assert "value 1 " in str(query_refusal(Query(vector(0, float("nan"), 0, 0))))


def test_top_k_0_is_10_and_10000_is_the_most() -> None:
    assert check_query(replace(QUERY, top_k=0), SPACE).top_k == 10
    assert check_query(replace(QUERY, top_k=10_000), SPACE).top_k == 10_000
    assert "10000" in str(query_refusal(replace(QUERY, top_k=10_001)))
    assert query_refusal(replace(QUERY, top_k=-1)).field == "top_k"


def test_a_predicate_without_key_is_refused() -> None:
    error = query_refusal(selecting(Predicate("", PredicateOp.EQ, ("a",))))
    assert error.field == "predicates[0].key"


@pytest.mark.parametrize("op", [op for op in PredicateOp if op is not PredicateOp.IN])
@pytest.mark.parametrize("values", [(), ("1", "2")])
def test_a_comparison_takes_exactly_one_value(op: PredicateOp, values: tuple[str, ...]) -> None:
    assert "exactly one value" in str(query_refusal(selecting(Predicate("k", op, values))))


def test_in_takes_one_or_more() -> None:
    check_query(selecting(Predicate("k", PredicateOp.IN, ("a", "b", ""))), SPACE)
    assert "one or more" in str(query_refusal(selecting(Predicate("k", PredicateOp.IN, ()))))


@pytest.mark.parametrize("op", [PredicateOp.GT, PredicateOp.GTE, PredicateOp.LT, PredicateOp.LTE])
def test_a_numeric_comparison_takes_a_number(op: PredicateOp) -> None:
    check_query(selecting(Predicate("k", op, ("1e3",))), SPACE)
    assert "'ten'" in str(query_refusal(selecting(Predicate("k", op, ("ten",)))))


def test_strings_are_compared_whatever_they_spell() -> None:
    check_query(selecting(Predicate("k", PredicateOp.NEQ, ("ten",))), SPACE)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0.0),
        ("-0.5", -0.5),
        ("+7", 7.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("1E-3", 0.001),
        ("007", 7.0),
        ("1e-999", 0.0),
        ("1" + "0" * 308, 1e308),
    ],
)
def test_a_finite_ascii_decimal_is_a_number(text: str, number: float) -> None:
    assert numeric(text) == number


@pytest.mark.parametrize(
    "text",
    [
        *("", " 1", "1 ", "1\n", "1_000", "1,5", "nan", "inf", "-Infinity", "0x10", "1e", "e3"),
        *(".", "-", "+-1", "1e999", "-1e999", "1.2.3", "1e1.5", "True", "1\x00"),
        *("\N{ARABIC-INDIC DIGIT ONE}", "\N{FULLWIDTH DIGIT ONE}", "\N{VULGAR FRACTION ONE HALF}"),
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert numeric(text) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_survives_its_own_spelling(number: float) -> None:
    assert numeric(repr(number)) == number


@given(st.text())
def test_numeric_never_raises_and_agrees_with_float(text: str) -> None:
    number = numeric(text)
    assert number is None or number == float(text)
