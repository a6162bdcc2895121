"""The coordinator: no host waits for another's, and a storage folder is not taken for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from tests.support.grids import run

from mindgrid.cluster.coordinator import Looks, check_storage
from mindgrid.shards.errors import ConfigError


class Hosts:
    """Counts how often each host is looked at; `slow` answers nothing and `broken` has a bug."""

    def __init__(self) -> None:
        self.seen = dict.fromkeys(("broken", "good", "slow"), 0)
        self.answers = asyncio.Event()

    def look(self) -> Callable[[str], Coroutine[None, None, None]]:
        async def look(name: str) -> None:
            self.seen[name] += 1
            if name == "slow":
                await self.answers.wait()
            if name == "broken":
                raise ZeroDivisionError("a bug")

        return look


def test_a_slow_host_delays_no_others_next_look_and_gets_no_second_one_beside_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def claim() -> None:
        hosts, looks = Hosts(), Looks()
        for _ in range(5):
            await asyncio.wait_for(looks.round(hosts.seen, hosts.look(), 0.01), 1)
        assert hosts.seen == {"broken": 5, "good": 5, "slow": 1}
        assert "ZeroDivisionError" in caplog.text
        hosts.answers.set()
        await looks.round(hosts.seen, hosts.look(), 1)
        await looks.round(hosts.seen, hosts.look(), 1)
        assert hosts.seen["slow"] == 2

    run(claim)


def test_a_round_of_quick_looks_waits_for_all_of_them() -> None:
    async def claim() -> None:
        done: list[str] = []

        async def look(name: str) -> None:
            await asyncio.sleep(0.01)
            done.append(name)

        await Looks().round(("a", "b"), look, 5)
        assert done == ["a", "b"]
        await Looks().round((), look, 5)

    run(claim)


def test_another_storage_folder_is_refused_by_both_names(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (tmp_path / "link").symlink_to(here)
    check_storage(here, tmp_path / "there" / ".." / "here")
    check_storage(here, tmp_path / "link")
    with pytest.raises(ConfigError, match=rf"storage\.path: is {there}, but .* serves {here};"):
        check_storage(here, there)
