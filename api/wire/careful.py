"""The careful reader of protobuf JSON: every spelling the wire allows, and a sentence for the rest.

It decides; the fast reader only says the same sooner. All errors are InvalidRequest with the path
of the field in the proto's own spelling, as `records[3].if_version`.
"""

from __future__ import annotations

import codecs
import difflib
import json
from collections import Counter
from collections.abc import Callable

import numpy as np

from mindgrid.api.wire import scalars
from mindgrid.api.wire.messages import Message
from mindgrid.api.wire.scalars import UINT32_MAX, UINT64_MAX, shown
from mindgrid.api.wire.shapes import SHAPES, Field, Kind, Shape
from mindgrid.shards.errors import InvalidRequest


def read(message: type[Message], body: bytes) -> Message:
    """Return the message that `body` spells; InvalidRequest says where it does not."""
    return _message(SHAPES[message], _tree(body), "")


def _tree(body: bytes) -> object:
    if body.startswith(codecs.BOM_UTF8):
        raise InvalidRequest("", "the body begins with a byte order mark; send UTF-8 without one")
    try:
        tree: object = json.loads(
            body.decode(), object_pairs_hook=_object, parse_constant=_not_a_number
        )
    except UnicodeDecodeError as error:
        raise InvalidRequest("", f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise InvalidRequest("", "the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest("", f"the body is not JSON: {error}") from None
    return tree


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise InvalidRequest("", f"the key {shown(twice)} stands twice in one object")
    return found


def _not_a_number(literal: str) -> object:
    raise InvalidRequest(
        "", f'the body is not JSON: {literal} is no number there; write "{literal}"'
    )


def _message(shape: Shape, tree: object, path: str) -> Message:
    name = shape.message.__name__
    if not isinstance(tree, dict):
        raise InvalidRequest(path, f"must be an object ({name}), not {shown(tree)}")
    values: dict[str, object] = {}
    for key, value in tree.items():
        field = shape.by_key.get(key)
        if field is None:
            raise InvalidRequest(_joined(path, key), _unknown(key, shape))
        if field.name in values:
            raise InvalidRequest(
                _joined(path, field.name),
                f"is given twice, as {field.json} and as {field.name}",
            )
        values[field.name] = None if value is None else _field(field, value, path)
    return shape.message(**{name: value for name, value in values.items() if value is not None})


def _unknown(key: str, shape: Shape) -> str:
    close = difflib.get_close_matches(key[:64], shape.by_key, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"is not a field of {shape.message.__name__}{hint}"


def _joined(path: str, name: str) -> str:
    short = name if len(name) <= 64 else name[:61] + "..."
    return f"{path}.{short}" if path else short


def _field(field: Field, value: object, path: str) -> object:
    where = _joined(path, field.name)
    if field.kind is Kind.MAP:
        return _map(value, where)
    if not field.repeated:
        return _item(field, value, where)
    if not isinstance(value, list):
        raise InvalidRequest(where, f"must be a list, not {shown(value)}")
    items = [_item(field, item, f"{where}[{index}]") for index, item in enumerate(value)]
    return np.array(items, dtype=np.float32) if field.kind is Kind.FLOAT else tuple(items)


def _item(field: Field, value: object, path: str) -> object:
    if field.shape is not None:
        return _message(field.shape, value, path)
    if field.kind is Kind.ENUM:
        return _worded(path, lambda: scalars.read_enum(value, field.numbers))
    return _worded(path, lambda: _READERS[field.kind](value))


def _worded(path: str, read: Callable[[], object]) -> object:
    try:
        return read()
    except ValueError as error:
        raise InvalidRequest(path, str(error)) from None


def _map(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidRequest(path, f"must be an object of strings, not {shown(value)}")
    for key, text in value.items():
        _worded(path, lambda key=key: _string(key))  # type: ignore[misc]
        _worded(f"{path}[{shown(key)}]", lambda text=text: _string(text))  # type: ignore[misc]
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"has a lone surrogate at character {error.start}, which is not Unicode text"
            ) from None
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


_READERS: dict[Kind, Callable[[object], object]] = {
    Kind.STRING: _string,
    Kind.BOOL: _bool,
    Kind.BYTES: lambda value: scalars.read_bytes(_string(value)),
    Kind.FLOAT: scalars.read_float,
    Kind.UINT32: lambda value: scalars.read_integer(value, 0, UINT32_MAX),
    Kind.UINT64: lambda value: scalars.read_integer(value, 0, UINT64_MAX),
    Kind.TIME: lambda value: scalars.read_instant(_string(value)),
}
