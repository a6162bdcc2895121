"""Our JSON codec gives json_format's verdicts and values, but for the differences listed here.

`DIFFERENCES` is the table of docs/decisions/0005-json-on-the-hot-routes.md: each row says what
json_format does and we do not, with examples, and how to see it in a text. The property test then
holds for every text: where no row applies, both say the same.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message as Proto
from hypothesis import given, settings
from hypothesis import strategies as st

from mindd.semantic.v1 import semantic_pb2
from mindgrid.api.wire import careful, codec, fast, messages
from mindgrid.api.wire.messages import Message
from mindgrid.shards.errors import InvalidRequest

PROTOS: dict[type[Message], type[Proto]] = {
    getattr(messages, name): getattr(semantic_pb2, name)
    for name in semantic_pb2.DESCRIPTOR.message_types_by_name
}
MESSAGES = list(PROTOS)


# What is compared: plain values, whoever read them.


def _descriptor(message: Proto | type[Proto]) -> Descriptor:
    # The stubs know two classes of descriptor, one per implementation.
    return cast(Descriptor, message.DESCRIPTOR)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_time(field: FieldDescriptor) -> bool:
    message = field.message_type
    return message is not None and message.full_name == "google.protobuf.Timestamp"


def _float(value: float) -> object:
    return "NaN" if math.isnan(value) else float(np.float32(value)) + 0.0


def _proto_item(field: FieldDescriptor, value: object) -> object:
    if _is_time(field):
        return value.seconds * 1_000_000 + value.nanos // 1000  # type: ignore[attr-defined]
    if field.message_type is not None:
        assert isinstance(value, Proto)
        return _proto_values(value)
    return _float(value) if isinstance(value, float) else value


def _proto_values(message: Proto) -> dict[str, object]:
    values: dict[str, object] = {}
    for field in _descriptor(message).fields:
        value = getattr(message, field.name)
        if _is_map(field):
            values[field.name] = dict(value)
        elif field.is_repeated:
            values[field.name] = [_proto_item(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            values[field.name] = None
        else:
            values[field.name] = _proto_item(field, value)
    return values


def _our_value(value: object) -> object:
    if isinstance(value, Message):
        return _our_values(value)
    if isinstance(value, np.ndarray):
        assert value.dtype == np.float32
        return [_float(float(item)) for item in value]
    if isinstance(value, tuple | list):
        return [_our_value(item) for item in value]
    return _float(value) if isinstance(value, float) else value


def _our_values(message: Message) -> dict[str, object]:
    return {name: _our_value(getattr(message, name)) for name in message.__struct_fields__}


def _ours(message: type[Message], body: bytes) -> object:
    try:
        return _our_values(codec.decode(message, body))
    except InvalidRequest:
        return None


def _theirs(message: type[Message], body: bytes) -> object:
    try:
        return _proto_values(json_format.Parse(body, PROTOS[message]()))
    except (json_format.ParseError, UnicodeDecodeError):
        return None


# Where json_format and we differ.

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII
)
_BASE64 = re.compile(r"([\w+/-]{4})*([\w+/-]{2}(==)?|[\w+/-]{3}=?)?", re.ASCII)
_FLOAT_MAX = float(np.finfo(np.float32).max)

Seen = Callable[[FieldDescriptor, object], bool]
FLOAT, ENUM = FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_ENUM
INTEGERS = {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64}


def _overflows(number: float) -> bool:
    try:
        struct.pack("<f", number)
    except OverflowError:
        return True
    return math.isinf(number)


def _spelled(value: object) -> float | None:
    """Return the number that a JSON number or a JSON number's text names."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _odd_number_text(field: FieldDescriptor, value: object) -> bool:
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return False
    if field.cpp_type == FLOAT:
        return value not in {"NaN", "Infinity", "-Infinity"}
    if field.enum_type is not None:
        # Not `values_by_name`: asked for a lone surrogate, upb's map fails in the next call.
        return value not in {known.name for known in field.enum_type.values}
    return field.cpp_type in INTEGERS


def _nearly_max(field: FieldDescriptor, value: object) -> bool:
    return (
        field.cpp_type == FLOAT
        and isinstance(value, float)
        and abs(value) > _FLOAT_MAX
        and not _overflows(value)
    )


@dataclass(frozen=True)
class Difference:
    """One thing that only one of the two readers takes."""

    title: str
    examples: tuple[str, ...]
    """SearchRequests, or Records where they hold a payload."""
    seen: Seen
    we_take_it: bool = False


DIFFERENCES = [
    Difference(
        "a boolean as a number",
        ('{"queryVector": [true]}', '{"mode": true}', '{"fusion": {"denseWeight": false}}'),
        lambda field, value: field.cpp_type in {FLOAT, ENUM} and isinstance(value, bool),
    ),
    Difference(
        "a number's text that is no JSON number: signs, blanks, underscores, leading zeros, "
        "other scripts' digits, and `nan`, `inf` in any spelling but NaN and Infinity",
        (
            '{"topK": "+5"}',
            '{"topK": "5_0"}',
            '{"topK": "05"}',
            '{"topK": "\\t5"}',
            '{"topK": "٣"}',
            '{"queryVector": [" 1.5 "]}',
            '{"queryVector": ["inf"]}',
            '{"queryVector": ["NAN"]}',
            '{"mode": " 1 "}',
        ),
        _odd_number_text,
    ),
    Difference(
        "a number beyond float32 that json_format lets become infinite",
        (
            '{"queryVector": ["1e39"]}',
            '{"queryVector": [10000000000000000000000000000000000000000]}',
            '{"queryVector": ["1e400"]}',
        ),
        lambda field, value: (
            field.cpp_type == FLOAT
            and (number := _spelled(value)) is not None
            and _overflows(number)
        ),
    ),
    Difference(
        "a number above the largest float32 that rounds to it, such as that number's own shortest "
        "spelling",
        ('{"queryVector": [3.4028235e38]}',),
        _nearly_max,
        we_take_it=True,
    ),
    Difference(
        "a fraction as an enum's number",
        ('{"mode": 1.5}',),
        lambda field, value: (
            field.cpp_type == ENUM
            and (number := _spelled(value)) is not None
            and not number.is_integer()
        ),
    ),
    Difference(
        "an enum's number beyond 32 bits",
        ('{"mode": 4294967297}',),
        lambda field, value: (
            field.cpp_type == ENUM
            and (number := _spelled(value)) is not None
            and abs(number) >= 2**31
        ),
    ),
    Difference(
        "base64 with characters of no alphabet, or with padding of the wrong length",
        ('{"payload": "aG k="}', '{"payload": "!!!!"}', '{"payload": "aGk=="}', '{"payload": "="}'),
        lambda field, value: (
            field.type == FieldDescriptor.TYPE_BYTES
            and isinstance(value, str)
            and not _BASE64.fullmatch(value)
        ),
    ),
    Difference(
        "a time that strptime takes and RFC 3339 does not",
        (
            '{"asOf": "2024-1-1T0:0:0Z"}',
            '{"asOf": "2024-01-01T00:00:00.Z"}',
            '{"asOf": "2024-01-01T00:00:00.1_0Z"}',
            '{"asOf": "2024-01-01T00:00:00.5 Z"}',
            '{"asOf": "2024-01-01T00:00:00+1:00"}',
            '{"asOf": "2024-01-01T00:00:00+25:99"}',
            '{"asOf": "2024-01-01T00:00:00+05:-30"}',
        ),
        lambda field, value: (
            _is_time(field) and isinstance(value, str) and not _TIME.fullmatch(value)
        ),
    ),
    Difference(
        "an empty list or an empty string as an empty message",
        ('{"fusion": []}', '{"fusion": ""}', '{"predicates": [[]]}', "[]", '""'),
        lambda field, value: (
            field.message_type is not None
            and not _is_map(field)
            and not _is_time(field)
            and value in ([], "")
        ),
    ),
    Difference(
        "one field under both of its names",
        (
            '{"queryText": "a", "query_text": "b"}',
            '{"queryVector": null, "query_vector": [1]}',
        ),
        # Seen at the message, not at the field: see `_differences`.
        lambda field, value: False,
    ),
]
BOTH_NAMES = DIFFERENCES[-1]
EMPTY_MESSAGE = DIFFERENCES[-2]


def _differences(descriptor: Descriptor, tree: object) -> Iterator[Difference]:
    """Yield the rows that apply anywhere in a text that json parsed to `tree`."""
    if not isinstance(tree, dict):
        if tree in ([], ""):
            yield EMPTY_MESSAGE
        return
    names = {field.json_name: field for field in descriptor.fields} | dict(
        descriptor.fields_by_name
    )
    found = [names[key].name for key in tree if key in names]
    if len(set(found)) < len(found):
        yield BOTH_NAMES
    for key, value in tree.items():
        if key in names and value is not None and not _is_map(names[key]):
            yield from _field_differences(names[key], value)


def _field_differences(field: FieldDescriptor, value: object) -> Iterator[Difference]:
    if not field.is_repeated:
        items: list[object] = [value]
    else:
        items = value if isinstance(value, list) else []
    for item in items:
        yield from (row for row in DIFFERENCES if row.seen(field, item))
        if field.message_type is not None and not _is_time(field) and isinstance(item, dict):
            yield from _differences(field.message_type, item)


def _rows(message: type[Message], body: bytes) -> list[Difference]:
    try:
        tree = json.loads(body.decode())
    except (ValueError, RecursionError):
        return []
    return list(_differences(_descriptor(PROTOS[message]), tree))


@pytest.mark.parametrize(
    ("row", "text"), [(row, text) for row in DIFFERENCES for text in row.examples]
)
def test_each_listed_difference_is_one(row: Difference, text: str) -> None:
    message = messages.Record if "payload" in text else messages.SearchRequest
    body = text.encode()
    assert [found.title for found in _rows(message, body)] == [row.title]
    assert (_ours(message, body) is not None) == row.we_take_it
    assert (_theirs(message, body) is not None) != row.we_take_it


def test_the_listed_differences_are_the_documented_ones() -> None:
    page = Path(__file__).parents[2] / "docs/decisions/0005-json-on-the-hot-routes.md"
    words = " ".join(page.read_text().split())
    for row in DIFFERENCES:
        assert row.title in words


# Texts: the message's own fields in every spelling, then mutated.
#
# Hypothesis draws only the seed: drawing each token by itself took thirty times as long, and the
# texts are short enough to be read as they are.

TEXTS = [
    "",
    "a",
    "notes",
    "é",
    "😀",
    '"',
    "\\",
    '\\"',
    "\\\\",
    "\n",
    "\u2028",
    "\x7f",
    "\ud800",
    "a\\",
]
NUMBERS = [
    *("0", "1", "10", "-1", "-0", "0.0", "-0.0", "1e2", "1E+2", "1.5", "100.0", "1e-1", "1e400"),
    *("4294967295", "4294967296", "18446744073709551615", "18446744073709551616", "1e19", "1e39"),
    *("3.4028235e38", "3.4028234e38", "1e-50", "9007199254740993", "9007199254740993.0", "1e-400"),
    *("01", "+1", ".5", "5.", "1e", "NaN", "Infinity", "-Infinity", "0x5", "1_0", "1" + "0" * 40),
]
NUMBER_TEXTS = [*NUMBERS, "nan", "inf", " 1", "1 ", "+5", "٣", "05", "", "--1", "1e+400"]
TIMES = [
    *("2024-01-01T00:00:00Z", "2024-02-29T23:59:59.5Z", "2023-02-29T00:00:00Z"),
    *("2024-01-01T00:00:00.123456789Z", "2024-01-01T00:00:00.1234567891Z"),
    *("2024-01-01T00:00:00.999999999+23:59", "2024-01-01T00:00:00-00:00"),
    *("2024-01-01T00:00:00+24:00", "2024-01-01T00:00:00+05:60", "2024-01-01T00:00:00+0530"),
    *("0001-01-01T00:00:00Z", "0001-01-01T00:00:00+00:01", "0000-01-01T00:00:00Z"),
    *("9999-12-31T23:59:59.999999999Z", "9999-12-31T23:59:59-00:01", "10000-01-01T00:00:00Z"),
    *("1969-12-31T23:59:59.999999Z", "1970-01-01T00:00:00.0000009Z", "2024-01-01T24:00:00Z"),
    *("2024-01-01t00:00:00Z", "2024-01-01T00:00:00z", "2024-01-01 00:00:00Z", "2024-01-01"),
    *(
        "2024-01-01T23:59:60Z",
        "2024-13-01T00:00:00Z",
        "2024-1-1T0:0:0Z",
        "",
        "٢٠٢٤-01-01T00:00:00Z",
    ),
]
BASE64 = [
    *("", "aGk=", "aGk", "_-8=", "/+8=", "_/8=", "_-8", "a", "ab", "ab==", "ab=", "aGl", "aGk=="),
    *("aG k", "!!!!", "é", "=", "aGk=aGk=", "YWJj", "YWJj\n", "YWJj===="),
]
ANY = [
    *("null", "true", "false", "0", "1", "1.5", '""', '"a"', "[]", "{}", "[null]", '["a"]'),
    '{"a":1}',
]


def _text(draw: Random, value: str) -> str:
    if "\ud800" in value:
        return json.dumps(value)
    return json.dumps(value, ensure_ascii=draw.random() < 0.5)


def _number(draw: Random) -> str:
    if draw.random() < 0.5:
        return draw.choice(["0", "1", "7", "10"])
    return draw.choice(NUMBERS) if draw.random() < 0.7 else _text(draw, draw.choice(NUMBER_TEXTS))


def _any_text(draw: Random) -> str:
    return _text(draw, draw.choice(TEXTS))


def _item(draw: Random, field: FieldDescriptor) -> str:
    if _is_map(field):
        pairs = [f"{_any_text(draw)}:{_any_text(draw)}" for _ in range(draw.randrange(4))]
        return "{" + ",".join(pairs) + "}"
    if _is_time(field):
        return _text(draw, draw.choice(TIMES))
    if field.message_type is not None:
        return _object(draw, field.message_type)
    if field.enum_type is not None:
        names = [value.name for value in field.enum_type.values]
        name = _text(draw, draw.choice([*names, names[0].lower(), "X"]))
        return name if draw.random() < 0.5 else _number(draw)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.choice(["true", "false", "true", "false", '"true"', "1"])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _text(draw, draw.choice(BASE64))
    if field.type == FieldDescriptor.TYPE_STRING:
        return _any_text(draw)
    return _number(draw)


def _value(draw: Random, field: FieldDescriptor) -> str:
    if draw.random() < 0.06:
        return draw.choice(ANY)
    if field.is_repeated and not _is_map(field):
        return "[" + ", ".join(_item(draw, field) for _ in range(draw.randrange(4))) + "]"
    return _item(draw, field)


def _object(draw: Random, descriptor: Descriptor) -> str:
    fields = draw.sample(list(descriptor.fields), min(draw.randrange(6), len(descriptor.fields)))
    if fields and draw.random() < 0.05:
        fields.append(fields[0])
    spell = draw.choice(["camel", "camel", "snake", "mixed"])
    pairs = []
    for field in fields:
        camel = spell == "camel" or (spell == "mixed" and draw.random() < 0.5)
        key = field.json_name if camel else field.name
        pairs.append(f"{json.dumps(key)}: {_value(draw, field)}")
    return "{" + ", ".join(pairs) + "}"


SPLICES = [
    *(b'"', b"\\", b'\\"', b"\\\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"null", b"true"),
    *(
        b"1",
        b"0",
        b"-",
        b"e5",
        b".5",
        b"NaN",
        b"\\u0022",
        b"\\ud800",
        b"\\udc00",
        b"\\ud83d\\ude00",
    ),
    *(b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", b"\x00", b"\t", b"\n", b"\x7f", b"/"),
    *(b'"x":1,', b'"namespace":"a",', b'"":""', b"//", b"'a'", b"\xc2\xa0"),
]


def _mutated(draw: Random, body: bytes) -> bytes:
    start = draw.randint(0, len(body))
    end = min(len(body), start + draw.randint(0, 6))
    act = draw.choice(["insert", "delete", "replace", "repeat", "cut"])
    if act == "insert":
        return body[:start] + draw.choice(SPLICES) + body[start:]
    if act == "delete":
        return body[:start] + body[end:]
    if act == "replace":
        return body[:start] + draw.choice(SPLICES) + body[end:]
    if act == "repeat":
        far = min(len(body), start + draw.randint(0, 40))
        return body[:far] + body[start:far] + body[far:]
    return body[:start]


def _case(seed: int) -> tuple[type[Message], bytes]:
    draw = Random(seed)
    message = draw.choice(MESSAGES)
    body = _object(draw, _descriptor(PROTOS[message])).encode()
    for _ in range(draw.choice([0, 0, 0, 1, 1, 2, 3])):
        body = _mutated(draw, body)
    return message, body


CASES = st.integers(0, 2**64 - 1).map(_case)
MANY = settings(max_examples=int(os.environ.get("MINDGRID_EXAMPLES", "1500")), deadline=None)


@MANY
@given(CASES)
def test_verdicts_and_values_are_json_formats(case: tuple[type[Message], bytes]) -> None:
    message, body = case
    ours, theirs, rows = _ours(message, body), _theirs(message, body), _rows(message, body)
    if not rows:
        assert ours == theirs, body
    elif not all(row.we_take_it for row in rows):
        assert ours is None, body


@MANY
@given(CASES)
def test_the_fast_reader_is_sure_or_silent(case: tuple[type[Message], bytes]) -> None:
    message, body = case
    sure = fast.read(message, body)
    if sure is not None:
        assert _our_values(sure) == _our_values(careful.read(message, body)), body


@MANY
@given(CASES)
def test_what_is_printed_is_json_formats_and_reads_back(case: tuple[type[Message], bytes]) -> None:
    message, body = case
    try:
        read = codec.decode(message, body)
    except InvalidRequest:
        return
    printed = codec.encode(read)
    proto = json_format.Parse(body, PROTOS[message]()) if _theirs(message, body) else None
    if proto is not None and _whole_micros(proto) and b"-0" not in body:
        assert json.loads(printed) == json.loads(json_format.MessageToJson(proto))
    assert _our_values(codec.decode(message, printed)) == _our_values(read)


def _whole_micros(message: Proto) -> bool:
    """Return whether no time in the message has digits that we cut."""
    for field, value in message.ListFields():
        items = list(value) if field.is_repeated and not _is_map(field) else [value]
        if _is_time(field) and any(item.nanos % 1000 for item in items):
            return False
        if field.message_type is None or _is_map(field) or _is_time(field):
            continue
        if not all(_whole_micros(item) for item in items):
            return False
    return True


@pytest.mark.parametrize("message", MESSAGES)
def test_structs_have_the_protos_fields_in_order(message: type[Message]) -> None:
    fields = [field.name for field in PROTOS[message].DESCRIPTOR.fields]
    assert list(message.__struct_fields__) == fields


USUAL = [
    b'{"namespace":"notes","queryVector":[0.5,1,-2e-3],"topK":10,"filter":{"a":"b"}}',
    b'{"namespace":"notes","query_text":"apple","top_k":2,"include_payload":true}',
    b'{"namespace":"notes","queryText":"\\"a\\\\\\"","asOf":"2024-01-01T00:00:00Z","mode":1}',
    b'{"namespace":"notes","predicates":[{"key":"k","op":"PREDICATE_OP_IN","values":["1","2"]}]}',
]


@pytest.mark.parametrize("body", USUAL)
def test_usual_spellings_take_the_fast_reader(body: bytes) -> None:
    assert fast.read(messages.SearchRequest, body) is not None


def test_most_texts_drawn_are_taken_and_all_readers_are_met() -> None:
    cases = [_case(seed) for seed in range(1000)]
    taken = sum(_ours(message, body) is not None for message, body in cases)
    sure = sum(fast.read(message, body) is not None for message, body in cases)
    listed = sum(bool(_rows(message, body)) for message, body in cases)
    assert 150 < sure < taken < 800
    assert listed > 50


def test_a_key_that_stands_twice_among_many_is_found_in_one_pass() -> None:
    keys = ",".join(f'"{n:x}":""' for n in range(50_000))
    body = f'{{"filter": {{{keys}, "zz": "", "zz": ""}}}}'.encode()
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="'zz' stands twice"):
        codec.decode(messages.SearchRequest, body)
    assert time.process_time() - started < 5, "each with each takes two minutes"
