"""What each message is made of, read off the proto's descriptors, for the codec to run on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from mindd.episodic.v1 import episodic_pb2
from mindd.mindgrid.v1 import events_pb2, failure_pb2, records_pb2
from mindd.semantic.v1 import semantic_pb2
from mindgrid.api.wire import events, messages
from mindgrid.api.wire.messages import Message


class Kind(enum.Enum):
    """How a field's value is spelled."""

    STRING = enum.auto()
    BYTES = enum.auto()
    BOOL = enum.auto()
    FLOAT = enum.auto()
    UINT32 = enum.auto()
    UINT64 = enum.auto()
    ENUM = enum.auto()
    TIME = enum.auto()
    MAP = enum.auto()
    MESSAGE = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One field: `name` in the proto and in our structs, `json` in camelCase."""

    name: str
    json: str
    kind: Kind
    repeated: bool
    optional: bool
    """Whether 0 and unset differ, as they do for times, messages and `optional` fields."""
    numbers: Mapping[str, int]
    """An enum's values; else empty."""
    shape: Shape | None


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """One message and its fields, in the order of their numbers."""

    message: type[Message]
    fields: tuple[Field, ...]
    by_key: Mapping[str, Field]
    """By either spelling."""


_SCALARS = {
    FieldDescriptor.TYPE_STRING: Kind.STRING,
    FieldDescriptor.TYPE_BYTES: Kind.BYTES,
    FieldDescriptor.TYPE_BOOL: Kind.BOOL,
    FieldDescriptor.TYPE_FLOAT: Kind.FLOAT,
    FieldDescriptor.TYPE_UINT32: Kind.UINT32,
    FieldDescriptor.TYPE_UINT64: Kind.UINT64,
    FieldDescriptor.TYPE_ENUM: Kind.ENUM,
}


def _kind(field: FieldDescriptor) -> Kind:
    if field.message_type is None:
        return _SCALARS[field.type]
    if field.message_type.GetOptions().map_entry:
        return Kind.MAP
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return Kind.TIME
    return Kind.MESSAGE


def _field(field: FieldDescriptor) -> Field:
    kind = _kind(field)
    return Field(
        name=field.name,
        json=field.json_name,
        kind=kind,
        repeated=field.is_repeated and kind is not Kind.MAP,
        optional=field.has_presence,
        numbers={value.name: value.number for value in field.enum_type.values}
        if field.enum_type is not None
        else {},
        shape=_shape(field.message_type)
        if kind is Kind.MESSAGE and field.message_type is not None
        else None,
    )


def _shape(descriptor: Descriptor) -> Shape:
    message = getattr(_MODULES[descriptor.file.name], descriptor.name)
    if message in SHAPES:
        return SHAPES[message]
    fields = tuple(_field(field) for field in descriptor.fields)
    by_key = {field.json: field for field in fields} | {field.name: field for field in fields}
    SHAPES[message] = Shape(message, fields, by_key)
    return SHAPES[message]


_FILES = {
    semantic_pb2: messages,
    records_pb2: messages,
    failure_pb2: messages,
    episodic_pb2: events,
    events_pb2: events,
}
_MODULES = {file.DESCRIPTOR.name: module for file, module in _FILES.items()}
"""Where the structs of each proto are."""

SHAPES: dict[type[Message], Shape] = {}
for _file in _FILES:
    for _descriptor in _file.DESCRIPTOR.message_types_by_name.values():
        _shape(_descriptor)
