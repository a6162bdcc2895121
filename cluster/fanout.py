"""One read over several shards of one process: two rounds at most, then one answer.

A host does this for its own shards, so that a namespace costs one answer a host and not one a
shard; `client.Grid` does the same over hosts with the same rules, `instants` and `merge`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mindgrid.cluster.instants import behind, settled
from mindgrid.cluster.merge import merge
from mindgrid.shards.clock import Instant
from mindgrid.shards.driver import Found
from mindgrid.shards.errors import InDoubt, MindgridError
from mindgrid.shards.types import Answer, Query, Record, Selection, Stamp, Want


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


def search_shards(
    shards: Sequence[Reads], queries: Sequence[Query], stamp: Stamp
) -> list[Answer | MindgridError]:
    """Return one answer for each query over all shards; an error of any shard is the query's."""
    if len(shards) == 1:
        return shards[0].search(queries, stamp)
    rounds = [shard.search(queries, stamp) for shard in shards]
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
        merged([answers[index] for answers in rounds], query.top_k)
        for index, query in enumerate(queries)
    ]


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
    numbers = list(wanted)
    found: dict[int, Found] = {}
    instants: list[Instant] = []
    doubtful = False
    for shard in numbers:
        part = shards[shard].get(wanted[shard], read.selection, read.want, stamp)
        if isinstance(part, InDoubt):
            doubtful = True
            instants.append(Instant(part.instant))
        elif isinstance(part, MindgridError):
            return part
        else:
            found[shard] = part
            instants.append(part.instant)
    if doubtful:
        return InDoubt("the namespace", max(instants))
    for position in behind(instants, read.selection):
        shard = numbers[position]
        part = shards[shard].get(wanted[shard], read.selection, read.want, settled(instants))
        if isinstance(part, MindgridError):
            return part
        found[shard] = part
    records = {shard: iter(part.records) for shard, part in found.items()}
    ordered: tuple[Record | None, ...] = tuple(next(records[shard]) for shard, _ in ids)
    return Found(ordered, max(instants))
