"""The demo: real texts go in over HTTP and are found by meaning, also after a host was killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mindgrid.cluster.supervisor import running_server
from mindgrid.jobs.docstrings import Docstring, docstrings, sources
from mindgrid.shards.errors import Unavailable

QUESTIONS = (
    "split a string by a pattern",
    "copy a whole folder with everything in it",
    "run a function later in another thread",
    "compute the average of some numbers",
    "read a configuration file with sections",
)
_BATCH = 64
_START_WAIT_S = 120.0
_BACK_WAIT_S = 60.0

_CONFIG = """\
server: {{host: 127.0.0.1, http: {{port: {http}}}, grpc: {{port: {grpc}}}}}
storage: {{path: {storage}}}
auth: {{mode: "off"}}
backends: [{{name: main, driver: lance}}]
namespaces:
  - block: semantic
    name: docs
    backend: main
    embedder: {{provider: local, model: all-MiniLM-L6-v2, dimensions: 384}}
"""

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Hit:
    id: str
    score: float
    content: str


class _Server:
    """A server of the demo's own, on free ports and a folder of its own."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.port = _free_port()
        config = storage.parent / "mindgrid.yaml"
        config.write_text(_CONFIG.format(http=self.port, grpc=_free_port(), storage=storage))
        command = [sys.executable, "-m", "mindgrid.jobs.cli", "serve", "--config", str(config)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Return once it is ready; its own words on standard error say why if it never is."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready"):
            raise Unavailable("the demo's server", f"it ended with {self._process.wait()}")

    def call(self, method: str, body: Json) -> Json:
        """Return the answer of POST /mindd.semantic.v1.Semantic/<method>."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        path = f"/mindd.semantic.v1.Semantic/{method}"
        headers = {"content-type": "application/json"}
        try:
            connection.request("POST", path, json.dumps({"namespace": "docs", **body}), headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable("the demo's server", str(error)) from error
        finally:
            connection.close()
        if response.status != 200:
            raise Unavailable("the demo's server", answer.decode(errors="replace"))
        found: Json = json.loads(answer)
        return found

    def search(self, text: str, **more: object) -> list[_Hit]:
        """Return the best hits for a question in plain words."""
        hits = self.call("Search", {"queryText": text, "topK": 3, **more}).get("hits", [])
        assert isinstance(hits, list)
        return [
            _Hit(hit["record"]["id"], hit["score"], hit["record"].get("content", ""))
            for hit in hits
        ]

    def kill_host(self) -> int:
        """End the process that holds the shards by SIGKILL, and return its number."""
        record = running_server(self.storage)
        hosts = [p for p in (record.processes if record else ()) if p.name.startswith("ray::Host")]
        if not hosts:
            raise Unavailable("the demo's host", "server.json names no process of it")
        os.kill(hosts[0].pid, signal.SIGKILL)
        return hosts[0].pid

    def stop(self) -> None:
        """End the server as a person would, by SIGTERM."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run(keep: Path | None) -> None:
    """Run the demo from start to end; raises Unavailable if a part of it does not come up."""
    console = Console()
    with _folder(keep) as folder:
        started = time.monotonic()
        server = _Server(folder / "storage")
        try:
            with console.status("Starting Ray, Serve and a host on this machine …"):
                server.wait()
            console.print(f"Server ready after {time.monotonic() - started:.0f} s.")
            texts = _read(console)
            _index(console, server, texts)
            answers = _ask(console, server)
            _revise(console, server)
            _kill_and_ask_again(console, server, answers)
        finally:
            server.stop()
    _say_what_next(console, keep)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="mindgrid-demo-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True)
    yield keep.absolute()


def _read(console: Console) -> list[Docstring]:
    files = sources()
    with _progress(console) as progress:
        task = progress.add_task("Reading the standard library", total=len(files))
        texts = []
        for source in files:
            texts += list(docstrings(source))
            progress.advance(task)
    return texts


def _index(console: Console, server: _Server, texts: list[Docstring]) -> None:
    started = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task("Embedding and storing", total=len(texts))
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            records = [
                {"id": one.id, "content": f"{one.id}: {one.text}", "metadata": one.metadata}
                for one in batch
            ]
            server.call("Upsert", {"records": records})
            progress.advance(task, len(batch))
    took = time.monotonic() - started
    console.print(
        f"{len(texts)} docstrings embedded, durable and searchable in {took:.0f} s "
        f"({len(texts) / took:.0f}/s; the model runs on one thread).\n"
    )


def _ask(console: Console, server: _Server) -> dict[str, list[_Hit]]:
    table = Table(title="Five questions", box=SIMPLE_HEAD, expand=True)
    table.add_column("score", justify="right", width=7)
    table.add_column("found", no_wrap=True, width=26)
    table.add_column("what it says", no_wrap=True, ratio=1)
    answers: dict[str, list[_Hit]] = {}
    for question in QUESTIONS:
        started = time.perf_counter()
        answers[question] = server.search(question)
        took_ms = 1000 * (time.perf_counter() - started)
        table.add_row(f"[dim]{took_ms:.0f} ms[/]", "", f"[bold]{question}[/]")
        for hit in answers[question]:
            table.add_row(f"{hit.score:.3f}", hit.id, hit.content.removeprefix(f"{hit.id}: "))
        table.add_section()
    console.print(table)
    return answers


def _revise(console: Console, server: _Server) -> None:
    """Show that a revised fact is gone now, and still there at the time when it held."""
    question = "where does the team keep its release notes"
    old = {"id": "fact-1", "content": "The team keeps its release notes in the wiki."}
    new = {"id": "fact-2", "content": "The team keeps its release notes in the repository."}
    server.call("Upsert", {"records": [old]})
    before = datetime.now(UTC).isoformat()
    time.sleep(0.01)
    server.call("Upsert", {"records": [{**new, "supersedes": ["fact-1"]}]})
    now = server.search(question, topK=1)
    then = server.search(question, topK=1, asOf=before)
    title = "A fact is revised: fact-2 supersedes fact-1"
    table = Table("asked", "answer", title=title, box=SIMPLE_HEAD)
    table.add_row("now", f"{now[0].id}: {now[0].content}")
    table.add_row(f"as of {before[11:23]}", f"{then[0].id}: {then[0].content}")
    console.print(table)
    if (now[0].id, then[0].id) != ("fact-2", "fact-1"):
        raise Unavailable("the demo", "the revised fact does not read as it should")


def _kill_and_ask_again(console: Console, server: _Server, answers: dict[str, list[_Hit]]) -> None:
    pid = server.kill_host()
    started = time.monotonic()
    while True:
        try:
            again = {question: server.search(question) for question in QUESTIONS}
            break
        except Unavailable:
            if time.monotonic() - started > _BACK_WAIT_S:
                raise
            time.sleep(0.1)
    if again != answers:
        raise Unavailable("the demo", "the answers after the kill differ from those before")
    console.print(
        f"Host process {pid} was killed with SIGKILL. {time.monotonic() - started:.1f} s later the "
        "same five questions have the same answers, score for score.\n"
    )


def _say_what_next(console: Console, keep: Path | None) -> None:
    console.print("What to try next:")
    console.print(
        "  make serve            a server of your own on 127.0.0.1:8080 (deploy/mindgrid.yaml)"
    )
    console.print("  README.md             first requests with curl, and Ray handles")
    console.print("  http://127.0.0.1:8080/docs    every route, once it runs")
    if keep is not None:
        console.print(
            f"  {keep}    the demo's storage: serve it with --config {keep}/mindgrid.yaml"
        )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
