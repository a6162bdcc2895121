"""Servers that nobody here wrote, with a model small enough to make: llama.cpp and an Ollama API.

llama.cpp serves `/v1/embeddings` from a GGUF file, which is drawn from a seed here: a BERT of one
layer that reads 64 tokens. ollama-proxy-plus speaks Ollama's API in front of it.

    python -m tests.support.peers MODEL PORT [KEY]     (llama.cpp; ends when its input is closed)
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIMENSIONS = 32
TOKENS_MAX = 64
_PHYSICAL_BATCH = 48
_LAYER = {"attn_q": 1, "attn_k": 1, "attn_v": 1, "attn_output": 1, "ffn_up": 2, "ffn_down": 2}
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_READY_S = 60.0


def write_model(path: Path, seed: int = 7) -> None:
    """Write the model: letters for tokens, random weights, the mean of the last layer."""
    import gguf

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # llama.cpp marks the begin of a word, and not, as BERT's files, its continuation.
    tokens = [*special, *(f"\u2581{letter}" for letter in _LETTERS), *_LETTERS]
    kinds = [gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * (len(tokens) - 5)
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(TOKENS_MAX)
    writer.add_embedding_length(DIMENSIONS)
    writer.add_feed_forward_length(2 * DIMENSIONS)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
    for name, values in _weights(len(tokens), np.random.default_rng(seed)).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(tokens: int, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    def drawn(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / 2).astype(np.float32)

    found = {
        "token_embd.weight": drawn(tokens, DIMENSIONS),
        "position_embd.weight": drawn(TOKENS_MAX, DIMENSIONS),
        "token_types.weight": drawn(2, DIMENSIONS),
    }
    for name, factor in _LAYER.items():
        rows = DIMENSIONS * (factor if name == "ffn_up" else 1)
        columns = DIMENSIONS * (factor if name == "ffn_down" else 1)
        found[f"blk.0.{name}.weight"] = drawn(rows, columns)
        found[f"blk.0.{name}.bias"] = np.zeros(rows, np.float32)
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        found[f"{name}.weight"] = np.ones(DIMENSIONS, np.float32)
        found[f"{name}.bias"] = np.zeros(DIMENSIONS, np.float32)
    return found


@contextmanager
def llama_server(model: Path, key: str) -> Iterator[str]:
    """Yield the address of a llama.cpp server that wants this key."""
    port = _free_port()
    command = ["tests.support.peers", str(model), str(port), key]
    with _serving(command, {}, port, model.parent / "llama.log"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def ollama_server(behind: str, key: str, folder: Path) -> Iterator[str]:
    """Yield the address of a server of Ollama's API; its models are called `llama/…`."""
    port = _free_port()
    env = {"PROVIDERS_LLAMA_BASE_URL": f"{behind}/v1", "PROVIDERS_LLAMA_API_KEY": key}
    command = ["ollama_proxy", "--host", "127.0.0.1", "--port", str(port)]
    with _serving(command, env, port, folder / "ollama.log"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _serving(command: list[str], env: Mapping[str, str], port: int, log: Path) -> Iterator[None]:
    """Run a module of Python's until its port has opened and the body is done."""
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env={**os.environ, **env},
        ) as child,
    ):
        try:
            _wait_for(port, child, log)
            yield
        finally:
            child.kill()


def _wait_for(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _READY_S
    while child.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"it did not come up:\n{log.read_text(errors='replace')[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _serve_llama(model: str, port: int, key: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.embedding = True
    params.n_parallel = 2
    params.n_ctx = 2 * TOKENS_MAX
    # Smaller than what the model reads, as llama.cpp's default of 512 is for many models.
    params.n_batch = params.n_ubatch = _PHYSICAL_BATCH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.api_keys = [key]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve_llama(sys.argv[1], int(sys.argv[2]), sys.argv[3])
