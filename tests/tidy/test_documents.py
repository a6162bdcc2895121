"""The documents name what exists, the commands are real, and the first requests can be read."""

from __future__ import annotations

import re

import pytest
from tests.tidy.repository import ROOT, named_paths

from mindgrid.api import openapi
from mindgrid.api.wire import codec
from mindgrid.api.wire.events import (
    AppendBatchRequest,
    AppendRequest,
    DescribeRequest,
    RangeRequest,
    TailRequest,
)
from mindgrid.api.wire.events import ExpireRequest as ExpireEventsRequest
from mindgrid.api.wire.messages import (
    CountRequest,
    DeleteRequest,
    ExpireRequest,
    GetRequest,
    ListRequest,
    Message,
    SearchRequest,
    UpsertRequest,
)
from mindgrid.cluster.settings import load

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/log.md")
REQUESTS: dict[str, type[Message]] = {
    "$URL/Upsert": UpsertRequest,
    "$URL/Search": SearchRequest,
    "$URL/Delete": DeleteRequest,
    "$URL/Expire": ExpireRequest,
    "$LOG/Append": AppendRequest,
    "$LOG/Range": RangeRequest,
    "$LOG/Tail": TailRequest,
    "$LOG/Expire": ExpireEventsRequest,
    "$EVENTS/AppendBatch": AppendBatchRequest,
    "$EVENTS/Describe": DescribeRequest,
    "$RECORDS/Get": GetRequest,
    "$RECORDS/List": ListRequest,
    "$RECORDS/Count": CountRequest,
}
SECTIONS = ["Context", "Decision", "Consequences"]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))


def _commands(document: str) -> set[str]:
    """Return the make targets that a document tells to run, in backticks or in a block."""
    text = (ROOT / document).read_text()
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    return set(re.findall(r"^make ([a-z]+)", blocks, re.M)) | set(
        re.findall(r"`make ([a-z]+)[^`]*`", text)
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_path_that_a_document_names_exists(document: str) -> None:
    named = named_paths((ROOT / document).read_text())
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("floor", ["shards", "cluster", "api", "jobs"])
def test_the_architecture_asks_a_question_about_each_floor(floor: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert re.search(rf"^## `{floor}/`: .*\?$", text, re.M)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_commands_of_a_document_are_make_targets(document: str) -> None:
    commands = _commands(document)
    assert {"test", "setup" if document == "CONTRIBUTING.md" else "demo"} <= commands
    assert commands <= _make_targets()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "test" in _commands("README.md")
    steps = (ROOT / ".ci" / "run").read_text().splitlines()
    assert any(re.fullmatch(r"(exec )?make test", step.strip()) for step in steps)


def test_git_hooks_call_make_targets_and_fetch_nothing() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"repo: (\S+)", text)) == {"local"}
    entries = re.findall(r"entry: (.+)", text)
    assert entries
    assert {entry.removeprefix("make ") for entry in entries} <= _make_targets()


def test_the_first_requests_of_the_readme_are_read_by_the_door() -> None:
    text = (ROOT / "README.md").read_text().replace("'$BEFORE'", "2026-01-01T00:00:00Z")
    call = r"^(?:ID=\$\()?curl (?:-\w )?--json '(\{.*?\})' (\$\w+/\w+)(?:$| \|)"
    calls = re.findall(call, text, re.M | re.S)
    assert len(calls) == text.count("--json '"), "a request has another form"
    assert {verb for _, verb in calls} == set(REQUESTS)
    namespaces = {one.name for one in load(ROOT / "deploy" / "mindgrid.yaml").namespaces}
    for body, verb in calls:
        message = codec.decode(REQUESTS[verb], body.encode())
        assert message.namespace in namespaces  # type: ignore[attr-defined]
    services = dict(re.findall(r"^(\w+)=http://127\.0\.0\.1:8080(/\S+)$", text, re.M))
    paths = {re.sub(r"\$(\w+)", lambda name: services[name[1]], verb) for verb in REQUESTS}
    assert paths <= set(openapi.method_paths())


def test_decisions_are_numbered_without_gaps_and_have_three_sections() -> None:
    numbers = [path.name[:4] for path in DECISIONS]
    assert numbers == [f"{number:04}" for number in range(1, len(DECISIONS) + 1)]
    for path in DECISIONS:
        assert re.fullmatch(r"[0-9]{4}-[a-z0-9-]+\.md", path.name)
        text = path.read_text()
        assert re.match(rf"# {path.name[:4]}:? \S", text), f"{path.name}: its title has no number"
        assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS, path.name
