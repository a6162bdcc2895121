"""Where a record lives: its id names the shard, and the shard names the host."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from mindgrid.cluster.spec import NamespaceKey


def shard_of(id: str, shards: int) -> int:
    """Return the shard of a record, from 0 to `shards` - 1.

    Stored data depends on this function: it can never change for a generation that exists.
    Python's own `hash` is salted anew in each process and so is no candidate.
    """
    if shards == 1:
        return 0
    return _hash64(id.encode()) % shards


def host_of(key: NamespaceKey, shard: int, hosts: Sequence[str]) -> str:
    """Return the host in which a shard lives, whatever the order of `hosts`.

    Rendezvous hashing: each host bids for the shard and the highest bid wins, so that a host
    which is added takes shards over but moves none between the others.
    https://en.wikipedia.org/wiki/Rendezvous_hashing
    """
    assert hosts, "a cluster has at least one host"
    if len(hosts) == 1:
        return hosts[0]
    name = f"{key.block}/{key.name}/{shard}"
    return max(hosts, key=lambda host: (_hash64(f"{host} {name}".encode()), host))


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
