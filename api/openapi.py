"""The OpenAPI document of the HTTP mirror, made from the protos with their comments."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

Json = dict[str, Any]

ERROR = {
    "type": "object",
    "description": "Why a call failed: a gRPC status code, and a sentence that names the field.",
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
    "required": ["code", "message"],
}

_SCALARS: dict[int, Json] = {
    FieldDescriptorProto.TYPE_STRING: {"type": "string"},
    FieldDescriptorProto.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    FieldDescriptorProto.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptorProto.TYPE_FLOAT: {"type": "number", "format": "float"},
    FieldDescriptorProto.TYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    FieldDescriptorProto.TYPE_UINT64: {"type": "string", "pattern": "^[0-9]+$"},
}
_TIMESTAMP = ".google.protobuf.Timestamp"


def files() -> FileDescriptorSet:
    """Return the protos as they were generated, comments included."""
    data = resources.files("mindd").joinpath("descriptors.binpb").read_bytes()
    return FileDescriptorSet.FromString(data)


def method_paths() -> Iterator[str]:
    """Yield `/package.Service/Method` of every method there is."""
    for file in files().file:
        for service in file.service:
            for method in service.method:
                yield f"/{file.package}.{service.name}/{method.name}"


def document(version: str, built: Collection[str]) -> Json:
    """Return the document; methods whose path is not in `built` are marked as yet to come."""
    paths: Json = {}
    schemas: Json = {"Error": ERROR}
    for file in files().file:
        comments = _comments(file)
        for index, enum in enumerate(file.enum_type):
            schemas[f"{file.package}.{enum.name}"] = _enum(enum, comments.get((5, index), ""))
        for index, message in enumerate(file.message_type):
            name = f"{file.package}.{message.name}"
            schemas[name] = _message(message, comments, (4, index))
        for index, service in enumerate(file.service):
            for position, method in enumerate(service.method):
                path = f"/{file.package}.{service.name}/{method.name}"
                words = comments.get((6, index, 2, position), "")
                paths[path] = {"post": _operation(method, service.name, words, path in built)}
    paths["/healthz"] = {"get": _health()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mindgrid",
            "version": version,
            "description": "The HTTP mirror of mindgrid's gRPC services, in protobuf JSON: "
            "camelCase names in answers, both spellings in requests; uint64 as strings, bytes in "
            "base64, times in RFC 3339. Defaults are left out of answers.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Return each comment by the path of what it stands above."""
    return {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
        if location.leading_comments
    }


def _operation(method: MethodDescriptorProto, service: str, words: str, built: bool) -> Json:
    media, answer = "application/json", _reference(method.output_type)
    if method.server_streaming:
        media, answer = "application/x-ndjson", _line(answer)
    later = "" if built else "Not in this release: answers 501. "
    return {
        "operationId": f"{service}.{method.name}",
        "tags": [service],
        "summary": words,
        "description": later + words,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _reference(method.input_type)}},
        },
        "responses": {
            "200": {"description": "The answer.", "content": {media: {"schema": answer}}},
            "default": _error("The call failed."),
        },
    }


def _line(message: Json) -> Json:
    words = (
        "A line of the stream. Empty lines say only that it is still there; an error is the last."
    )
    error = {"$ref": "#/components/schemas/Error"}
    properties = {"result": message, "error": error}
    return {"type": "object", "description": words, "properties": properties}


def _health() -> Json:
    body = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
    return {
        "operationId": "health",
        "tags": ["Health"],
        "summary": "Whether the catalog is loaded and the hosts answer.",
        "responses": {
            "200": {
                "description": "Ready.",
                "content": {"application/json": {"schema": body}},
            },
            "503": _error("Not ready; the message says what is missing."),
        },
    }


def _error(description: str) -> Json:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _enum(enum: EnumDescriptorProto, words: str) -> Json:
    return {"type": "string", "enum": [value.name for value in enum.value], "description": words}


def _message(
    message: DescriptorProto, comments: dict[tuple[int, ...], str], path: tuple[int, ...]
) -> Json:
    # The only nested messages of these protos are map entries.
    maps = {nested.name for nested in message.nested_type if nested.options.map_entry}
    properties = {}
    for index, field in enumerate(message.field):
        schema = _field(field, maps)
        if words := comments.get((*path, 2, index)):
            schema["description"] = words
        properties[field.json_name] = schema
    return {
        "type": "object",
        "description": comments.get(path, ""),
        "properties": properties,
        "additionalProperties": False,
    }


def _field(field: FieldDescriptorProto, maps: set[str]) -> Json:
    if field.type_name.rpartition(".")[2] in maps:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if field.type_name == _TIMESTAMP:
        item: Json = {"type": "string", "format": "date-time"}
    elif field.type_name:
        item = _reference(field.type_name)
    else:
        item = dict(_SCALARS[field.type])
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return {"type": "array", "items": item}
    return item


def _reference(type_name: str) -> Json:
    return {"$ref": f"#/components/schemas/{type_name.removeprefix('.')}"}
