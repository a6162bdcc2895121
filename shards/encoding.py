"""How messages and journal entries that hold vectors become msgpack, and come back."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from mindgrid.shards.types import NO_VECTOR, Vector

M = TypeVar("M")


def _to_bytes(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        assert value.dtype == np.float32
        return value.tobytes()
    raise NotImplementedError(f"no bytes are agreed on for {type(value).__name__}")


def _from_bytes(kind: object, value: object) -> Vector:
    # The only custom type of the messages is Vector. What comes back cannot be written to.
    assert isinstance(value, bytes)
    return np.frombuffer(value, dtype=np.float32) if value else NO_VECTOR


encode = msgspec.msgpack.Encoder(enc_hook=_to_bytes).encode


def decoder(kind: type[M]) -> msgspec.msgpack.Decoder[M]:
    """Return a decoder of one type of message; it raises msgspec.MsgspecError on other bytes."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_bytes)
