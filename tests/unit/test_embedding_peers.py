"""The providers `openai` and `ollama` against servers that nobody here wrote."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.model_servers import KEY, VARIABLE, embed, spec
from tests.support.peers import DIMENSIONS, llama_server, ollama_server, write_model

from mindgrid.cluster.embedders.protocol import EmbedderSpec, Vectors
from mindgrid.shards.errors import ConfigError, TextRefused

for package in ("xllamacpp", "gguf", "ollama_proxy"):
    pytest.importorskip(package, reason=f"{package} is not installed; `make setup` installs it")

TEXTS = ["apple pie", "how to split a string", "zebra", "42"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tmp_path_factory.mktemp("llama") / "tiny.gguf"
    write_model(model)
    with llama_server(model, KEY) as url:
        yield url


@pytest.fixture(scope="module")
def ollama(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ollama_server(llama, KEY, tmp_path_factory.mktemp("ollama")) as url:
        yield url


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def at_llama(url: str, dimensions: int = DIMENSIONS, **more: str) -> EmbedderSpec:
    return spec("openai", url, model="tiny", dimensions=dimensions, key=VARIABLE, more=more)


def at_ollama(url: str, model: str = "llama/tiny", dimensions: int = DIMENSIONS) -> EmbedderSpec:
    return spec("ollama", url, model=model, dimensions=dimensions)


def cosines(vectors: Vectors) -> Vectors:
    scaled = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found: Vectors = scaled @ scaled.T
    return found


def test_llama_cpp_embeds_each_text_the_same_in_any_order(llama: str) -> None:
    vectors = embed(at_llama(llama), TEXTS)
    assert vectors.shape == (4, DIMENSIONS)
    assert np.allclose(vectors, embed(at_llama(llama), TEXTS[::-1])[::-1], atol=1e-5)
    assert (cosines(vectors) + np.eye(4) < 1.99).sum() == 12, "different texts are different"


def test_llama_cpp_takes_a_thousand_texts_in_one_call(llama: str) -> None:
    vectors = embed(at_llama(llama), [str(number) for number in range(1000)])
    assert len(np.unique(vectors.round(4), axis=0)) == 1000


def test_llama_cpp_ignores_dimensions_and_is_found_out(llama: str) -> None:
    with pytest.raises(ConfigError, match=r"length 32, but embedder\.dimensions is 8; write 32"):
        embed(at_llama(llama, 8, send_dimensions="true"), ["a"])


def test_llama_cpp_wants_its_key(llama: str) -> None:
    keyless = spec("openai", llama, model="tiny", dimensions=DIMENSIONS)
    with pytest.raises(ConfigError, match="answers 401: it wants a key; name its environment"):
        embed(keyless, ["a"])


@pytest.mark.parametrize("words", [50, 100])
def test_a_text_that_is_too_long_for_llama_cpp_is_named(llama: str, words: int) -> None:
    # Beyond its physical batch it answers 500, beyond the model's context 400 or 500.
    texts = [*TEXTS, "a " * words, *TEXTS]
    with pytest.raises(TextRefused, match=r"text 4: the text 'a a .* is refused: .*tokens"):
        embed(at_llama(llama), texts)


def test_ollamas_api_gives_the_vectors_of_the_model_behind(llama: str, ollama: str) -> None:
    behind = embed(at_llama(llama), TEXTS)
    assert np.allclose(embed(at_ollama(ollama), TEXTS), behind, atol=1e-5)


def test_ollamas_api_names_both_lengths(ollama: str) -> None:
    with pytest.raises(ConfigError, match=r"length 32, but embedder\.dimensions is 8; write 32"):
        embed(at_ollama(ollama, dimensions=8), ["a"])


def test_a_model_that_ollamas_api_does_not_know_is_the_operators_to_mend(ollama: str) -> None:
    with pytest.raises(ConfigError, match="Unknown provider prefix: 'nobody'"):
        embed(at_ollama(ollama, "nobody/model"), ["a"])
