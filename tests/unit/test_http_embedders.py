"""The providers `openai` and `ollama`: what is asked, how often, and what callers are told.

Against servers on loopback that do what each test wants.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.grids import namespace
from tests.support.model_servers import (
    DIMENSIONS,
    KEY,
    NOTES,
    QUICK,
    VARIABLE,
    Answer,
    Asked,
    FakeModelServer,
    Reply,
    always,
    embed,
    in_turn,
    model_server,
    ollama,
    openai,
    run,
    spec,
)

from mindgrid.cluster.client import Grid
from mindgrid.cluster.embedders.fake import fake_vector
from mindgrid.cluster.embedders.model_server import retry_after_s
from mindgrid.cluster.embedders.protocol import Embedding, Vectors
from mindgrid.cluster.embedders.service import EmbedService, Retries
from mindgrid.cluster.local import LocalCluster
from mindgrid.cluster.spec import GridSpec
from mindgrid.shards.errors import ConfigError, InvalidRequest, TextRefused, Unavailable
from mindgrid.shards.types import Draft, Query

ANSWERS: dict[str, Answer] = {"openai": openai, "ollama": ollama}
PROVIDERS = sorted(ANSWERS)
NO_VECTOR = np.empty(0, np.float32)


def expected(texts: Sequence[str], dimensions: int = DIMENSIONS) -> Vectors:
    return np.stack([fake_vector(text, dimensions) for text in texts])


def refusing(answer: Answer, *bad: str, status: int = 400) -> Answer:
    """Return a server that refuses each request with one of these texts, and says no more."""

    def reply(asked: Asked) -> Reply:
        if set(bad) & set(asked.texts):
            return Reply(status, {"error": {"message": "cannot\nread this", "code": None}})
        return answer(asked)

    return reply


def text_draft(text: str) -> Draft:
    return Draft("", text, NO_VECTOR)


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(provider: str) -> Iterator[FakeModelServer]:
    with model_server(ANSWERS[provider]) as fake:
        yield fake


@pytest.fixture
def openai_server() -> Iterator[FakeModelServer]:
    with model_server(openai) as fake:
        yield fake


# What is asked


def test_openai_is_asked_for_base64_under_v1_with_the_key(
    openai_server: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")
    embed(spec("openai", openai_server.url, key=VARIABLE), ["a", "b"])
    (asked,) = openai_server.asked
    assert asked.path == "/v1/embeddings"
    assert asked.body == {"model": "m", "input": ["a", "b"], "encoding_format": "base64"}
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["content-type"] == "application/json"


def test_a_server_of_ones_own_may_want_no_key(server: FakeModelServer, provider: str) -> None:
    embed(spec(provider, server.url), ["a"])
    assert "authorization" not in server.asked[0].headers


def test_ollama_is_asked_to_cut_nothing_unless_an_option_says_so() -> None:
    with model_server(ollama) as server:
        embed(spec("ollama", server.url), ["a"])
        embed(spec("ollama", server.url, more={"truncate": "True"}), ["a"])
        assert [asked.path for asked in server.asked] == ["/api/embed"] * 2
        assert server.asked[0].body == {"model": "m", "input": ["a"], "truncate": False}
        assert server.asked[1].body["truncate"] is True


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("", "/v1/embeddings"),
        ("/", "/v1/embeddings"),
        ("/v1", "/v1/embeddings"),
        ("/v1beta/openai/", "/v1beta/openai/embeddings"),
    ],
)
def test_a_base_without_a_path_gets_the_usual_one(
    openai_server: FakeModelServer, base: str, path: str
) -> None:
    embed(spec("openai", openai_server.url + base), ["a"])
    assert openai_server.asked[0].path == path


@pytest.mark.parametrize(
    ("model", "more", "sent"),
    [
        ("text-embedding-3-small", {}, True),
        ("text-embedding-3-large", {"send_dimensions": "false"}, False),
        ("text-embedding-ada-002", {}, False),
        ("nomic-embed-text", {"send_dimensions": "true"}, True),
    ],
)
def test_openai_is_sent_dimensions_only_where_the_model_takes_them(
    openai_server: FakeModelServer, model: str, more: dict[str, str], sent: bool
) -> None:
    embed(spec("openai", openai_server.url, model=model, more=more), ["a"])
    assert openai_server.asked[0].body.get("dimensions") == (DIMENSIONS if sent else None)


def test_ollama_is_sent_dimensions_only_if_asked() -> None:
    with model_server(ollama) as server:
        embed(spec("ollama", server.url), ["a"])
        embed(spec("ollama", server.url, more={"send_dimensions": "true"}), ["a"])
        assert [asked.body.get("dimensions") for asked in server.asked] == [None, DIMENSIONS]


# What comes back


def test_vectors_come_in_the_order_of_the_texts(server: FakeModelServer, provider: str) -> None:
    texts = [f"text {number}" for number in range(40)]
    assert np.array_equal(embed(spec(provider, server.url), texts), expected(texts))


def test_numbers_are_understood_from_servers_that_know_no_base64() -> None:
    def numbers(asked: Asked) -> Reply:
        return openai(Asked(asked.path, asked.headers, {**asked.body, "encoding_format": "float"}))

    with model_server(numbers) as server:
        vectors = embed(spec("openai", server.url), ["a", "b"])
    assert np.array_equal(vectors, expected(["a", "b"]))


def test_a_wrong_length_names_both(server: FakeModelServer, provider: str) -> None:
    with pytest.raises(ConfigError, match=rf"{provider}/m.* length 8, but .*dimensions is 12;"):
        embed(spec(provider, server.url, dimensions=12), ["a"])
    assert len(server.asked) == 1


def _rows(*embeddings: object, indexes: Sequence[int] = ()) -> dict[str, object]:
    order = indexes or range(len(embeddings))
    return {
        "data": [{"index": i, "embedding": one} for i, one in zip(order, embeddings, strict=True)]
    }


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("openai", b"<html>hello</html>", "no embeddings"),
        ("openai", {"object": "list"}, "no embeddings"),
        ("openai", _rows([1.0] * 8), "2 texts were answered by an array of shape (1, 8)"),
        ("openai", _rows(), "2 texts were answered by an array of shape (0,)"),
        ("openai", _rows([1.0] * 8, [1.0] * 7), "vectors of 7 and of 8 numbers"),
        ("openai", _rows([1.0] * 8, [1.0] * 8, indexes=(1, 1)), "index"),
        ("openai", _rows([1.0] * 8, [1.0] * 8, indexes=(1, 2)), "index"),
        ("openai", _rows([1.0] * 8, [None] * 8), "no embeddings"),
        ("openai", _rows("AAAA?", "AAAA"), "no base64"),
        ("openai", _rows("AAAAAA==", "AAAA"), "no base64"),
        ("openai", _rows([0.0] * 8, [1.0] * 8), "text 0 was answered by NaN, infinity or all zer"),
        ("openai", _rows([1.0] * 8, [1e300] * 8), "text 1 was answered by NaN, infinity or all"),
        ("openai", b" " * 600_000, "it answers more than"),
        ("ollama", b"", "no embeddings"),
        ("ollama", {"embeddings": [[1.0] * 8]}, "2 texts were answered by an array"),
        ("ollama", {"embeddings": [[1.0] * 8, []]}, "vectors of 0 and of 8 numbers"),
        ("ollama", {"embeddings": [1.0, 2.0]}, "no embeddings"),
    ],
)
def test_an_answer_that_is_no_vectors_is_unavailable(name: str, body: object, words: str) -> None:
    with model_server(always(Reply(200, body))) as server, pytest.raises(Unavailable) as caught:
        embed(spec(name, server.url), ["a", "b"], Retries(attempts=1))
    assert words in str(caught.value)
    assert f"embedder {name}/m" in str(caught.value)


# How many calls


def test_a_repeated_text_makes_no_call(server: FakeModelServer, provider: str) -> None:
    async def work() -> None:
        service = EmbedService({NOTES: Embedding(spec(provider, server.url))})
        await service.embed(NOTES, ["a", "b", "a"])
        await service.embed(NOTES, ["b"])
        await asyncio.gather(*(service.embed(NOTES, ["c", "a"]) for _ in range(10)))
        await service.close()

    run(work())
    assert server.calls == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("name", "more", "calls"),
    [
        ("openai", {}, 1),
        ("openai", {"batch_texts": "100"}, 10),
        ("openai", {"batch_texts": "999"}, 2),
        ("openai", {"batch_tokens": "1000"}, 4),
        ("ollama", {}, 4),
        ("ollama", {"batch_texts": "1000"}, 1),
        ("ollama", {"batch_texts": "1000", "batch_tokens": "2000"}, 2),
    ],
)
def test_a_thousand_texts_are_as_few_calls_as_the_bounds_allow(
    name: str, more: dict[str, str], calls: int
) -> None:
    texts = [f"{number:04}" for number in range(1000)]  # 4 bytes, so 4 tokens at most
    with model_server(ANSWERS[name]) as server:
        assert np.array_equal(embed(spec(name, server.url, more=more), texts), expected(texts))
        assert len(server.asked) == calls


def test_tokens_are_counted_as_bytes_and_a_long_text_travels_alone() -> None:
    texts = ["ä" * 50, "b" * 100, "c" * 101, "long " * 100, "d"]
    with model_server(openai) as server:
        embed(spec("openai", server.url, more={"batch_tokens": "200"}), texts)
        calls = sorted(server.calls, key=lambda call: texts.index(call[0]))
    assert calls == [texts[:2], [texts[2]], [texts[3]], [texts[4]]]


def test_openais_own_bounds_hold_however_long_the_vectors(openai_server: FakeModelServer) -> None:
    texts = [f"{number:04}" for number in range(2049)]
    embed(spec("openai", openai_server.url, model="text-embedding-3-large", dimensions=3072), texts)
    assert sorted(map(len, openai_server.calls)) == [1, 2048]


# Trying again


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_what_may_pass_is_asked_again(provider: str, status: int) -> None:
    with model_server(in_turn(always(Reply(status)), ANSWERS[provider])) as server:
        assert len(embed(spec(provider, server.url), ["a"])) == 1
        assert len(server.asked) == 2


def test_what_does_not_pass_is_unavailable_in_the_servers_words(provider: str) -> None:
    overloaded = Reply(503, {"error": {"message": "the engine is overloaded"}})
    with model_server(always(overloaded)) as server:
        with pytest.raises(Unavailable) as caught:
            embed(spec(provider, server.url), ["a"])
        assert len(server.asked) == QUICK.attempts
    assert str(caught.value).startswith(f"embedder {provider}/m is unavailable: {server.url}/")
    assert str(caught.value).endswith("answers 503: the engine is overloaded")


def test_a_server_is_left_alone_for_as_long_as_it_asks(openai_server: FakeModelServer) -> None:
    busy = Reply(429, headers={"retry-after": "0.4"})
    openai_server.answer = in_turn(always(busy), openai)
    start = time.monotonic()
    embed(spec("openai", openai_server.url), ["a"])
    assert 0.4 <= time.monotonic() - start < 5
    assert len(openai_server.asked) == 2


def test_a_server_that_asks_for_longer_than_we_wait_is_given_up_at_once(
    openai_server: FakeModelServer,
) -> None:
    openai_server.answer = always(Reply(429, {"error": "slow down"}, {"retry-after": "3600"}))
    with pytest.raises(Unavailable, match="answers 429: slow down") as caught:
        embed(spec("openai", openai_server.url), ["a"])
    assert caught.value.retry_after_s == 3600
    assert len(openai_server.asked) == 1


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("2", 2.0), ("0.5", 0.5), ("", 0.0), ("soon", 0.0), ("-3", 0.0), ("nan", 0.0)],
)
def test_retry_after_in_seconds(asked: str, seconds: float) -> None:
    assert retry_after_s({"retry-after": asked}) == seconds


def test_retry_after_as_a_date_counts_from_the_servers_own_clock() -> None:
    now, until = datetime(2001, 1, 1, tzinfo=UTC), datetime(2001, 1, 1, 0, 0, 7, tzinfo=UTC)
    headers = {"retry-after": format_datetime(until, True), "date": format_datetime(now, True)}
    assert retry_after_s(headers) == 7.0
    assert retry_after_s({"retry-after": headers["retry-after"]}) == 0.0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (301, "redirects are not followed"),
        (401, "it wants a key; name its environment variable in embedder.options.api_key_env"),
        (403, "it wants a key"),
        (402, "no model here; look at embedder.model"),
        (404, "no model here; look at embedder.model and embedder.options.base_url"),
    ],
)
def test_what_the_operator_must_mend_is_asked_once(provider: str, status: int, words: str) -> None:
    failed = Reply(status, {"error": "no model here"}, {"location": "http://127.0.0.1:1/"})
    with model_server(always(failed)) as server:
        with pytest.raises(ConfigError) as caught:
            embed(spec(provider, server.url), ["a"])
        assert len(server.asked) == 1
    assert words in str(caught.value)
    assert f"embedder {provider}/m: {server.url}/" in str(caught.value)


def test_a_quota_that_is_used_up_is_not_asked_again(openai_server: FakeModelServer) -> None:
    used_up = {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}
    openai_server.answer = always(Reply(429, used_up))
    with pytest.raises(ConfigError, match="You exceeded your quota"):
        embed(spec("openai", openai_server.url), ["a"])
    assert len(openai_server.asked) == 1


def test_a_refused_connection_names_provider_model_and_address(provider: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=rf"embedder {provider}/m .*{url}/.*ConnectError"):
            embed(spec(provider, url), ["a"])


def test_a_server_that_hangs_is_given_up_after_the_timeout_and_asked_anew_later(
    server: FakeModelServer, provider: str
) -> None:
    held = threading.Event()
    answer = server.answer

    def hanging(asked: Asked) -> Reply:
        held.wait(20)
        return answer(asked)

    async def work() -> None:
        server.answer = hanging
        slow = spec(provider, server.url, timeout_s=0.1)
        service = EmbedService({NOTES: Embedding(slow)}, retries=QUICK)
        start = time.monotonic()
        with pytest.raises(Unavailable, match=r"no answer within 0\.1 s"):
            await service.embed(NOTES, ["a"])
        assert time.monotonic() - start < 5
        assert len(server.asked) == 1
        held.set()
        server.answer = answer
        assert len(await service.embed(NOTES, ["a"])) == 1
        await service.close()

    run(work())


def test_a_proxy_of_the_environment_leads_to_no_server_on_this_machine(
    server: FakeModelServer, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert len(embed(spec(provider, server.url), ["a"])) == 1


def test_a_proxy_that_cannot_be_used_is_the_operators_to_mend(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", f"gopher://user:{KEY}@127.0.0.1:1")
    with pytest.raises(ConfigError, match="proxy that the environment names") as caught:
        embed(spec(provider, "http://127.0.0.1:1"), ["a"])
    assert KEY not in "".join(traceback.format_exception(caught.value))


# A bad text


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("bad", [0, 1, 250, 511])
def test_one_bad_text_is_found_and_named(provider: str, status: int, bad: int) -> None:
    texts = [f"text {number} {'.' * 80}" for number in range(512)]
    with model_server(refusing(ANSWERS[provider], texts[bad], status=status)) as server:
        with pytest.raises(TextRefused) as caught:
            embed(
                spec(provider, server.url, more={"batch_texts": "512", "batch_tokens": "99999"}),
                texts,
            )
        calls = len(server.asked)
    assert (caught.value.index, caught.value.text) == (bad, texts[bad])
    assert str(caught.value) == (
        f"text {bad}: the text {texts[bad][:64]!r}… is refused: embedder {provider}/m answers "
        f"{status}: cannot read this"
    )
    # The whole, nine halvings and the last one; and a probe where nothing was ever answered.
    assert calls <= 12


def test_a_bad_text_is_named_by_its_place_among_all_batches(provider: str) -> None:
    texts = [f"text {number}" for number in range(100)]
    with (
        model_server(refusing(ANSWERS[provider], "text 73")) as server,
        pytest.raises(TextRefused) as caught,
    ):
        embed(spec(provider, server.url, more={"batch_texts": "10"}), ["text 1", "text 1", *texts])
    assert caught.value.index == 75


def test_a_server_that_takes_fewer_texts_still_gets_all_of_them(provider: str) -> None:
    def small(asked: Asked) -> Reply:
        if len(asked.texts) > 32:
            return Reply(422, {"error": "batch size > maximum allowed batch size 32"})
        return ANSWERS[provider](asked)

    texts = [f"text {number}" for number in range(200)]
    with model_server(small) as server:
        assert np.array_equal(embed(spec(provider, server.url), texts), expected(texts))


def test_a_500_that_means_a_long_text_is_no_reason_to_ask_again(provider: str) -> None:
    too_long = "input (102 tokens) is too large to process. increase the physical batch size"

    def physical(asked: Asked) -> Reply:
        if any(len(text) > 100 for text in asked.texts):
            return Reply(500, {"error": {"code": 500, "message": too_long}})
        return ANSWERS[provider](asked)

    with model_server(physical) as server:
        with pytest.raises(TextRefused, match=r"text 1: .* too large to process"):
            embed(spec(provider, server.url), ["a", "b" * 101])
        assert len(server.asked) == 3


def test_a_server_that_refuses_everything_blames_no_text(provider: str) -> None:
    with (
        model_server(always(Reply(400, {"error": "this model makes no embeddings"}))) as server,
        pytest.raises(ConfigError, match=r"refuses every text: .*makes no embeddings"),
    ):
        embed(spec(provider, server.url), ["a", "b"])


def test_a_neighbours_bad_text_fails_nobody_else(provider: str) -> None:
    async def work(url: str) -> None:
        service = EmbedService({NOTES: Embedding(spec(provider, url))}, retries=QUICK)
        callers = [service.embed(NOTES, [f"text {n}", "shared"]) for n in range(5)]
        bad = service.embed(NOTES, ["shared", "text 1", "bad"])
        refused, *answers = await asyncio.gather(bad, *callers, return_exceptions=True)
        assert isinstance(refused, TextRefused)
        assert refused.index == 2
        for number, answer in enumerate(answers):
            assert np.array_equal(answer, expected([f"text {number}", "shared"]))  # type: ignore[arg-type]
        await service.close()

    with model_server(refusing(ANSWERS[provider], "bad")) as fake:
        run(work(fake.url))


def test_the_grid_names_the_record_or_the_query(tmp_path: Path, provider: str) -> None:
    async def work(url: str) -> None:
        wanted = spec(provider, url)
        service = EmbedService({NOTES: Embedding(wanted)}, retries=QUICK)
        async with LocalCluster(GridSpec(tmp_path, (namespace("notes"),))) as cluster:
            grid = Grid(cluster, service)
            await grid.upsert("notes", [text_draft("good")])
            own = replace(text_draft("bad"), vector=fake_vector("own", DIMENSIONS))
            batch = [own, text_draft("good"), own, text_draft("bad"), text_draft("bad")]
            with pytest.raises(InvalidRequest, match="the text 'bad' is refused: ") as caught:
                await grid.upsert("notes", batch)
            assert caught.value.field == "records[3].content"
            with pytest.raises(InvalidRequest, match="cannot read this") as caught:
                await grid.search("notes", Query(NO_VECTOR), "bad")
            assert caught.value.field == "query_text"
            assert (await grid.search("notes", Query(NO_VECTOR), "good")).hits[0].score > 0.99
            await grid.close()
        await service.close()

    with model_server(refusing(ANSWERS[provider], "bad")) as fake:
        run(work(fake.url))
