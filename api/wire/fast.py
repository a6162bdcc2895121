"""The fast reader of protobuf JSON: sure of the usual spellings, silent about everything else.

msgspec reads a text whose keys are all in camelCase, or all in snake_case, and whose numbers are
plain, straight into typed structs. It must only never be wrong when it says yes, and one thing
msgspec says yes to is a repeated key, whose last value wins. But each string of a JSON text takes
two quotes, and the values read account for every string of the text unless one was overwritten:
so the quotes are counted, at 2 µs for a search.

Values here are `Any`: msgspec has checked their types, field by field, against `_TYPES`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from mindgrid.api.wire import scalars
from mindgrid.api.wire.messages import Message
from mindgrid.api.wire.scalars import UINT32_MAX, UINT64_MAX
from mindgrid.api.wire.shapes import SHAPES, Field, Kind, Shape

_Decoders = tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]
"""For camelCase names and for snake_case ones."""
Convert = Callable[[Any], tuple[Any, int]]
"""Turns a raw value into the field's, and says how many strings the text spent on it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How to turn the raw struct of one message into the message."""

    message: type[Message]
    steps: tuple[tuple[str, Callable[[Any], Any], Convert], ...]
    """Each field's name, what gets it from the raw struct, and its conversion."""


def read(message: type[Message], body: bytes) -> Message | None:
    """Return the message that `body` spells for sure, else None."""
    try:
        built, strings = _decoded(_DECODERS[message], _PLANS[message], body)
    except (ValueError, OverflowError, RecursionError):
        return None
    return built if 2 * strings == _quotes(body) else None


def _decoded(decoders: _Decoders, plan: _Plan, text: bytes | msgspec.Raw) -> tuple[Message, int]:
    """Return the message in the first spelling that fits; ValueError if none does for sure."""
    for decoder in decoders:
        try:
            raw = decoder.decode(text)
        except msgspec.ValidationError:
            continue
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None
        return _build(plan, raw)
    raise ValueError("it is left to the careful reader")


def _quotes(body: bytes) -> int:
    """Return how many quotes open or close a string in valid JSON."""
    quotes = body.count(b'"')
    if b"\\" in body:
        # A pair of backslashes may stand before a closing quote: take the pairs out first.
        quotes -= body.replace(b"\\\\", b"").count(b'\\"')
    return quotes


def _build(plan: _Plan, raw: object) -> tuple[Message, int]:
    values: dict[str, Any] = {}
    strings = 0
    for name, get, convert in plan.steps:
        value = get(raw)
        if value is not UNSET:
            values[name], inner = convert(value)
            strings += inner + 1
    return plan.message(**values), strings


def _bool(value: bool) -> tuple[bool, int]:
    return value, 0


def _string(value: str) -> tuple[str, int]:
    return value, 1


def _strings(value: list[str]) -> tuple[tuple[str, ...], int]:
    return tuple(value), len(value)


def _map(value: dict[str, str]) -> tuple[dict[str, str], int]:
    return value, 2 * len(value)


def _integer(high: int) -> Convert:
    def convert(value: int | str) -> tuple[int, int]:
        return scalars.read_integer(value, 0, high), isinstance(value, str)

    return convert


def _integers(value: list[int | str]) -> tuple[tuple[int, ...], int]:
    strings = sum(isinstance(item, str) for item in value)
    return tuple(scalars.read_integer(item, 0, UINT64_MAX) for item in value), strings


def _enum(field: Field) -> Convert:
    def convert(value: int | str) -> tuple[int, int]:
        return scalars.read_enum(value, field.numbers), isinstance(value, str)

    return convert


def _one(plan: _Plan) -> Convert:
    return lambda raw: _build(plan, raw)


def _many(shape: Shape) -> Convert:
    """Return what reads the items one by one.

    All at once they would keep the interpreter, and so the searches beside them, for 20 ms where
    a batch has 500 vectors; and a vector whose floats were just made is packed twice as fast.
    """
    plan, decoders = _plan(shape), _decoders(shape)

    def convert(items: list[msgspec.Raw]) -> tuple[tuple[Message, ...], int]:
        built = [_decoded(decoders, plan, item) for item in items]
        return tuple(message for message, _ in built), sum(strings for _, strings in built)

    return convert


_TYPES: dict[tuple[Kind, bool], Any] = {
    (Kind.STRING, False): str,
    (Kind.STRING, True): list[str],
    (Kind.BYTES, False): str,
    (Kind.BOOL, False): bool,
    (Kind.FLOAT, False): float,
    (Kind.FLOAT, True): list[float],
    (Kind.UINT32, False): int | str,
    (Kind.UINT64, False): int | str,
    (Kind.UINT64, True): list[int | str],
    (Kind.ENUM, False): int | str,
    (Kind.TIME, False): str,
    (Kind.MAP, False): dict[str, str],
}

_CONVERTS: dict[tuple[Kind, bool], Convert] = {
    (Kind.STRING, False): _string,
    (Kind.STRING, True): _strings,
    (Kind.BYTES, False): lambda value: (scalars.read_bytes(value), 1),
    (Kind.BOOL, False): _bool,
    (Kind.FLOAT, False): lambda value: (scalars.narrow(value), 0),
    (Kind.FLOAT, True): lambda value: (scalars.to_vector(value), 0),
    (Kind.UINT32, False): _integer(UINT32_MAX),
    (Kind.UINT64, False): _integer(UINT64_MAX),
    (Kind.UINT64, True): _integers,
    (Kind.TIME, False): lambda value: (scalars.read_instant(value), 1),
    (Kind.MAP, False): _map,
}


def _type(field: Field, camel: bool) -> Any:
    if field.shape is None:
        return _TYPES[field.kind, field.repeated]
    return list[msgspec.Raw] if field.repeated else _raw(field.shape, camel)


def _raw(shape: Shape, camel: bool) -> type[msgspec.Struct]:
    """Return a struct with the message's fields, each one unset or of its raw type."""
    return msgspec.defstruct(
        f"Raw{shape.message.__name__}",
        [(field.name, _type(field, camel) | UnsetType, UNSET) for field in shape.fields],
        rename={field.name: field.json for field in shape.fields} if camel else None,
        forbid_unknown_fields=True,
        # The garbage collector would walk 500 of these at a time; they hold no cycles.
        gc=False,
    )


def _convert(field: Field) -> Convert:
    if field.kind is Kind.ENUM:
        return _enum(field)
    if field.shape is None:
        return _CONVERTS[field.kind, field.repeated]
    return _many(field.shape) if field.repeated else _one(_plan(field.shape))


def _plan(shape: Shape) -> _Plan:
    steps = [
        (field.name, operator.attrgetter(field.name), _convert(field)) for field in shape.fields
    ]
    return _Plan(shape.message, tuple(steps))


def _decoders(shape: Shape) -> _Decoders:
    camel, snake = _raw(shape, camel=True), _raw(shape, camel=False)
    return msgspec.json.Decoder(camel), msgspec.json.Decoder(snake)


_PLANS = {message: _plan(shape) for message, shape in SHAPES.items()}
_DECODERS = {message: _decoders(shape) for message, shape in SHAPES.items()}
