"""The messages of the protos as plain structs, field for field, whatever carried them.

JSON and, later, protobuf are both turned into these, so that a handler knows no transport. Names
and order are the proto's (tested). Times are `Instant`s and vectors float32 arrays, since that is
all the wire's types can hold of what we keep; a field that is unset holds its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from mindgrid.shards.clock import Instant
from mindgrid.shards.types import Vector

NO_VECTOR: Vector = np.empty(0, dtype=np.float32)
NO_VECTOR.flags.writeable = False


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What all messages share."""


class Record(Message, frozen=True, kw_only=True):
    """A record as it is written and as it comes back."""

    id: str = ""
    content: str = ""
    payload: bytes = b""
    vector: Vector = NO_VECTOR
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    created_at: Instant | None = None
    valid_from: Instant | None = None
    valid_to: Instant | None = None
    deleted_at: Instant | None = None
    supersedes: Sequence[str] = ()
    source: str = ""
    version: int = 0
    if_version: int | None = None


class UpsertRequest(Message, frozen=True, kw_only=True):
    """Write all records or none."""

    namespace: str = ""
    records: Sequence[Record] = ()
    transaction_id: str = ""


class UpsertResponse(Message, frozen=True, kw_only=True):
    """Ids and new versions, aligned with the records."""

    ids: Sequence[str] = ()
    versions: Sequence[int] = ()


class FieldPredicate(Message, frozen=True, kw_only=True):
    """One comparison with a metadata value; `op` is a number of the proto's PredicateOp."""

    key: str = ""
    op: int = 0
    values: Sequence[str] = ()


class Fusion(Message, frozen=True, kw_only=True):
    """How HYBRID joins its lanes; `method` is a number of the proto's FusionMethod."""

    method: int = 0
    dense_weight: float = 0.0
    sparse_weight: float = 0.0
    k: int = 0


class SearchRequest(Message, frozen=True, kw_only=True):
    """One query; `mode` is a number, of the proto's SearchMode, perhaps one it does not know."""

    namespace: str = ""
    query_text: str = ""
    query_vector: Vector = NO_VECTOR
    top_k: int = 0
    filter: Mapping[str, str] = msgspec.field(default_factory=dict)
    include_payload: bool = False
    include_vector: bool = False
    as_of: Instant | None = None
    include_invalidated: bool = False
    ids_only: bool = False
    predicates: Sequence[FieldPredicate] = ()
    created_after: Instant | None = None
    created_before: Instant | None = None
    mode: int = 0
    rerank_candidate_k: int = 0
    known_at: Instant | None = None
    exact: bool = False
    explain: bool = False
    fusion: Fusion | None = None


class Explanation(Message, frozen=True, kw_only=True):
    """What each lane said of a hit; rank 0: the lane did not find it."""

    dense_rank: int = 0
    dense_score: float = 0.0
    sparse_rank: int = 0
    sparse_score: float = 0.0


class Hit(Message, frozen=True, kw_only=True):
    """One record found."""

    record: Record | None = None
    score: float = 0.0
    explanation: Explanation | None = None


class SearchResponse(Message, frozen=True, kw_only=True):
    """The hits, best first."""

    hits: Sequence[Hit] = ()
    exact: bool = False
    scanned: int = 0


class DeleteRequest(Message, frozen=True, kw_only=True):
    """Tombstone a record, or with `hard` remove it."""

    namespace: str = ""
    id: str = ""
    hard: bool = False
    transaction_id: str = ""


class DeleteResponse(Message, frozen=True, kw_only=True):
    """Whether there was one."""

    existed: bool = False


class ExpireRequest(Message, frozen=True, kw_only=True):
    """Do `action`, a number of the proto's ExpireAction, to the oldest records that match."""

    namespace: str = ""
    filter: Mapping[str, str] = msgspec.field(default_factory=dict)
    action: int = 0
    max_rows: int = 0
    transaction_id: str = ""


class ExpireResponse(Message, frozen=True, kw_only=True):
    """How many were touched."""

    affected: int = 0


class Selection(Message, frozen=True, kw_only=True):
    """Which records a read may return."""

    filter: Mapping[str, str] = msgspec.field(default_factory=dict)
    predicates: Sequence[FieldPredicate] = ()
    created_after: Instant | None = None
    created_before: Instant | None = None
    as_of: Instant | None = None
    known_at: Instant | None = None
    include_invalidated: bool = False


class GetRequest(Message, frozen=True, kw_only=True):
    """Read records by id."""

    namespace: str = ""
    ids: Sequence[str] = ()
    selection: Selection | None = None
    include_payload: bool = False
    include_vector: bool = False


class Found(Message, frozen=True, kw_only=True):
    """One record asked for, unset if the selection allows none of its id."""

    record: Record | None = None


class GetResponse(Message, frozen=True, kw_only=True):
    """Aligned with the ids asked."""

    results: Sequence[Found] = ()
    read_at: Instant | None = None


class ListRequest(Message, frozen=True, kw_only=True):
    """Read a page of records in the order of their ids."""

    namespace: str = ""
    selection: Selection | None = None
    page_size: int = 0
    page_token: str = ""
    include_payload: bool = False
    include_vector: bool = False
    ids_only: bool = False


class ListResponse(Message, frozen=True, kw_only=True):
    """A page; without `next_page_token` the last one."""

    records: Sequence[Record] = ()
    next_page_token: str = ""
    read_at: Instant | None = None


class CountRequest(Message, frozen=True, kw_only=True):
    """Count what a selection allows."""

    namespace: str = ""
    selection: Selection | None = None


class CountResponse(Message, frozen=True, kw_only=True):
    """How many there are."""

    count: int = 0
    read_at: Instant | None = None


class SearchBatchRequest(Message, frozen=True, kw_only=True):
    """Many queries of one namespace; theirs is empty or the same."""

    namespace: str = ""
    queries: Sequence[SearchRequest] = ()


class Failure(Message, frozen=True, kw_only=True):
    """An error inside an answer that otherwise succeeded."""

    code: int = 0
    message: str = ""


class SearchResult(Message, frozen=True, kw_only=True):
    """One of both: what a query found, or why it failed."""

    response: SearchResponse | None = None
    failure: Failure | None = None


class SearchBatchResponse(Message, frozen=True, kw_only=True):
    """Aligned with the queries."""

    results: Sequence[SearchResult] = ()
    read_at: Instant | None = None
