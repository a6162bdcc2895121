"""Servers of embedding models for tests: real sockets on loopback, and what they were asked."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from mindgrid.cluster.embedders.fake import fake_vector
from mindgrid.cluster.embedders.protocol import EmbedderOptions, EmbedderSpec, Embedding, Vectors
from mindgrid.cluster.embedders.service import EmbedService, Retries
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.types import Space

T = TypeVar("T")
DIMENSIONS = 8
NOTES = NamespaceKey("semantic", "notes")
QUICK = Retries(attempts=3, first_s=0.001)
KEY = "sk-Q7vX-hidden_9Zw3-Lm5"
VARIABLE = "MINDGRID_TEST_KEY"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; the names of its headers in lower case."""

    path: str
    headers: Mapping[str, str]
    body: Any

    @property
    def texts(self) -> list[str]:
        """The texts to embed."""
        return list(self.body["input"])


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: bytes as they are, anything else as JSON."""

    status: int = 200
    body: object = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str = "Reason"


Answer = Callable[[Asked], Reply]


class FakeModelServer:
    """Answers what its test wants, from threads of its own; see `model_server`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body in one packet, or each answer waits 40 ms for an acknowledgement.
            wbufsize = -1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.path, headers, json.loads(body))
                outer.asked.append(asked)
                reply = outer.answer(asked)
                data = reply.body if isinstance(reply.body, bytes) else _json(reply.body)
                self.send_response(reply.status, reply.reason)
                for name, value in {"content-length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        """The address, without a path."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def calls(self) -> list[list[str]]:
        """The texts of each request."""
        return [one.texts for one in self.asked]


@contextmanager
def model_server(answer: Answer) -> Iterator[FakeModelServer]:
    """Yield a server that answers so; `answer` may be replaced while it runs."""
    fake = FakeModelServer(answer)
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        fake.server.server_close()
        thread.join()


def in_turn(*answers: Answer) -> Answer:
    """Return a server that answers so one after the other; the last one again and again."""
    left = list(answers)
    return lambda asked: (left.pop(0) if len(left) > 1 else left[0])(asked)


def always(reply: Reply) -> Answer:
    return lambda asked: reply


def openai(asked: Asked) -> Reply:
    """Answer as OpenAI does: in the encoding that is asked for; here from the last to the first."""
    rows = [
        {"object": "embedding", "index": index, "embedding": _encoded(asked, text)}
        for index, text in enumerate(asked.texts)
    ]
    return Reply(200, {"object": "list", "data": rows[::-1], "usage": {"total_tokens": 1}})


def ollama(asked: Asked) -> Reply:
    """Answer as Ollama does."""
    rows = [fake_vector(text, DIMENSIONS).tolist() for text in asked.texts]
    return Reply(200, {"model": asked.body["model"], "embeddings": rows, "total_duration": 1})


def _encoded(asked: Asked, text: str) -> str | list[float]:
    vector = fake_vector(text, asked.body.get("dimensions", DIMENSIONS))
    if asked.body.get("encoding_format") == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


def spec(
    provider: str,
    url: str,
    *,
    model: str = "m",
    dimensions: int = DIMENSIONS,
    key: str = "",
    timeout_s: float = 30.0,
    more: Mapping[str, str] | None = None,
) -> EmbedderSpec:
    options = EmbedderOptions(
        timeout_s=timeout_s, base_url=url, api_key_env=key, more=tuple(sorted((more or {}).items()))
    )
    return EmbedderSpec(Space(provider, model, "", dimensions), options)


def embed(
    spec: EmbedderSpec, texts: Sequence[str], retries: Retries = QUICK, cache_size: int = -1
) -> Vectors:
    """Embed as a front replica does, and close what was opened."""

    async def work() -> Vectors:
        service = EmbedService({NOTES: Embedding(spec, cache_size)}, retries=retries)
        try:
            return await service.embed(NOTES, texts)
        finally:
            await service.close()

    return run(work())
