"""One read over several shards of one process: a few rounds at most, then one answer.

    count words ─► settle ─► search each lane ─► settle ─► merge ─► fuse ─► fetch the records
    (by words)                                                      (HYBRID alone)

A host does this for its own shards, so that a namespace costs one answer a host and not one a
shard; `client.Grid` does the same over hosts with the same rules, `instants` and `merge`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from msgspec.structs import replace

from mindgrid.cluster.fusion import fused, lanes, needs_stats, of_hits, with_records
from mindgrid.cluster.instants import behind, settled
from mindgrid.cluster.merge import merge, merge_pages
from mindgrid.shards.clock import Instant
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import InDoubt, MindgridError
from mindgrid.shards.types import (
    Answer,
    Mode,
    Query,
    Record,
    Scan,
    Scanned,
    Selection,
    Stamp,
    Want,
)

_LaneResult = tuple[Answer | MindgridError, dict[str, int]]
"""The merged answer of a lane, and in which shard each of its hits lies."""


class Reads(Protocol):
    """What of a `SemanticShard` a read needs."""

    def search(self, queries: Sequence[Query], stamp: Stamp) -> list[Answer | MindgridError]:
        """See `SemanticShard.search`."""
        ...

    def get(
        self, ids: Sequence[str], selection: Selection, want: Want, stamp: Stamp
    ) -> Found | MindgridError:
        """See `SemanticShard.get`."""
        ...

    def scan(self, scan: Scan, stamp: Stamp) -> Scanned | MindgridError:
        """See `SemanticShard.scan`."""
        ...


def search_shards(
    shards: Sequence[Reads], queries: Sequence[Query], stamp: Stamp
) -> list[Answer | MindgridError]:
    """Return one answer for each query over all shards; an error of any shard is the query's."""
    asked = [lanes(query) for query in queries]
    counted = _counted(shards, [lane for own_lanes in asked for lane in own_lanes], stamp)
    found_by_lane = _search_lanes(shards, counted.lanes, counted.stamp)
    for at, error in counted.failures.items():
        found_by_lane[at] = error, {}
    found = iter(found_by_lane)
    results = [[next(found) for _ in own_lanes] for own_lanes in asked]
    return _fetched(shards, queries, results)


@dataclass(frozen=True, slots=True)
class _Counted:
    """Lanes with the statistics of all shards, the stamp at which these hold, and what failed."""

    lanes: list[Query]
    stamp: Stamp
    failures: dict[int, MindgridError]


def _counted(shards: Sequence[Reads], asked: list[Query], stamp: Stamp) -> _Counted:
    """Count the words of the lanes that need it; one shard does so by itself."""
    open_ = [at for at, lane in enumerate(asked) if needs_stats(lane)]
    if len(shards) == 1 or not open_:
        return _Counted(asked, stamp, {})
    counts = _search_lanes(shards, [replace(asked[at], top_k=0) for at in open_], stamp)
    counted, instants, failures = list(asked), [], {}
    for at, (count, _) in zip(open_, counts, strict=True):
        if isinstance(count, MindgridError):
            failures[at] = count
        else:
            counted[at] = replace(asked[at], stats=count.stats)
            instants.append(count.instant)
    return _Counted(counted, settled(instants) if instants else stamp, failures)


def _search_lanes(
    shards: Sequence[Reads], queries: Sequence[Query], stamp: Stamp
) -> list[_LaneResult]:
    """Return the merged answer of each lane, and in which shard each of its hits lies."""
    rounds = [shard.search(queries, stamp) for shard in shards]
    if len(shards) == 1:
        return [(answer, {}) for answer in rounds[0]]
    again: dict[tuple[int, Stamp], list[int]] = {}
    for index, query in enumerate(queries):
        column = [answers[index] for answers in rounds]
        instants = [
            Instant(answer.instant) for answer in column if isinstance(answer, Answer | InDoubt)
        ]
        if any(isinstance(answer, InDoubt) for answer in column):
            # Whoever asks again asks all shards at the instant that it names.
            rounds[0][index] = InDoubt("the namespace", max(instants))
        elif len(instants) == len(column):
            for shard in behind(instants, query.selection):
                again.setdefault((shard, settled(instants)), []).append(index)
    for (shard, exactly), indexes in again.items():
        answers = shards[shard].search([queries[index] for index in indexes], exactly)
        for index, answer in zip(indexes, answers, strict=True):
            rounds[shard][index] = answer
    return [
        (
            merged([answers[index] for answers in rounds], query.top_k),
            _places([answers[index] for answers in rounds]),
        )
        for index, query in enumerate(queries)
    ]


def _places(answers: Sequence[Answer | MindgridError]) -> dict[str, int]:
    return {
        hit.id: shard
        for shard, answer in enumerate(answers)
        if isinstance(answer, Answer)
        for hit in answer.hits
    }


def _whole(query: Query, results: Sequence[_LaneResult]) -> Answer | MindgridError:
    """Return the query's answer from those of its lanes."""
    answers: list[Answer] = []
    for answer, _ in results:
        if isinstance(answer, MindgridError):
            return answer
        answers.append(answer)
    return fused(query, answers)


def _fetched(
    shards: Sequence[Reads], queries: Sequence[Query], results: Sequence[Sequence[_LaneResult]]
) -> list[Answer | MindgridError]:
    """Return each query's answer from those of its lanes, with the records it wants.

    Records that the lanes left out are read at once for all queries that look at one instant.
    """
    answers = list(map(_whole, queries, results))
    bare: dict[tuple[Instant, Instant | None, Want], list[tuple[int, Answer]]] = {}
    for at, (query, answer) in enumerate(zip(queries, answers, strict=True)):
        if query.mode is Mode.HYBRID and query.want and isinstance(answer, Answer) and answer.hits:
            seen = answer.instant, query.selection.known_at, query.want
            bare.setdefault(seen, []).append((at, answer))
    for (instant, _, want), members in bare.items():
        ids: list[tuple[int, str]] = []
        for at, answer in members:
            places = ChainMap(*(found for _, found in results[at]))
            ids += [(places.get(hit.id, 0), hit.id) for hit in answer.hits]
        read, stamp = ById(of_hits(queries[members[0][0]]), want), Stamp(instant, exactly=True)
        found = get_from_shards(dict(enumerate(shards)), ids, read, stamp)
        if isinstance(found, MindgridError):
            for at, _ in members:
                answers[at] = found
            continue
        records = iter(found.records)
        for at, answer in members:
            answers[at] = with_records(answer, list(islice(records, len(answer.hits))))
    return answers


def merged(answers: Sequence[Answer | MindgridError], top_k: int) -> Answer | MindgridError:
    """Return the merged answer, or the first error: a partial answer would be a wrong one."""
    good: list[Answer] = []
    for answer in answers:
        if isinstance(answer, MindgridError):
            return answer
        good.append(answer)
    return merge(good, top_k)


@dataclass(frozen=True, slots=True)
class ById:
    """A read by id."""

    selection: Selection
    want: Want


def get_from_shards(
    shards: Mapping[int, Reads], ids: Sequence[tuple[int, str]], read: ById, stamp: Stamp
) -> Found | MindgridError:
    """Return the records with these ids, each from its shard, in order, as of one instant."""
    wanted: dict[int, list[str]] = {}
    for shard, id in ids:
        wanted.setdefault(shard, []).append(id)
    found = _settled(
        lambda shard, at: shards[shard].get(wanted[shard], read.selection, read.want, at),
        list(wanted),
        read.selection,
        stamp,
    )
    if isinstance(found, MindgridError):
        return found
    records = {shard: iter(part.records) for shard, part in found.items()}
    ordered: tuple[Record | None, ...] = tuple(next(records[shard]) for shard, _ in ids)
    return Found(ordered, max(part.instant for part in found.values()))


def scan_shards(shards: Sequence[Reads], scan: Scan, stamp: Stamp) -> Scanned | MindgridError:
    """Return a page over all shards, as of one instant."""
    found = _settled(
        lambda shard, at: shards[shard].scan(scan, at), range(len(shards)), scan.selection, stamp
    )
    return found if isinstance(found, MindgridError) else merge_pages(found.values(), scan.limit)


class _Timed(Protocol):
    @property
    def instant(self) -> Instant: ...


T = TypeVar("T", bound=_Timed)


def _settled(
    ask: Callable[[int, Stamp], T | MindgridError],
    shards: Sequence[int],
    selection: Selection,
    stamp: Stamp,
) -> dict[int, T] | MindgridError:
    """Ask each shard, and those behind once more, so that all answer at one instant."""
    found: dict[int, T] = {}
    doubtful: list[Instant] = []
    for shard in shards:
        part = ask(shard, stamp)
        if isinstance(part, InDoubt):
            doubtful.append(Instant(part.instant))
        elif isinstance(part, MindgridError):
            return part
        else:
            found[shard] = part
    if doubtful:
        instants = [*doubtful, *(part.instant for part in found.values())]
        return InDoubt("the namespace", max(instants))
    instants = [found[shard].instant for shard in shards]
    for position in behind(instants, selection):
        part = ask(shards[position], settled(instants))
        if isinstance(part, MindgridError):
            return part
        found[shards[position]] = part
    return found
