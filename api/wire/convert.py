"""Messages to what the engine takes, and its answers to messages; shape only, no rules."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

from mindgrid.api.wire import events, messages
from mindgrid.api.wire.messages import (
    NO_VECTOR,
    Explanation,
    Hit,
    Record,
    SearchRequest,
    SearchResponse,
    UpsertRequest,
)
from mindgrid.shards import types
from mindgrid.shards.episodic.types import Event, EventAction, EventDraft, EventRange
from mindgrid.shards.errors import InvalidRequest
from mindgrid.shards.types import (
    Answer,
    Draft,
    ExpireAction,
    Fusion,
    FusionMethod,
    Mode,
    Predicate,
    PredicateOp,
    Query,
    Scan,
    Scanned,
    Selection,
    Want,
)

E = TypeVar("E", bound=Enum)


def drafts(request: UpsertRequest) -> tuple[Draft, ...]:
    """Return one draft for each record."""
    return tuple(_draft(record) for record in request.records)


def _draft(record: Record) -> Draft:
    return Draft(
        id=record.id,
        content=record.content,
        vector=record.vector,
        payload=record.payload,
        metadata=record.metadata,
        created_at=record.created_at,
        valid_from=record.valid_from,
        valid_to=record.valid_to,
        deleted_at=record.deleted_at,
        supersedes=tuple(record.supersedes),
        source=record.source,
        if_version=record.if_version,
    )


def query(request: SearchRequest) -> Query:
    """Return the query; where the caller gave text, its vector has length 0."""
    return Query(
        vector=request.query_vector,
        top_k=request.top_k,
        selection=selection(request),
        want=want(request),
        exact=request.exact,
        mode=_mode(request.mode),
        depth=request.rerank_candidate_k,
        fusion=_fusion(request.fusion),
        explain=request.explain,
    )


def _mode(number: int) -> Mode:
    return _member(Mode, number, "SEARCH_MODE", "mode") if number else Mode.DENSE


def _fusion(given: messages.Fusion | None) -> Fusion:
    """Return how the lanes are joined; unset weights are those of the method."""
    if given is None:
        return Fusion()
    method = FusionMethod.RRF
    if given.method:
        method = _member(FusionMethod, given.method, "FUSION_METHOD", "fusion.method")
    return Fusion(
        method, given.dense_weight or None, given.sparse_weight or None, given.k or Fusion().k
    )


def selection(request: SearchRequest | messages.Selection | None) -> Selection:
    """Return which records a read may return; unset: those that are live and valid now."""
    if request is None:
        return Selection()
    return Selection(
        equals=request.filter,
        predicates=tuple(
            Predicate(predicate.key, _op(predicate.op, index), tuple(predicate.values))
            for index, predicate in enumerate(request.predicates)
        ),
        created_after=request.created_after,
        created_before=request.created_before,
        as_of=request.as_of,
        known_at=request.known_at,
        include_invalidated=request.include_invalidated,
    )


def _op(number: int, index: int) -> PredicateOp:
    return _member(PredicateOp, number, "PREDICATE_OP", f"predicates[{index}].op")


def expire_action(number: int) -> ExpireAction:
    """Return what Expire is to do; raises InvalidRequest unless the number names it."""
    return _member(ExpireAction, number, "EXPIRE_ACTION", "action")


def _member(kind: type[E], number: int, prefix: str, field: str) -> E:
    try:
        return kind(number)
    except ValueError:
        names = ", ".join(f"{prefix}_{member.name}" for member in kind)
        raise InvalidRequest(field, f"is {number or 'unset'}; use one of {names}") from None


def want(request: SearchRequest | messages.GetRequest | messages.ListRequest) -> Want:
    """Return which parts of a record are wanted; `ids_only` overrides the rest."""
    if not isinstance(request, messages.GetRequest) and request.ids_only:
        return Want.ID
    parts = Want.VALUES
    if request.include_payload:
        parts |= Want.PAYLOAD
    if request.include_vector:
        parts |= Want.VECTOR
    return parts


def search_response(answer: Answer) -> SearchResponse:
    """Return the answer's hits as messages."""
    return SearchResponse(hits=_hits(answer.hits), exact=answer.exact, scanned=answer.scanned)


def _hits(hits: Sequence[types.Hit]) -> list[Hit]:
    return [
        Hit(
            record=Record(id=hit.id) if hit.record is None else record(hit.record),
            score=hit.score,
            explanation=None if hit.explanation is None else _explanation(hit.explanation),
        )
        for hit in hits
    ]


def _explanation(why: types.Explanation) -> Explanation:
    return Explanation(
        dense_rank=why.dense_rank,
        dense_score=why.dense_score,
        sparse_rank=why.sparse_rank,
        sparse_score=why.sparse_score,
    )


PAGE_DEFAULT = 100


def scan(request: messages.ListRequest) -> Scan:
    """Return the page that is asked for."""
    after = _after(request.page_token)
    size = request.page_size or PAGE_DEFAULT
    return Scan(selection(request.selection), after, size, want(request))


def list_response(request: messages.ListRequest, page: Scanned) -> messages.ListResponse:
    """Return the page as a message, with where the next one goes on."""
    records = [record(stored) for stored in page.records]
    if request.ids_only:
        records = [Record(id=stored.id, version=stored.version) for stored in page.records]
    token = _token(page.records[-1].id) if page.more else ""
    return messages.ListResponse(records=records, next_page_token=token, read_at=page.instant)


def _token(last: str) -> str:
    """Return the token of the page behind an id, which is all that it holds."""
    return base64.urlsafe_b64encode(b"1" + last.encode()).decode()


def _after(token: str) -> str:
    if not token:
        return ""
    try:
        data = base64.b64decode(token, b"-_", validate=True)
        if data[:1] == b"1":
            return data[1:].decode()
    except ValueError:
        pass
    raise InvalidRequest("page_token", "is not the next_page_token of a page")


def record(stored: types.Record) -> Record:
    """Return a stored record as a message; what the engine left empty stays unset."""
    return Record(
        id=stored.id,
        content=stored.content,
        payload=stored.payload,
        vector=stored.vector if len(stored.vector) else NO_VECTOR,
        metadata=stored.metadata,
        created_at=stored.created_at,
        valid_from=stored.valid_from,
        valid_to=stored.valid_to,
        deleted_at=stored.deleted_at,
        supersedes=stored.supersedes,
        source=stored.source,
        version=stored.version,
    )


def event_draft(given: events.AppendRequest | events.NewEvent) -> EventDraft:
    """Return the draft of an event."""
    return EventDraft(
        type=given.type,
        payload=given.payload,
        metadata=given.metadata,
        role=given.role,
        session_id=given.session_id,
        dedup_key=given.dedup_key,
        supersedes=tuple(given.supersedes),
        source=given.source,
    )


def event(stored: Event) -> events.Event:
    """Return a stored event as a message."""
    return events.Event(
        id=stored.id,
        cursor=stored.cursor,
        timestamp=stored.timestamp,
        type=stored.type,
        payload=stored.payload,
        metadata=stored.metadata,
        role=stored.role,
        session_id=stored.session_id,
        supersedes=stored.supersedes,
        source=stored.source,
        deleted_at=stored.deleted_at,
    )


def event_range(request: events.RangeRequest) -> EventRange:
    """Return the range that is asked for."""
    return EventRange(
        after_cursor=request.after_cursor,
        before_cursor=request.before_cursor,
        after_time=request.after_time,
        before_time=request.before_time,
        session_id=request.session_id,
        role=request.role,
        type=request.type,
        include_deleted=request.include_deleted,
        reverse=request.reverse,
    )


def followed(request: events.TailRequest) -> EventRange:
    """Return which events a tail is to hand out."""
    return EventRange(
        after_cursor=request.after_cursor,
        session_id=request.session_id,
        role=request.role,
        type=request.type,
        include_deleted=request.include_deleted,
    )


def event_action(number: int) -> EventAction:
    """Return what an episodic Expire is to do; InvalidRequest unless the number names it."""
    return _member(EventAction, number, "EXPIRE_ACTION", "action")
