"""A provider's key is in no error, no log and no request to anybody else; a missing one is told."""

from __future__ import annotations

import logging
import socket
import threading
import traceback
from pathlib import Path

import pytest
from tests.support.model_servers import (
    KEY,
    NOTES,
    QUICK,
    VARIABLE,
    Answer,
    Asked,
    Reply,
    always,
    embed,
    model_server,
    openai,
    run,
    spec,
)
from typer.testing import CliRunner

from mindgrid.cluster.embedders import registry
from mindgrid.cluster.embedders.protocol import EmbedderOptions, EmbedderSpec, Embedding
from mindgrid.cluster.embedders.service import EmbedService, build, check_here
from mindgrid.jobs.cli import app
from mindgrid.shards.errors import ConfigError, MindgridError
from mindgrid.shards.types import Space

# What of it may occur by chance: fewer characters than this.
PART = 8


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def shows_the_key(text: str) -> bool:
    return any(KEY[at : at + PART] in text for at in range(len(KEY) - PART + 1))


def all_of(error: BaseException) -> str:
    """Return whatever a log, a debugger or another process may see of an error."""
    parts = ["".join(traceback.format_exception(error))]
    seen: list[BaseException | None] = [error]
    for one in seen:
        if one is not None:
            parts += [str(one), repr(one), repr(one.args), repr(vars(one))]
            assert not type(one).__module__.startswith(("httpx2", "httpcore2")), (
                "it has the request"
            )
            seen += [one.__cause__, one.__context__]
    return "\n".join(parts)


def echo(status: int) -> Answer:
    """Return a server that shows all it was sent, wherever it can."""

    def reply(asked: Asked) -> Reply:
        sent = asked.headers["authorization"]
        headers = {"x-echo": sent, "retry-after": sent, "location": f"/{sent}"}
        return Reply(status, {"error": {"message": f"no: {sent}"}}, headers, reason=sent)

    return reply


def part_of_the_key(asked: Asked) -> Reply:
    return Reply(400, f"the key {KEY[:12]}… is not good".encode())


def echo_in_html(asked: Asked) -> Reply:
    return Reply(502, b"<html>" + b"x" * 290 + asked.headers["authorization"].encode())


def echo_as_vectors(asked: Asked) -> Reply:
    return Reply(200, {"data": [{"index": asked.headers["authorization"], "embedding": []}]})


def echo_as_base64(asked: Asked) -> Reply:
    return Reply(200, {"data": [{"index": 0, "embedding": asked.headers["authorization"]}]})


def wrong_length(asked: Asked) -> Reply:
    return openai(Asked(asked.path, asked.headers, {**asked.body, "dimensions": 3}))


def bad_gzip(asked: Asked) -> Reply:
    return Reply(200, asked.headers["authorization"].encode(), {"content-encoding": "gzip"})


def cut_short(asked: Asked) -> Reply:
    return Reply(200, b"{", {"content-length": "100", "connection": "close"})


FAILURES: dict[str, Answer] = {
    **{f"echo {status}": echo(status) for status in (204, 301, 307, 308, 400, 401, 403)},
    **{f"echo {status}": echo(status) for status in (404, 413, 418, 422, 429, 500, 503)},
    "part of the key": part_of_the_key,
    "echo in HTML": echo_in_html,
    "echo as vectors": echo_as_vectors,
    "echo as base64": echo_as_base64,
    "wrong length": wrong_length,
    "bad gzip": bad_gzip,
    "cut short": cut_short,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_no_failure_shows_the_key(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with model_server(FAILURES[failure]) as server:
        with pytest.raises(MindgridError) as caught:
            embed(spec("openai", server.url, key=VARIABLE), ["a", "b"])
        assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert not shows_the_key(all_of(caught.value))
    assert not shows_the_key(caplog.text)


def test_no_failure_of_the_connection_shows_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(MindgridError, match="no answer within") as slow:
            embed(spec("openai", url, key=VARIABLE, timeout_s=0.1), ["a"])
    with pytest.raises(MindgridError, match="ConnectError") as refused:
        embed(spec("openai", url, key=VARIABLE), ["a"])
    for caught in (slow, refused):
        assert not shows_the_key(all_of(caught.value))
    assert not shows_the_key(caplog.text)


def test_what_is_no_http_may_repeat_the_request_and_is_not_quoted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as parrot:

        async def work() -> None:
            url = f"http://127.0.0.1:{parrot.getsockname()[1]}"
            service = EmbedService(
                {NOTES: Embedding(spec("openai", url, key=VARIABLE))}, retries=QUICK
            )
            with pytest.raises(MindgridError, match="repeat a part of the key") as caught:
                await service.embed(NOTES, ["a"])
            assert not shows_the_key(all_of(caught.value))
            await service.close()

        def repeat() -> None:
            for _ in range(QUICK.attempts):
                connection, _ = parrot.accept()
                with connection:
                    sent = connection.recv(65_536).decode()
                    line = next(line for line in sent.splitlines() if "uthorization" in line)
                    connection.sendall(line.encode() + b"\r\n\r\n")

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        run(work())
        thread.join()


def test_neither_embedder_nor_spec_shows_the_key() -> None:
    wanted = spec("openai", "http://127.0.0.1:1", key=VARIABLE)
    embedder = build(wanted)
    assert not shows_the_key(f"{embedder!r} {wanted!r} {wanted} {vars(embedder)}")
    run(embedder.close())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_other_host_is_asked(status: int) -> None:
    with model_server(openai) as other:
        elsewhere = Reply(status, b"", {"location": f"{other.url}/v1/embeddings"})
        with (
            model_server(always(elsewhere)) as server,
            pytest.raises(ConfigError, match="redirects are not followed"),
        ):
            embed(spec("openai", server.url, key=VARIABLE), ["a"])
        assert other.asked == []


# A missing key


@pytest.mark.parametrize("name", ["openai", "ollama"])
@pytest.mark.parametrize("value", [None, "", " \n"])
def test_a_missing_key_is_told_before_anything_is_asked(
    name: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    wanted = spec(name, "http://127.0.0.1:1", key=VARIABLE)
    for fails in (lambda: check_here([wanted]), lambda: build(wanted)):
        with pytest.raises(ConfigError, match=f"variable {VARIABLE} is not set; put the key"):
            fails()


@pytest.mark.parametrize("value", [f"{KEY}\nx", f"{KEY} x", f"{KEY}é", f"{KEY}\r\nHost: x"])
def test_what_no_header_can_carry_is_refused_without_showing_it(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=f"{VARIABLE} holds what no HTTP header") as caught:
        build(spec("openai", "http://127.0.0.1:1", key=VARIABLE))
    assert not shows_the_key(all_of(caught.value))


@pytest.mark.parametrize(
    ("url", "wants"),
    [
        ("", True),
        ("https://api.openai.com", True),
        ("https://api.openai.com/v1/", True),
        ("https://eu.api.openai.com/v1", True),
        ("https://api.openai.com.example.org/v1", False),
        ("http://localhost:8080", False),
    ],
)
def test_only_openai_itself_wants_openais_variable(
    url: str, wants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    sentence = registry.find("openai").lacks(
        EmbedderSpec(Space("openai", "m", "", 8), EmbedderOptions(base_url=url))
    )
    assert ("OPENAI_API_KEY is not set" in sentence) == wants


def test_a_server_does_not_start_without_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config = tmp_path / "mindgrid.yaml"
    config.write_text(
        f'auth: {{mode: "off"}}\nstorage: {{path: {tmp_path}/data}}\nnamespaces:\n'
        "- block: semantic\n  name: notes\n"
        "  embedder: {provider: openai, model: text-embedding-3-small, dimensions: 1536}\n"
    )
    done = CliRunner().invoke(app, ["serve", "--config", str(config)])
    assert done.exit_code == 1
    assert "error: embedder openai/text-embedding-3-small: the environment variable" in done.output
    assert "OPENAI_API_KEY is not set" in done.output
    assert not (tmp_path / "data").exists()
