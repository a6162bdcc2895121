"""The service as its callers see it: a `Grid` checks, embeds, routes, fans out, merges and retries.

    search(text) ─► check ─► embed ─► lane of each host ─► settle on one instant ─► merge
    upsert(drafts) ─► check ─► embed ─► one shard: write lane of its host
                                    └─► several: `Directory.commit`, which orders those

Front replicas, Ray handles and the coordinator all use this one class over a `Directory`, so they
give the same answers and the same errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from mindgrid.cluster import port
from mindgrid.cluster.fusion import fused, lanes, needs_stats, of_hits, with_records
from mindgrid.cluster.gate import Part, write_bytes
from mindgrid.cluster.instants import behind, settled, stamp_read
from mindgrid.cluster.lanes import Deadline
from mindgrid.cluster.logs import Logs
from mindgrid.cluster.merge import merge, merge_pages
from mindgrid.cluster.port import Directory, ShardKey
from mindgrid.cluster.routing import Router, all_of, in_time
from mindgrid.cluster.spec import SEMANTIC, NamespaceKey
from mindgrid.cluster.table import Route
from mindgrid.cluster.transactions import single_part
from mindgrid.shards.checks import check_command, check_ids, check_query, check_selection
from mindgrid.shards.clock import Clock, Instant, SystemClock
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import (
    InvalidRequest,
    Locked,
    MindgridError,
    TextRefused,
    Unavailable,
)
from mindgrid.shards.types import (
    Answer,
    Command,
    Delete,
    Deleted,
    Draft,
    Expire,
    ExpireAction,
    Expired,
    Mode,
    Query,
    Record,
    Result,
    Scan,
    Scanned,
    Selection,
    Stamp,
    Upsert,
    Upserted,
    Want,
)

T = TypeVar("T")


class Embeds(Protocol):
    """What turns texts into vectors of a namespace's space."""

    async def embed(self, namespace: NamespaceKey, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one float32 vector for each text, in order; TextRefused names a bad one."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The answer, or the error, of each query of a batch, and the one instant of all."""

    answers: list[Answer | MindgridError]
    instant: Instant


class Grid:
    """All namespaces of a cluster. Belongs to the event loop it is first used in.

    Those of the episodic block are reached by `logs`; the methods here are the semantic block's.
    Every method raises NotFound for an unknown namespace, InvalidRequest for a bad value,
    Exhausted when a queue is full, Unavailable (naming shard and reason) or DeadlineExceeded when
    the retries or `deadline_s` are used up; None stands for the configured deadline.
    """

    def __init__(
        self, directory: Directory, embedders: Embeds | None = None, clock: Clock | None = None
    ) -> None:
        """Take what finds hosts, and what embeds; without it callers bring their vectors."""
        self._router = Router(directory)
        self.logs = Logs(self._router)
        self._embedders = embedders
        self._clock = clock or SystemClock()
        self._stamp: Stamp | None = None

    async def search(
        self, namespace: str, query: Query, text: str = "", deadline_s: float | None = None
    ) -> Answer:
        """Return the `top_k` best records, best first, ties to the smaller id.

        With `text` the query's vector must be empty; it is embedded, or its words are looked for,
        or both, as `query.mode` says.
        """
        key, _, deadline = await self._begin(namespace, deadline_s)
        return await self._search_at(key, query, text, None, deadline)

    async def search_batch(
        self,
        namespace: str,
        queries: Sequence[tuple[Query, str]],
        deadline_s: float | None = None,
    ) -> Batch:
        """Answer queries, each with its text or "", all at one instant.

        One that fails is answered by its error and does not touch the others. At most
        BATCH_QUERIES_MAX.
        """
        key, _, deadline = await self._begin(namespace, deadline_s)
        if len(queries) > BATCH_QUERIES_MAX:
            problem = f"has {len(queries)} queries, but at most {BATCH_QUERIES_MAX} are allowed"
            raise InvalidRequest("queries", problem)
        instant = (await self._page(key, Scan(), deadline)).instant
        stamp = Stamp(instant, exactly=True)
        vectors = await self._vectors_of(key, queries, deadline)
        turns = asyncio.Semaphore(_BATCH_AT_ONCE)

        async def answer(query: Query, text: str) -> Answer | MindgridError:
            async with turns:
                try:
                    vector = vectors.get(text)
                    return await self._search_at(key, query, text, stamp, deadline, vector)
                except MindgridError as error:
                    return error

        return Batch(await all_of(answer(query, text) for query, text in queries), instant)

    async def get(
        self,
        namespace: str,
        ids: Sequence[str],
        want: Want = Want.VALUES,
        selection: Selection | None = None,
        deadline_s: float | None = None,
    ) -> list[Record | None]:
        """Return the records with these ids, in order; None where `selection` sees none."""
        return list((await self.find(namespace, ids, want, selection, deadline_s)).records)

    async def find(
        self,
        namespace: str,
        ids: Sequence[str],
        want: Want = Want.VALUES,
        selection: Selection | None = None,
        deadline_s: float | None = None,
    ) -> Found:
        """Return what `get` does, and the instant of the read. At most IDS_MAX ids."""
        key, _, deadline = await self._begin(namespace, deadline_s)
        selection = selection or Selection()
        check_ids(ids)
        if len(ids) > IDS_MAX:
            raise InvalidRequest("ids", f"has {len(ids)} ids, but at most {IDS_MAX} are allowed")
        check_selection(selection)
        if not ids:
            return Found((), (await self._page(key, Scan(), deadline)).instant)
        read = port.GetItem(key, 0, (), selection, want, None)
        return await self._router.retried(
            deadline, lambda routes: self._get(routes.route(key), ids, read, deadline)
        )

    async def page(self, namespace: str, scan: Scan, deadline_s: float | None = None) -> Scanned:
        """Return the records of a page in the order of their ids, and how many there are in all.

        Whoever goes on behind the last id of each page meets every record once that was there
        throughout, whatever is written meanwhile. A `limit` of 0 counts only.
        """
        key, _, deadline = await self._begin(namespace, deadline_s)
        check_selection(scan.selection)
        if not 0 <= scan.limit <= PAGE_MAX:
            problem = f"is {scan.limit}, but must be from 0 to {PAGE_MAX}"
            raise InvalidRequest("page_size", problem)
        return await self._page(key, scan, deadline)

    async def upsert(
        self,
        namespace: str,
        drafts: Sequence[Draft],
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> tuple[tuple[str, ...], Upserted]:
        """Write all drafts and return their ids and versions, once durable and visible.

        An empty transaction id is chosen here, once, so that retries write nothing twice. An empty
        id follows from the transaction id and the draft's place: a caller who repeats both names
        the same records, in the same shards, where the transaction is known.

        All drafts are written in one commit or none is, whatever shards they lie in. Raises
        PreconditionFailed.
        """
        key, route, deadline = await self._begin(namespace, deadline_s)
        command = Upsert(transaction_id or str(uuid.uuid4()), ())
        check_command(command, route.spec.config.space)
        drafts = tuple(
            draft if draft.id else replace(draft, id=_id_of(command.transaction_id, index))
            for index, draft in enumerate(drafts)
        )
        command = replace(command, drafts=drafts)
        check_command(command, route.spec.config.space)
        if not drafts:
            return (), Upserted((), self._clock.now())
        command = await self._with_vectors(key, command, deadline)
        result = await self._router.retried(
            deadline, lambda routes: self._write(routes.route(key), command, deadline)
        )
        assert isinstance(result, Upserted)
        return tuple(draft.id for draft in drafts), result

    async def delete(
        self,
        namespace: str,
        id: str,
        hard: bool = False,
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> Deleted:
        """Tombstone the record, or with `hard` remove it at every instant of knowledge."""
        key, route, deadline = await self._begin(namespace, deadline_s)
        command = Delete(transaction_id or str(uuid.uuid4()), id, hard)
        check_command(command, route.spec.config.space)
        result = await self._router.retried(
            deadline, lambda routes: self._write(routes.route(key), command, deadline)
        )
        assert isinstance(result, Deleted)
        return result

    async def expire(
        self,
        namespace: str,
        equals: Mapping[str, str],
        action: ExpireAction,
        max_rows: int,
        transaction_id: str = "",
        deadline_s: float | None = None,
    ) -> Expired:
        """Do `action` to the `max_rows` oldest records that it applies to and `equals` matches.

        In one commit: a search sees all of it or nothing. The records are chosen first: over
        several shards one that no longer matches when they are written is left as it is.
        """
        key, route, deadline = await self._begin(namespace, deadline_s)
        command = Expire(transaction_id or str(uuid.uuid4()), equals, action, max_rows)
        check_command(command, route.spec.config.space)
        result = await self._router.retried(
            deadline, lambda routes: self._write(routes.route(key), command, deadline)
        )
        assert isinstance(result, Expired)
        return result

    async def ready(self) -> None:
        """See `Router.ready`."""
        await self._router.ready()

    async def status(self) -> list[port.HostStatus]:
        """See `Router.status`."""
        return await self._router.status()

    async def close(self) -> None:
        """Give up all that waits; the hosts go on."""
        await self.logs.close()
        await self._router.close()

    # Reads

    async def _search_at(
        self,
        key: NamespaceKey,
        query: Query,
        text: str,
        stamp: Stamp | None,
        deadline: Deadline,
        vector: NDArray[np.float32] | None = None,
    ) -> Answer:
        query = check_query(query, self._router.routes.route(key).spec.config.space, text)
        if text and query.mode is not Mode.SPARSE:
            if vector is None:
                vector = await self._query_vector(key, text, deadline)
            query = replace(query, vector=vector)
        return await self._router.retried(
            deadline, lambda routes: self._search(routes.route(key), query, stamp, deadline)
        )

    async def _search(
        self, route: Route, query: Query, stamp: Stamp | None, deadline: Deadline
    ) -> Answer:
        if len(route.by_host) == 1:
            # One host stamps the read with its own clock, and settles its shards and joins the
            # lanes by itself.
            return await self._ask(route, 0, query, stamp, deadline)
        stamp, asked = stamp or self._shared_stamp(), lanes(replace(query, explain=False))
        if needs_stats(asked[-1]):
            count = await self._search_lane(route, replace(asked[-1], top_k=0), stamp, deadline)
            stamp = Stamp(count.instant, exactly=True)
            asked[-1] = replace(asked[-1], stats=count.stats)
        answers = await all_of(self._search_lane(route, lane, stamp, deadline) for lane in asked)
        answer = fused(query, answers)
        if query.mode is not Mode.HYBRID or not query.want or not answer.hits:
            return answer
        read = port.GetItem(
            route.spec.key,
            route.generation,
            (),
            of_hits(query),
            query.want,
            Stamp(answer.instant, exactly=True),
        )
        ids = [hit.id for hit in answer.hits]
        found = await self._get(route, ids, read, deadline)
        complete = with_records(answer, found.records)
        if isinstance(complete, MindgridError):
            raise complete
        return complete

    async def _search_lane(
        self, route: Route, query: Query, stamp: Stamp, deadline: Deadline
    ) -> Answer:
        """Return the answer of all hosts to one lane, at one instant."""
        answers = await _settled(
            lambda host, stamp: self._ask(route, host, query, stamp, deadline),
            len(route.by_host),
            query.selection,
            stamp,
        )
        return merge(answers, query.top_k)

    async def _ask(
        self, route: Route, host: int, query: Query, stamp: Stamp | None, deadline: Deadline
    ) -> Answer:
        name, shards = route.by_host[host]
        lane = self._router.gate(name).lane_for(query)
        return await self._router.answered(
            name,
            Part(route.spec.key, route.generation, shards, stamp),
            lambda part: lane.submit(part.namespace, (part, query), deadline),
            deadline,
        )

    async def _get(
        self, route: Route, ids: Sequence[str], read: port.GetItem, deadline: Deadline
    ) -> Found:
        by_host: dict[str, list[int]] = {}
        for index, id in enumerate(ids):
            by_host.setdefault(route.hosts[route.shard_of(id)], []).append(index)
        hosts = list(by_host)

        async def ask(position: int, stamp: Stamp | None) -> Found:
            host = hosts[position]
            wanted = tuple((route.shard_of(ids[i]), ids[i]) for i in by_host[host])
            shards = tuple(sorted({shard for shard, _ in wanted}))
            return await self._router.answered(
                host,
                Part(route.spec.key, route.generation, shards, stamp),
                lambda part: self._router.gate(host).reads.submit(
                    part.namespace,
                    replace(read, generation=part.generation, ids=wanted, stamp=part.stamp),
                    deadline,
                ),
                deadline,
            )

        stamp = read.stamp or (self._shared_stamp() if len(hosts) > 1 else None)
        found = await _settled(ask, len(hosts), read.selection, stamp)
        records: list[Record | None] = [None] * len(ids)
        for host, answer in zip(hosts, found, strict=True):
            for index, record in zip(by_host[host], answer.records, strict=True):
                records[index] = record
        return Found(tuple(records), max(answer.instant for answer in found))

    async def _page(self, key: NamespaceKey, scan: Scan, deadline: Deadline) -> Scanned:
        return await self._router.retried(
            deadline, lambda routes: self._scan(routes.route(key), scan, deadline)
        )

    async def _scan(self, route: Route, scan: Scan, deadline: Deadline) -> Scanned:
        async def ask(position: int, stamp: Stamp | None) -> Scanned:
            host, shards = route.by_host[position]
            return await self._router.answered(
                host,
                Part(route.spec.key, route.generation, shards, stamp),
                lambda part: self._router.gate(host).scans.submit(
                    part.namespace,
                    port.ScanItem(part.namespace, part.generation, shards, scan, part.stamp),
                    deadline,
                ),
                deadline,
            )

        hosts = len(route.by_host)
        stamp = self._shared_stamp() if hosts > 1 else None
        pages = await _settled(ask, hosts, scan.selection, stamp)
        return merge_pages(pages, scan.limit)

    def _shared_stamp(self) -> Stamp:
        """Return one stamp for all reads that begin in this turn of the loop.

        Queries of one namespace with one stamp are one call of each shard; with a stamp each they
        would be as many calls.
        """
        if self._stamp is None:
            self._stamp = stamp_read(self._clock)
            asyncio.get_running_loop().call_soon(self._forget_stamp)
        return self._stamp

    def _forget_stamp(self) -> None:
        self._stamp = None

    # Writes

    async def _write(self, route: Route, command: Command, deadline: Deadline) -> Result:
        """Write to the one shard that the command concerns, or have it ordered over several."""
        shard = 0 if len(route.hosts) == 1 else single_part(command, route.shard_of)
        if shard is not None:
            with contextlib.suppress(Locked):
                return await self._commit(route, shard, command, deadline)
        # Where an id is held by a commit over several shards, those that order them wait for it.
        call = port.OrderedCall(route.spec.key, command, deadline.left())
        ordered = self._router.directory.commit(port.encode(call))
        what = f"a commit over several shards of {route.spec.key}"
        result: Result = port.decode_result(await in_time(deadline, what, ordered))
        return result

    async def _commit(
        self, route: Route, shard: int, command: Command, deadline: Deadline
    ) -> Result:
        host, namespace = route.hosts[shard], route.spec.key
        write = port.Write(ShardKey(namespace, route.generation, shard), command)
        result = await self._router.answered(
            host,
            Part(namespace, route.generation, (shard,), None),
            lambda _: self._router.gate(host).writes.submit(
                namespace, write, deadline, write_bytes(write)
            ),
            deadline,
        )
        assert isinstance(result, Upserted | Deleted | Expired)
        return result

    async def _with_vectors(self, key: NamespaceKey, command: Upsert, deadline: Deadline) -> Upsert:
        missing = [index for index, draft in enumerate(command.drafts) if not len(draft.vector)]
        if not missing:
            return command
        drafts = list(command.drafts)
        texts = [drafts[index].content for index in missing]
        try:
            vectors = await self._embed(key, texts, deadline)
        except TextRefused as error:
            field = f"records[{missing[error.index]}].content"
            raise InvalidRequest(field, error.problem) from None
        for index, vector in zip(missing, vectors, strict=True):
            drafts[index] = replace(drafts[index], vector=vector)
        return replace(command, drafts=tuple(drafts))

    async def _vectors_of(
        self, key: NamespaceKey, queries: Sequence[tuple[Query, str]], deadline: Deadline
    ) -> dict[str, NDArray[np.float32]]:
        """Embed the texts of a batch together; none if that fails, so that each fails by itself."""
        asked = {text: None for query, text in queries if text and query.mode is not Mode.SPARSE}
        texts = [text for text in asked if isinstance(text, str)]
        if not texts:
            return {}
        try:
            vectors = await self._embed(key, texts, deadline)
        except MindgridError:
            return {}
        return dict(zip(texts, vectors, strict=True))

    async def _query_vector(
        self, key: NamespaceKey, text: str, deadline: Deadline
    ) -> NDArray[np.float32]:
        try:
            vectors = await self._embed(key, [text], deadline)
        except TextRefused as error:
            raise InvalidRequest("query_text", error.problem) from None
        vector: NDArray[np.float32] = vectors[0]
        return vector

    async def _embed(
        self, key: NamespaceKey, texts: Sequence[str], deadline: Deadline
    ) -> NDArray[np.float32]:
        what = f"the embedder of {key}"
        if self._embedders is None:
            raise Unavailable(what, "this handle has none; bring vectors")
        # Ends the wait only: what callers share is computed on (embedders/cache.py).
        return await in_time(deadline, what, self._embedders.embed(key, texts))

    async def _begin(
        self, namespace: str, deadline_s: float | None
    ) -> tuple[NamespaceKey, Route, Deadline]:
        key = NamespaceKey(SEMANTIC, namespace)
        route, deadline = await self._router.begin(lambda routes: routes.route(key), deadline_s)
        return key, route, deadline


class _Timed(Protocol):
    @property
    def instant(self) -> Instant: ...


R = TypeVar("R", bound=_Timed)


async def _settled(
    ask: Callable[[int, Stamp | None], Coroutine[None, None, R]],
    hosts: int,
    selection: Selection,
    stamp: Stamp | None,
) -> list[R]:
    """Ask each host, and those behind once more, so that all answer at one instant."""
    found = await all_of(ask(host, stamp) for host in range(hosts))
    instants = [answer.instant for answer in found]
    again = behind(instants, selection)
    later = await all_of(ask(host, settled(instants)) for host in again)
    for host, answer in zip(again, later, strict=True):
        found[host] = answer
    return found


BATCH_QUERIES_MAX = 1_000
IDS_MAX = 10_000
PAGE_MAX = 10_000
_BATCH_AT_ONCE = 64
"""Queries of one batch under way together: the lanes have room for other callers."""
_IDS = uuid.UUID("6d696e64-6772-5964-8000-7265636f7264")


def _id_of(transaction_id: str, index: int) -> str:
    """Return the id of a draft that came without one."""
    return str(uuid.uuid5(_IDS, f"{transaction_id}/{index}"))
