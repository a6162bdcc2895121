"""`mindgrid.connect`: the service for drivers, tasks and actors over Ray, without HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mindgrid.cluster.client import Batch, Embeds, Grid
from mindgrid.cluster.coordinator import RayDirectory
from mindgrid.cluster.embedders.protocol import EmbedderSpec, Embedding, Vectors
from mindgrid.cluster.embedders.service import EmbedService
from mindgrid.cluster.embedders.serving import reach
from mindgrid.cluster.joining import join
from mindgrid.cluster.log_handle import LogHandle
from mindgrid.cluster.port import Directory
from mindgrid.cluster.remote import RAY_NAMESPACE
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.types import (
    Answer,
    Deleted,
    Draft,
    ExpireAction,
    Expired,
    Query,
    Record,
    Scan,
    Scanned,
    Selection,
    Upserted,
    Want,
)

T = TypeVar("T")


class TableEmbedders:
    """Embeds as the routing table says: in a model's deployment if it runs, else in this process.

    Belongs to the event loop it is first used in.
    """

    def __init__(self, directory: Directory) -> None:
        """Take where the table comes from; it is fetched when a namespace is first met."""
        self._directory = directory
        self._known: frozenset[NamespaceKey] = frozenset()
        self._service = EmbedService({}, reach)

    async def embed(self, namespace: NamespaceKey, texts: Sequence[str]) -> Vectors:
        """See `EmbedService.embed`."""
        if namespace not in self._known:
            table = await self._directory.table(-1, "")
            embeddings = {
                spec.key: Embedding(EmbedderSpec(spec.config.space, spec.embedder), spec.cache_size)
                for spec in (holding.spec for holding in table.holdings)
            }
            self._service.learn(embeddings)
            self._known = frozenset(embeddings)
        return await self._service.embed(namespace, texts)

    async def close(self) -> None:
        """See `EmbedService.close`."""
        await self._service.close()


class Handle:
    """A `Grid` for code that is not asynchronous; its methods may be called from any thread.

    Every method takes and returns what that of `Grid` does, and raises the same errors. `logs` has
    those of the episodic block. A handle stays in its process: a task or an actor connects by
    itself, with its own.
    """

    def __init__(self, directory: Directory, embedders: Embeds | None) -> None:
        """Start the thread in which the grid lives; see `connect`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mindgrid-handle", daemon=True
        )
        self._thread.start()
        # Those that are given belong to whoever gives them.
        self._own = TableEmbedders(directory) if embedders is None else None
        self.grid = Grid(directory, embedders or self._own)
        self.logs = LogHandle(self._wait, self.grid.logs)

    def search(
        self, namespace: str, query: Query, text: str = "", deadline_s: float | None = None
    ) -> Answer:
        """Return the `top_k` best records for the query, or for `text` in place of its vector.

        See `Grid.search`.
        """
        return self._wait(self.grid.search(namespace, query, text, deadline_s))

    def get(
        self,
        namespace: str,
        ids: Sequence[str],
        want: Want = Want.VALUES,
        selection: Selection | None = None,
        deadline_s: float | None = None,
    ) -> list[Record | None]:
        """Return the records with these ids, in order; None where there is none. See `Grid.get`."""
        return self._wait(self.grid.get(namespace, ids, want, selection, deadline_s))

    def search_batch(
        self,
        namespace: str,
        queries: Sequence[tuple[Query, str]],
        deadline_s: float | None = None,
    ) -> Batch:
        """Answer queries, each with its text or "", at one instant. See `Grid.search_batch`."""
        return self._wait(self.grid.search_batch(namespace, queries, deadline_s))

    def page(self, namespace: str, scan: Scan, deadline_s: float | None = None) -> Scanned:
        """Return records in the order of their ids, a page at a time. See `Grid.page`."""
        return self._wait(self.grid.page(namespace, scan, deadline_s))

    def count(
        self, namespace: str, selection: Selection | None = None, deadline_s: float | None = None
    ) -> int:
        """Return how many records a selection allows; None: all that are live and valid now."""
        return self.page(namespace, Scan(selection or Selection()), deadline_s).count

    def upsert(
        self,
        namespace: str,
        drafts: Sequence[Draft],
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> tuple[tuple[str, ...], Upserted]:
        """Write all drafts in one commit; return their ids and versions. See `Grid.upsert`."""
        return self._wait(self.grid.upsert(namespace, drafts, transaction_id, deadline_s))

    def delete(
        self,
        namespace: str,
        id: str,
        hard: bool = False,
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> Deleted:
        """Tombstone the record, or with `hard` remove it. See `Grid.delete`."""
        return self._wait(self.grid.delete(namespace, id, hard, transaction_id, deadline_s))

    def expire(
        self,
        namespace: str,
        equals: Mapping[str, str],
        action: ExpireAction,
        max_rows: int,
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> Expired:
        """Do `action` to the `max_rows` oldest records that match. See `Grid.expire`."""
        return self._wait(
            self.grid.expire(namespace, equals, action, max_rows, transaction_id, deadline_s)
        )

    def close(self) -> None:
        """Give up what waits, and end the thread; the cluster goes on."""
        if self._loop.is_closed():
            return
        self._wait(self.grid.close())
        if self._own is not None:
            self._wait(self._own.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[None, None, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Of a caller that is interrupted, nothing is sent any more.
            future.cancel()
            raise


def connect(
    address: str = "auto",
    *,
    ray_namespace: str = RAY_NAMESPACE,
    storage: Path | None = None,
    embedders: Embeds | None = None,
) -> Handle:
    """Return a handle on the mindgrid of a Ray cluster.

    Inside a task or an actor, or after `ray.init`, the cluster is the one already joined and
    `address` is not looked at; else it is the one in the server's line `ready … ray <address>`.
    With `storage`, the server's storage folder, "auto" finds the server that runs on it, and a
    coordinator that is missing is started. `embedders` replaces those that the configuration
    names. Raises Unavailable if there is no such cluster.
    """
    join(address, ray_namespace, storage)
    directory = RayDirectory(ray_namespace, storage)
    return Handle(directory, embedders)
