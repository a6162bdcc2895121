"""The catalog: durable, owned by one process, and stubborn about what its data was made with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mindgrid.cluster.catalog import Catalog, HostEntry
from mindgrid.cluster.process import Process
from mindgrid.cluster.spec import (
    GridSpec,
    LogSpec,
    NamespaceKey,
    NamespaceSpec,
    generation_folder,
)
from mindgrid.cluster.table import LogHolding
from mindgrid.shards.clock import SystemClock
from mindgrid.shards.config import Driver, ShardConfig
from mindgrid.shards.episodic.types import LogConfig
from mindgrid.shards.errors import ConfigError, Corruption, StorageLocked, Unavailable
from mindgrid.shards.types import Space

NOTES = NamespaceSpec(
    NamespaceKey("semantic", "notes"), ShardConfig(Space("fake", "m", "1", 8)), shards=2
)


def catalog_of(storage: Path) -> Catalog:
    return Catalog(storage, SystemClock())


def spec_of(storage: Path, *namespaces: NamespaceSpec) -> GridSpec:
    return GridSpec(storage, namespaces)


def store_something(catalog: Catalog) -> None:
    for namespace in catalog.namespaces:
        generation_folder(catalog.storage, namespace.spec.key, namespace.generation).mkdir(
            parents=True
        )


def test_what_was_configured_is_there_after_a_restart(tmp_path: Path) -> None:
    first = catalog_of(tmp_path)
    assert first.configure(spec_of(tmp_path, NOTES))
    first.add_hosts((HostEntry("host-0"),))
    process = Process("here", 7, 1.5)
    epoch = first.appoint("host-0", (Process("here", 6, 1.0), process))
    first.confirm("host-0", epoch, process)
    first.close()
    second = catalog_of(tmp_path)
    assert [namespace.spec for namespace in second.namespaces] == [NOTES]
    assert second.hosts == (HostEntry("host-0", "", epoch, (process,)),)
    assert second.table().holdings[0].generation == 1


EVENTS = LogSpec(NamespaceKey("episodic", "events"), LogConfig(retention_events=5))


def test_a_log_is_there_after_a_restart_and_may_be_tuned(tmp_path: Path) -> None:
    first = catalog_of(tmp_path)
    assert first.configure(GridSpec(tmp_path, (NOTES,), logs=(EVENTS,)))
    generation_folder(tmp_path, EVENTS.key, 1).mkdir(parents=True)
    first.close()
    second = catalog_of(tmp_path)
    assert second.table().logs == (LogHolding(EVENTS, 1),)
    assert not second.configure(GridSpec(tmp_path, (NOTES,), logs=(EVENTS,)))
    tuned = replace(EVENTS, config=LogConfig())
    assert second.configure(GridSpec(tmp_path, (NOTES,), logs=(tuned,)))
    assert second.table().logs == (LogHolding(tuned, 1),)
    with pytest.raises(ConfigError, match=r"episodic/events.*choose that driver"):
        second.configure(GridSpec(tmp_path, (), logs=(replace(EVENTS, driver=Driver.MEMORY),)))
    # Left out, it is not served; its events stay, and with them where they are.
    assert second.configure(GridSpec(tmp_path, ()))
    assert second.table().logs == ()
    assert second.configure(GridSpec(tmp_path, (), logs=(EVENTS,)))
    assert second.table().logs == (LogHolding(EVENTS, 1),)


def test_each_start_raises_the_version_durably(tmp_path: Path) -> None:
    versions = []
    for _ in range(3):
        catalog = catalog_of(tmp_path)
        versions.append(catalog.table().version)
        catalog.close()
    assert versions == [1, 2, 3]


def test_every_epoch_is_a_version_of_its_own(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    catalog.add_hosts((HostEntry("host-0"), HostEntry("host-1")))
    seen = {catalog.table().version}
    for name in ("host-0", "host-1", "host-0"):
        epoch = catalog.appoint(name, ())
        assert epoch not in seen
        assert epoch == catalog.table().version
        seen.add(epoch)


def test_the_same_configuration_again_changes_nothing(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    catalog.configure(spec_of(tmp_path, NOTES))
    before = catalog.table()
    assert not catalog.configure(spec_of(tmp_path, NOTES))
    assert catalog.table() == before


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    with pytest.raises(StorageLocked):
        catalog_of(tmp_path)
    catalog.close()
    catalog_of(tmp_path).close()


@pytest.mark.parametrize(
    ("change", "job"),
    [
        (replace(NOTES, shards=3), "mindgrid reshard semantic/notes"),
        *(
            (replace(NOTES, config=ShardConfig(space)), "mindgrid reembed semantic/notes")
            for space in (
                Space("local", "m", "1", 8),
                Space("fake", "n", "1", 8),
                Space("fake", "m", "2", 8),
                Space("fake", "m", "1", 9),
            )
        ),
        (replace(NOTES, driver=Driver.MEMORY), "choose that driver"),
    ],
)
def test_a_change_under_stored_data_is_refused_and_names_the_way_out(
    tmp_path: Path, change: NamespaceSpec, job: str
) -> None:
    catalog = catalog_of(tmp_path)
    catalog.configure(spec_of(tmp_path, NOTES))
    store_something(catalog)
    before = catalog.table()
    with pytest.raises(ConfigError, match=job):
        catalog.configure(spec_of(tmp_path, change))
    assert catalog.table() == before


def test_what_is_only_tuned_may_change_under_stored_data(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    catalog.configure(spec_of(tmp_path, NOTES))
    store_something(catalog)
    tuned = replace(NOTES, config=replace(NOTES.config, recall=0.99), cache_size=-1)
    assert catalog.configure(spec_of(tmp_path, tuned))
    assert catalog.table().holdings[0].spec == tuned


def test_a_namespace_without_data_may_change_and_starts_a_new_generation(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    catalog.configure(spec_of(tmp_path, NOTES))
    catalog.configure(spec_of(tmp_path, replace(NOTES, shards=3)))
    assert catalog.table().holdings[0].generation == 2


def test_a_namespace_taken_from_the_file_is_not_served_but_not_forgotten(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    catalog.configure(spec_of(tmp_path, NOTES))
    store_something(catalog)
    catalog.configure(spec_of(tmp_path))
    assert catalog.table().holdings == ()
    with pytest.raises(ConfigError):
        catalog.configure(spec_of(tmp_path, replace(NOTES, shards=3)))


def test_any_flipped_byte_shows(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    catalog.configure(spec_of(tmp_path, NOTES))
    catalog.close()
    path = tmp_path / "catalog" / "catalog.json"
    good = path.read_bytes()
    for position in range(0, len(good), 37):
        bad = bytearray(good)
        bad[position] ^= 0x04
        path.write_bytes(bad)
        with pytest.raises(Corruption, match=r"catalog\.json is damaged"):
            catalog_of(tmp_path)
    path.write_bytes(good)
    catalog_of(tmp_path).close()


def test_a_missing_catalog_over_stored_data_is_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "semantic").mkdir()
    with pytest.raises(Corruption, match="it is missing, although"):
        catalog_of(tmp_path)


def test_a_folder_that_cannot_be_written_is_unavailable_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "catalog").write_text("a file where a folder should be")
    with pytest.raises(Unavailable, match="File exists"):
        catalog_of(tmp_path)


def test_a_catalog_of_logs_alone_is_not_empty(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, SystemClock())
    assert catalog.is_empty
    catalog.configure(GridSpec(tmp_path, (), logs=(LogSpec(NamespaceKey("episodic", "log")),)))
    assert not catalog.is_empty
    catalog.close()
