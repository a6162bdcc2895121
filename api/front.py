"""The handlers, one a verb: they take a caller and a message, and know no transport."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from mindgrid.api.principal import Principal
from mindgrid.api.wire import convert
from mindgrid.api.wire.messages import (
    DeleteRequest,
    DeleteResponse,
    ExpireRequest,
    ExpireResponse,
    SearchRequest,
    SearchResponse,
    UpsertRequest,
    UpsertResponse,
)
from mindgrid.shards.errors import Unimplemented
from mindgrid.shards.types import (
    Answer,
    Deleted,
    Draft,
    ExpireAction,
    Expired,
    Query,
    Upserted,
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

    async def ready(self) -> None:
        """Return once the catalog is loaded and the hosts answer; else Unavailable."""
        ...


class Semantic:
    """The verbs of `mindd.semantic.v1.Semantic`."""

    def __init__(self, grid: Grid) -> None:
        """Answer from `grid`."""
        self._grid = grid
        self._writes: set[asyncio.Task[Any]] = set()

    async def upsert(self, principal: Principal, message: UpsertRequest) -> UpsertResponse:
        """Write all records or none."""
        drafts = convert.drafts(message)
        ids, result = await self._to_its_end(
            self._grid.upsert(message.namespace, drafts, message.transaction_id)
        )
        return UpsertResponse(ids=ids, versions=result.versions)

    async def search(self, principal: Principal, message: SearchRequest) -> SearchResponse:
        """Return the records nearest to the query, best first."""
        _refuse_what_is_not_built(message)
        query = convert.query(message)
        answer = await self._grid.search(message.namespace, query, message.query_text)
        return convert.search_response(answer)

    async def delete(self, principal: Principal, message: DeleteRequest) -> DeleteResponse:
        """Tombstone a record, or with `hard` remove it."""
        write = self._grid.delete(
            message.namespace, message.id, message.hard, message.transaction_id
        )
        deleted = await self._to_its_end(write)
        return DeleteResponse(existed=deleted.existed)

    async def expire(self, principal: Principal, message: ExpireRequest) -> ExpireResponse:
        """Invalidate, tombstone or remove the oldest records that match, `max_rows` at most."""
        action = convert.expire_action(message.action)
        write = self._grid.expire(
            message.namespace, message.filter, action, message.max_rows, message.transaction_id
        )
        expired = await self._to_its_end(write)
        return ExpireResponse(affected=expired.affected)

    async def _to_its_end(self, write: Coroutine[Any, Any, T]) -> T:
        """Return the write's result; a caller who leaves does not stop it half-way.

        Serve cancels the task of a request whose client has gone. A search is dropped by that, as
        it should be; a batch over several shards would be left with only some of them written.
        """
        task = asyncio.ensure_future(write)
        self._writes.add(task)  # The event loop itself keeps only weak references.
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # Where the caller has left, no one else looks at it.


def _refuse_what_is_not_built(message: SearchRequest) -> None:
    if message.known_at is not None:
        raise Unimplemented("known_at: comes with a later release; leave it unset")
