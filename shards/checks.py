"""What a command or a query must satisfy before any shard sees it, in one place for every caller.

HTTP and Ray handles call the same functions, so the verdicts and their words are the same. All
are pure; they raise InvalidRequest naming the field as the wire calls it, or return what is asked
of the engine. A shard asserts these rules and words no errors of its own.

`valid_to` before `valid_from` is accepted: such a record is valid at no instant and so is never
found by default, but it is stored as it was given, which is what an audit wants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from mindgrid.shards.clock import YEAR_1, YEAR_9999, Instant
from mindgrid.shards.errors import InvalidRequest
from mindgrid.shards.types import (
    DEPTH_DEFAULT,
    ID_BYTES_MAX,
    TOP_K_DEFAULT,
    TOP_K_MAX,
    Command,
    Delete,
    Deleted,
    Draft,
    Expire,
    Expired,
    Fusion,
    Mode,
    Predicate,
    PredicateOp,
    Query,
    Result,
    Selection,
    Space,
    Upsert,
    Upserted,
    Vector,
)

VERSION_MAX = 2**64 - 1
MAX_ROWS_MAX = 2**32 - 1
QUERY_BYTES_MAX = 65_536
"""Of a text whose words are looked for: each is looked up in every segment."""
CONDITIONS_MAX = 256
"""Each looks at a column of the whole shard, while no other read of it can begin."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NUMERIC_OPS = frozenset({PredicateOp.GT, PredicateOp.GTE, PredicateOp.LT, PredicateOp.LTE})


def numeric(value: str) -> float | None:
    """Return the float64 that `value` spells as an ASCII decimal, or None if it spells none.

    `float()` alone would also take blanks, underscores, other scripts' digits, `nan` and `inf`;
    `1e999` spells a number that float64 does not hold, and so is None too.
    """
    if _NUMBER.fullmatch(value) is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def to_vector(values: Sequence[float] | Vector, field: str) -> Vector:
    """Return `values` as a contiguous float32 vector that shares nothing with them.

    A value beyond float32 becomes infinite here, and is then refused by its index.
    """
    try:
        with np.errstate(over="ignore"):
            vector = np.array(values, dtype=np.float32, order="C")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, "must be a list of numbers") from error
    if vector.ndim != 1:
        raise InvalidRequest(field, f"must be one list of numbers, not {vector.ndim} dimensions")
    return vector


def check_command(command: Command, space: Space) -> None:
    """Refuse a command with any value that a shard could not keep."""
    check_text(command.transaction_id, "transaction_id", bytes_max=ID_BYTES_MAX)
    if isinstance(command, Delete):
        check_id(command.id, "id")
        return
    if isinstance(command, Expire):
        check_map(command.equals, "filter")
        if not 0 < command.max_rows <= MAX_ROWS_MAX:
            problem = f"is {command.max_rows}, but must be from 1 to {MAX_ROWS_MAX}"
            raise InvalidRequest("max_rows", problem)
        return
    for index, draft in enumerate(command.drafts):
        check_draft(draft, space, index)


def check_repeat(command: Command, first: Result, drafts: int | None = None) -> None:
    """Refuse a transaction id that comes back with a command its first result cannot answer.

    What a retry carries is not compared otherwise: it gets the first result, whatever it is.
    `drafts` is how many the whole Upsert has of which `command` is one shard's part.
    """
    match command:
        case Upsert():
            count = len(command.drafts) if drafts is None else drafts
            fits = isinstance(first, Upserted) and len(first.versions) == count
        case Delete():
            fits = isinstance(first, Deleted)
        case Expire():
            fits = isinstance(first, Expired)
    if not fits:
        problem = f"{command.transaction_id!r} was used for another request; choose a new one"
        raise InvalidRequest("transaction_id", problem)


def check_draft(draft: Draft, space: Space, index: int) -> None:
    """Refuse the draft at `index` of its batch; its vector may still be to be embedded."""
    try:
        _check_draft(draft, space)
    except InvalidRequest as error:
        # Names are put together only once something is wrong: a batch has thousands of drafts.
        raise InvalidRequest(f"records[{index}].{error.field}", error.problem) from None


def check_query(query: Query, space: Space, text: str = "") -> Query:
    """Return the query as it is asked, with its effective bounds; refuse it unless it has a side.

    `text` is what the caller gave: it is embedded for DENSE, looked for in SPARSE, both in HYBRID.
    """
    check_text(text, "query_text", None if query.mode is Mode.DENSE else QUERY_BYTES_MAX)
    if not isinstance(query.mode, Mode):
        raise InvalidRequest("mode", f"must be a Mode, not {query.mode!r:.64}")
    given = _is_given(query.vector, "query_vector")
    if query.mode is not Mode.DENSE:
        if not text:
            raise InvalidRequest("query_text", f"must be set: {query.mode.name} looks for words")
        if given:
            problem = f"{query.mode.name} takes query_text alone; leave the vector out"
            raise InvalidRequest("query_vector", problem)
    if text and given:
        raise InvalidRequest("query_vector", "set either query_text or query_vector, not both")
    if not text and not given:
        raise InvalidRequest("query_text", "set either query_text or query_vector; both are empty")
    if given:
        check_vector(query.vector, space, "query_vector")
    check_selection(query.selection)
    top_k = check_top_k(query.top_k)
    if query.mode is Mode.DENSE:
        return replace(query, top_k=top_k)
    _check_fusion(query.fusion)
    depth = max(_check_depth(query.depth), top_k)
    return replace(query, top_k=top_k, text=text, depth=depth)


def _check_depth(depth: int) -> int:
    if not isinstance(depth, int) or not 0 <= depth <= TOP_K_MAX:
        problem = f"is {depth}, but must be from 0 to {TOP_K_MAX}"
        raise InvalidRequest("rerank_candidate_k", problem)
    return depth or DEPTH_DEFAULT


def _check_fusion(fusion: Fusion) -> None:
    fields = "fusion.dense_weight", "fusion.sparse_weight"
    for field, weight in zip(fields, fusion.weights, strict=True):
        if not 0.0 <= weight < math.inf:
            raise InvalidRequest(field, f"is {weight}, but must be a finite number from 0 on")
    if not any(fusion.weights):
        raise InvalidRequest("fusion", "both weights are 0, so no lane would count")
    if not 0 < fusion.k <= MAX_ROWS_MAX:
        raise InvalidRequest("fusion.k", f"is {fusion.k}, but must be from 1 to {MAX_ROWS_MAX}")


def check_top_k(top_k: int) -> int:
    """Return how many hits are wanted; 0 stands for the default."""
    if not isinstance(top_k, int) or not 0 <= top_k <= TOP_K_MAX:
        raise InvalidRequest("top_k", f"is {top_k}, but must be from 0 to {TOP_K_MAX}")
    return top_k or TOP_K_DEFAULT


def check_selection(selection: Selection) -> None:
    """Refuse a selection that no record could be compared with."""
    check_map(selection.equals, "filter")
    conditions = len(selection.equals) + len(selection.predicates)
    if conditions > CONDITIONS_MAX:
        problem = f"with predicates it has {conditions} conditions, but at most {CONDITIONS_MAX}"
        raise InvalidRequest("filter", f"{problem} are allowed")
    for index, predicate in enumerate(selection.predicates):
        _check_predicate(predicate, f"predicates[{index}]")
    check_time(selection.created_after, "created_after")
    check_time(selection.created_before, "created_before")
    check_time(selection.as_of, "as_of")
    check_time(selection.known_at, "known_at")


def check_ids(ids: Iterable[str], field: str = "ids") -> None:
    """Refuse a list with any id that no record can have."""
    if isinstance(ids, str):
        raise InvalidRequest(field, "must be a list of ids, not one string")
    for index, id in enumerate(ids):
        try:
            check_id(id, field)
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}[{index}]", error.problem) from None


def check_id(id: str, field: str) -> None:
    """Refuse an id that is empty, too long, or not Unicode text."""
    check_text(id, field, bytes_max=ID_BYTES_MAX)
    if not id:
        raise InvalidRequest(field, "must not be empty")


def check_vector(vector: Vector, space: Space, field: str) -> None:
    """Refuse a vector of another length than the space's, with a bad value, or all zeros."""
    if len(vector) != space.dimensions:
        raise InvalidRequest(
            field,
            f"has {len(vector)} values, but the namespace's embedder "
            f"{space.provider}/{space.model} has {space.dimensions} dimensions",
        )
    # One product answers nearly always: it is a positive number only if every value is finite
    # and one is not zero. An overflow or underflow of the sum itself is left to the slow path.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        square = float(vector.dot(vector))
    if 0.0 < square < math.inf:
        return
    bad = np.flatnonzero(~np.isfinite(vector))
    if len(bad):
        raise InvalidRequest(
            field, f"value {bad[0]} is not a finite float32 (found {vector[bad[0]]})"
        )
    if not vector.any():
        raise InvalidRequest(field, "is all zeros, and so has no direction to compare")


def _check_draft(draft: Draft, space: Space) -> None:
    check_id(draft.id, "id")
    check_text(draft.content, "content")
    if _is_given(draft.vector, "vector"):
        check_vector(draft.vector, space, "vector")
    elif not draft.content:
        raise InvalidRequest("content", "set content or vector; both are empty")
    if not isinstance(draft.payload, bytes):
        raise InvalidRequest("payload", f"must be bytes, not {type(draft.payload).__name__}")
    check_map(draft.metadata, "metadata")
    check_time(draft.created_at, "created_at")
    check_time(draft.valid_from, "valid_from")
    check_time(draft.valid_to, "valid_to")
    check_time(draft.deleted_at, "deleted_at")
    check_ids(draft.supersedes, "supersedes")
    check_text(draft.source, "source")
    if draft.if_version is not None and not isinstance(draft.if_version, int):
        raise InvalidRequest("if_version", f"must be an int, not {draft.if_version!r:.64}")
    if draft.if_version is not None and not 0 <= draft.if_version <= VERSION_MAX:
        raise InvalidRequest(
            "if_version", f"is {draft.if_version}, but must be from 0 to {VERSION_MAX}"
        )


def _check_predicate(predicate: Predicate, field: str) -> None:
    if not predicate.key:
        raise InvalidRequest(f"{field}.key", "must not be empty")
    check_text(predicate.key, f"{field}.key")
    for value in predicate.values:
        check_text(value, f"{field}.values")
    if not isinstance(predicate.op, PredicateOp):
        raise InvalidRequest(f"{field}.op", f"must be a PredicateOp, not {predicate.op!r:.64}")
    count = len(predicate.values)
    if predicate.op is PredicateOp.IN:
        if count == 0:
            raise InvalidRequest(f"{field}.values", "IN takes one or more values, but has none")
    elif count != 1:
        raise InvalidRequest(
            f"{field}.values", f"{predicate.op.name} takes exactly one value, but has {count}"
        )
    if predicate.op in _NUMERIC_OPS and numeric(predicate.values[0]) is None:
        raise InvalidRequest(
            f"{field}.values",
            f"{predicate.op.name} compares numbers, but {predicate.values[0][:64]!r} is not a "
            "finite decimal such as 12, -0.5 or 1e6",
        )


def _is_given(vector: Vector, field: str) -> bool:
    """Return whether there is a vector; refuse what is none. Python callers may send anything."""
    if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.ndim != 1:
        problem = (
            "must be a NumPy array of float32 in one dimension: np.asarray(values, np.float32)"
        )
        raise InvalidRequest(field, problem)
    return len(vector) > 0


def check_map(pairs: Mapping[str, str], field: str) -> None:
    """Refuse what does not map Unicode text to Unicode text."""
    if not isinstance(pairs, Mapping):
        raise InvalidRequest(field, f"must map strings to strings, not be {type(pairs).__name__}")
    for key, value in pairs.items():
        check_text(key, field)
        check_text(value, field)


def check_text(text: str, field: str, bytes_max: int | None = None) -> None:
    """Refuse what is not Unicode text, or has more UTF-8 bytes than `bytes_max`."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be a string, not {type(text).__name__}")
    if text.isascii():
        size = len(text)
    else:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                field, f"has a lone surrogate at character {error.start}, which is not Unicode text"
            ) from None
    if bytes_max is not None and size > bytes_max:
        raise InvalidRequest(field, f"has {size} UTF-8 bytes, but at most {bytes_max} are allowed")


def check_time(time: Instant | None, field: str) -> None:
    """Refuse what is no instant of the years 1 to 9999, and not None either."""
    if time is not None and not isinstance(time, int):
        problem = f"must be an int, µs since 1970, not {type(time).__name__}"
        raise InvalidRequest(field, problem)
    if time is not None and not YEAR_1 <= time <= YEAR_9999:
        raise InvalidRequest(
            field, f"is {time} µs from 1970, but must lie within the years 1 to 9999"
        )
