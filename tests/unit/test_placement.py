"""Placement: stable for ever, even, and moving as little as it can."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mindgrid.cluster.placement import host_of, shard_of
from mindgrid.cluster.spec import NamespaceKey

NOTES = NamespaceKey("semantic", "notes")
HOSTS = [f"host-{number}" for number in range(4)]


def test_a_records_shard_never_changes_between_releases() -> None:
    # Stored data depends on these numbers: a change here loses every record of every user.
    assert [shard_of(id, 5) for id in ("a", "b", "c", "ä", "記憶")] == [3, 3, 0, 4, 0]
    assert shard_of("a", 2**31) == 966_719_552


@given(st.text(min_size=1), st.integers(1, 64))
def test_every_id_has_a_shard(id: str, shards: int) -> None:
    assert 0 <= shard_of(id, shards) < shards


def test_records_spread_evenly_over_shards() -> None:
    counts = Counter(shard_of(f"record-{number}", 8) for number in range(8_000))
    assert all(850 < counts[shard] < 1_150 for shard in range(8))


def test_the_order_of_hosts_does_not_matter() -> None:
    for shard in range(100):
        assert host_of(NOTES, shard, HOSTS) == host_of(NOTES, shard, HOSTS[::-1])


def test_an_added_host_only_takes_shards_over() -> None:
    more = [*HOSTS, "host-4"]
    moved = 0
    for shard in range(1_000):
        before, after = host_of(NOTES, shard, HOSTS), host_of(NOTES, shard, more)
        assert after in (before, "host-4")
        moved += after != before
    assert 120 < moved < 280


def test_two_namespaces_of_one_shard_do_not_all_land_on_one_host() -> None:
    keys = [NamespaceKey("semantic", f"n{number}") for number in range(400)]
    counts = Counter(host_of(key, 0, HOSTS) for key in keys)
    assert all(60 < counts[host] < 140 for host in HOSTS)
