"""`mindgrid status`: what a running server holds, and in which processes."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE_HEAD as PLAIN
from rich.console import Console
from rich.table import Table

from mindgrid.cluster import port
from mindgrid.cluster.coordinator import CoordinatorStatus, RayDirectory
from mindgrid.cluster.joining import join
from mindgrid.cluster.port import HostStatus
from mindgrid.cluster.process import Process
from mindgrid.cluster.remote import RAY_NAMESPACE
from mindgrid.cluster.supervisor import ServerRecord, running_server
from mindgrid.cluster.table import Table as Routing
from mindgrid.shards.errors import MindgridError


def show(storage: Path) -> None:
    """Print the state of the server on `storage`; raises Unavailable if none runs there."""
    join("auto", RAY_NAMESPACE, storage)
    server = running_server(storage)
    assert server is not None, "it was joined just now"
    coordinator, table, hosts = asyncio.run(_ask(RayDirectory(RAY_NAMESPACE)))
    # A pipe has no width of its own; wide enough that no name is cut.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_processes(server, coordinator, hosts))
    if table.holdings:
        console.print(_shards(table, hosts))
    if table.logs:
        console.print(_logs(table, hosts))


async def _ask(
    directory: RayDirectory,
) -> tuple[CoordinatorStatus, Routing, dict[str, HostStatus | MindgridError]]:
    coordinator, table = await asyncio.gather(directory.status(), directory.table(-1, ""))

    async def one(name: str) -> HostStatus | MindgridError:
        try:
            return port.decode_status(await directory.port(name).status())
        except MindgridError as error:
            return error

    names = [host.name for host in coordinator.hosts]
    found = await asyncio.gather(*map(one, names))
    return coordinator, table, dict(zip(names, found, strict=True))


def _processes(
    server: ServerRecord,
    coordinator: CoordinatorStatus,
    hosts: dict[str, HostStatus | MindgridError],
) -> Table:
    table = Table(
        "process",
        "pid",
        "machine",
        "memory",
        "state",
        title=f"{server.http} {server.state}",
        box=PLAIN,
    )

    def add(name: str, process: Process, memory: str, state: str) -> None:
        # The machine's own name; what follows it tells one boot of it from the next.
        machine = process.machine.partition("/")[0]
        table.add_row(name, str(process.pid), machine, memory, state)

    add("supervisor", server.supervisor.process, "", str(server.state))
    add("coordinator", coordinator.process, "", "serves")
    for view in coordinator.hosts:
        status = hosts[view.name]
        if isinstance(status, HostStatus):
            memory = f"{status.rss_bytes / 2**20:.0f} MiB"
            add(view.name, status.health.process, memory, view.trouble or "serves")
        else:
            table.add_row(view.name, "", "", "", view.trouble or str(status))
    for record in server.processes:
        if not record.name.startswith(_ACTORS):
            add(record.name, record.process, "", "")
    return table


_ACTORS = ("ray::Coordinator", "ray::HostActor")
"""Listed under their own names."""


def _shards(routes: Routing, hosts: dict[str, HostStatus | MindgridError]) -> Table:
    table = Table(title="shards", box=PLAIN)
    for name in ("shard", "host"):
        table.add_column(name, no_wrap=True)
    for name in ("records", "rows", "tail", "segments", "indexed", "journal", "last commit"):
        table.add_column(name, justify="right", no_wrap=True)
    reports = {
        str(report.shard): (name, report)
        for name, status in hosts.items()
        if isinstance(status, HostStatus)
        for report in status.shards
    }
    for holding in routes.holdings:
        for number in range(holding.spec.shards):
            key = port.ShardKey(holding.spec.key, holding.generation, number)
            host, report = reports.get(str(key), ("", None))
            if report is None:
                table.add_row(str(key), "not open yet")
                continue
            if report.status is None:
                table.add_row(str(key), f"{host}: {report.failure or 'opening'}")
                continue
            one = report.status
            numbers = (one.records, one.rows, one.tail_rows, one.segments, one.indexed_rows)
            journal = f"{one.journal_groups} / {one.journal_bytes / 2**20:.1f} MiB"
            table.add_row(str(key), host, *map(str, numbers), journal, _time(one.last_commit))
    return table


def _logs(routes: Routing, hosts: dict[str, HostStatus | MindgridError]) -> Table:
    table = Table(title="logs", box=PLAIN)
    for name in ("log", "host"):
        table.add_column(name, no_wrap=True)
    for name in ("events", "last cursor", "unsealed", "runs", "journal", "last commit"):
        table.add_column(name, justify="right", no_wrap=True)
    reports = {
        report.log: (name, report)
        for name, status in hosts.items()
        if isinstance(status, HostStatus)
        for report in status.logs
    }
    for holding in routes.logs:
        host, report = reports.get(holding.spec.key, ("", None))
        if report is None:
            table.add_row(str(holding.spec.key), "not open yet")
            continue
        if report.status is None:
            table.add_row(str(report.log), f"{host}: {report.failure or 'opening'}")
            continue
        one = report.status
        numbers = (one.events, one.last_cursor, one.unsealed_events, one.runs)
        journal = f"{one.journal_groups} / {one.journal_bytes / 2**20:.1f} MiB"
        table.add_row(str(report.log), host, *map(str, numbers), journal, _time(one.last_commit))
    return table


def _time(micros: int) -> str:
    if micros <= 0:
        return "-"
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
