"""The handlers, one a verb: they take a caller and a message, and know no transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from mindgrid.api.episodic import Logs
from mindgrid.api.principal import Principal
from mindgrid.api.wire import convert, messages, status
from mindgrid.api.wire.messages import (
    CountRequest,
    CountResponse,
    DeleteRequest,
    DeleteResponse,
    ExpireRequest,
    ExpireResponse,
    Failure,
    GetRequest,
    GetResponse,
    ListRequest,
    ListResponse,
    SearchBatchRequest,
    SearchBatchResponse,
    SearchRequest,
    SearchResponse,
    SearchResult,
    UpsertRequest,
    UpsertResponse,
)
from mindgrid.api.writes import Writes
from mindgrid.cluster.client import Batch
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import InvalidRequest, MindgridError
from mindgrid.shards.types import (
    Answer,
    Deleted,
    Draft,
    ExpireAction,
    Expired,
    Query,
    Scan,
    Scanned,
    Selection,
    Upserted,
    Want,
)

T = TypeVar("T")


class Grid(Protocol):
    """The cluster as the handlers use it; `cluster.client.Grid` is one, tests have another."""

    async def search(self, namespace: str, query: Query, text: str = "") -> Answer:
        """Return the best records; `text` is embedded where it is not empty."""
        ...

    async def upsert(
        self, namespace: str, drafts: Sequence[Draft], transaction_id: str = ""
    ) -> tuple[tuple[str, ...], Upserted]:
        """Write all drafts and return their ids and versions."""
        ...

    async def delete(
        self, namespace: str, id: str, hard: bool = False, transaction_id: str = ""
    ) -> Deleted:
        """Tombstone or remove one record."""
        ...

    async def expire(
        self,
        namespace: str,
        equals: Mapping[str, str],
        action: ExpireAction,
        max_rows: int,
        transaction_id: str = "",
    ) -> Expired:
        """Do `action` to the oldest records whose metadata match."""
        ...

    async def search_batch(self, namespace: str, queries: Sequence[tuple[Query, str]]) -> Batch:
        """Answer queries, each with its text or "", all at one instant."""
        ...

    async def find(
        self, namespace: str, ids: Sequence[str], want: Want, selection: Selection
    ) -> Found:
        """Return records by id."""
        ...

    async def page(self, namespace: str, scan: Scan) -> Scanned:
        """Return a page of records, and how many there are in all."""
        ...

    @property
    def logs(self) -> Logs:
        """The episodic namespaces."""
        ...

    async def ready(self) -> None:
        """Return once the catalog is loaded and the hosts answer; else Unavailable."""
        ...


class Semantic:
    """The verbs of `mindd.semantic.v1.Semantic`."""

    def __init__(self, grid: Grid, writes: Writes) -> None:
        """Answer from `grid`."""
        self._grid = grid
        self._writes = writes

    async def upsert(self, principal: Principal, message: UpsertRequest) -> UpsertResponse:
        """Write all records or none."""
        drafts = convert.drafts(message)
        ids, result = await self._writes.to_its_end(
            self._grid.upsert(message.namespace, drafts, message.transaction_id)
        )
        return UpsertResponse(ids=ids, versions=result.versions)

    async def search(self, principal: Principal, message: SearchRequest) -> SearchResponse:
        """Return the records nearest to the query, best first."""
        query = convert.query(message)
        answer = await self._grid.search(message.namespace, query, message.query_text)
        return convert.search_response(answer)

    async def delete(self, principal: Principal, message: DeleteRequest) -> DeleteResponse:
        """Tombstone a record, or with `hard` remove it."""
        write = self._grid.delete(
            message.namespace, message.id, message.hard, message.transaction_id
        )
        deleted = await self._writes.to_its_end(write)
        return DeleteResponse(existed=deleted.existed)

    async def expire(self, principal: Principal, message: ExpireRequest) -> ExpireResponse:
        """Invalidate, tombstone or remove the oldest records that match, `max_rows` at most."""
        action = convert.expire_action(message.action)
        write = self._grid.expire(
            message.namespace, message.filter, action, message.max_rows, message.transaction_id
        )
        expired = await self._writes.to_its_end(write)
        return ExpireResponse(affected=expired.affected)


class Records:
    """The verbs of `mindgrid.v1.Records`."""

    def __init__(self, grid: Grid) -> None:
        """Answer from `grid`."""
        self._grid = grid

    async def get(self, principal: Principal, message: GetRequest) -> GetResponse:
        """Return records by id, in the order asked."""
        selection, want = convert.selection(message.selection), convert.want(message)
        found = await self._grid.find(message.namespace, message.ids, want, selection)
        results = [
            messages.Found(record=None if one is None else convert.record(one))
            for one in found.records
        ]
        return GetResponse(results=results, read_at=found.instant)

    async def list(self, principal: Principal, message: ListRequest) -> ListResponse:
        """Return one page of records in the order of their ids."""
        page = await self._grid.page(message.namespace, convert.scan(message))
        return convert.list_response(message, page)

    async def count(self, principal: Principal, message: CountRequest) -> CountResponse:
        """Count the records that a selection allows."""
        scan = Scan(convert.selection(message.selection))
        page = await self._grid.page(message.namespace, scan)
        return CountResponse(count=page.count, read_at=page.instant)

    async def search_batch(
        self, principal: Principal, message: SearchBatchRequest
    ) -> SearchBatchResponse:
        """Answer many queries at one instant; one that fails does not touch the others."""
        results: list[SearchResult | None] = []
        asked: list[tuple[Query, str]] = []
        for index, query in enumerate(message.queries):
            try:
                asked.append((self._query(message, query, index), query.query_text))
                results.append(None)
            except InvalidRequest as error:
                results.append(_failed(error))
        batch = await self._grid.search_batch(message.namespace, asked)
        answers = iter(batch.answers)
        whole = [_result(next(answers)) if one is None else one for one in results]
        return SearchBatchResponse(results=whole, read_at=batch.instant)

    def _query(self, batch: SearchBatchRequest, message: SearchRequest, index: int) -> Query:
        if message.namespace not in ("", batch.namespace):
            problem = f"is {message.namespace!r}, but the batch asks {batch.namespace!r}"
            raise InvalidRequest(f"queries[{index}].namespace", problem)
        return convert.query(message)


def _result(answer: Answer | MindgridError) -> SearchResult:
    if isinstance(answer, MindgridError):
        return _failed(answer)
    return SearchResult(response=convert.search_response(answer))


def _failed(error: MindgridError) -> SearchResult:
    code, _, message = status.of(error)
    return SearchResult(failure=Failure(code=code, message=message))
