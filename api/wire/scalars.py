"""Single values as protobuf JSON spells them: times, bytes, numbers, enums.

Readers raise ValueError whose text completes "<field> …". They are stricter than protobuf's own
json_format where that one takes whatever Python's `int`, `float`, `strptime` or base64 happen to
take; docs/decisions/0005 lists the differences.
"""

from __future__ import annotations

import binascii
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache

import numpy as np

from mindgrid.api.wire.messages import NO_VECTOR
from mindgrid.shards.clock import YEAR_1, YEAR_9999, Instant
from mindgrid.shards.types import Vector

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1

_RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?"
    r"(?:Z|([+-])([01][0-9]|2[0-3]):([0-5][0-9]))"
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_EPOCH = datetime(1970, 1, 1)  # Naive: all arithmetic here is in UTC.
_EPOCH_DAY = _EPOCH.toordinal()
_SECOND = 1_000_000


def shown(value: object) -> str:
    """Return `value` short enough for a message; a caller may have sent megabytes of it."""
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 64 else text[:61] + "..."


def read_instant(text: str) -> Instant:
    """Return the instant an RFC 3339 time names; digits below the microsecond are cut."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(
            f"must be an RFC 3339 time such as 2024-05-01T12:00:00.5Z, not {shown(text)}"
        )
    year, month, day, hour, minute, second, fraction, sign, zone_h, zone_m = match.groups()
    try:
        moment = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second))
    except ValueError as error:
        raise ValueError(f"is no time of the calendar: {error}") from None
    seconds = (
        (moment.toordinal() - _EPOCH_DAY) * 86_400
        + moment.hour * 3600
        + moment.minute * 60
        + moment.second
    )
    if sign is not None:
        offset_s = int(zone_h) * 3600 + int(zone_m) * 60
        seconds += offset_s if sign == "-" else -offset_s
    micros = int(fraction.ljust(6, "0")[:6]) if fraction else 0
    instant = Instant(seconds * _SECOND + micros)
    if not YEAR_1 <= instant <= YEAR_9999:
        raise ValueError(f"must lie within the years 1 to 9999 in UTC, not {text}")
    return instant


# Most records became valid when they were created, and the same ones are found again and again.
@lru_cache(maxsize=16_384)
def write_instant(instant: Instant) -> str:
    """Return the RFC 3339 time in UTC, with 0, 3 or 6 digits of fraction as they are needed."""
    seconds, micros = divmod(instant, _SECOND)
    if micros == 0:
        return _whole_second(seconds) + "Z"
    if micros % 1000 == 0:
        return f"{_whole_second(seconds)}.{micros // 1000:03d}Z"
    return f"{_whole_second(seconds)}.{micros:06d}Z"


# Rows written together share their second, and isoformat costs ten times this.
@lru_cache(maxsize=8192)
def _whole_second(seconds: int) -> str:
    return (_EPOCH + timedelta(seconds=seconds)).isoformat()


def read_bytes(text: str) -> bytes:
    """Return what standard or URL-safe base64 spells, with its padding or without any."""
    standard = text.replace("-", "+").replace("_", "/")
    if not standard.endswith("="):
        standard += "=" * (-len(standard) % 4)
    # Even in strict mode binascii takes a full group with padding behind it.
    if len(standard) % 4 or standard.endswith("==="):
        raise ValueError("is not base64: its padding has the wrong length")
    try:
        return binascii.a2b_base64(standard, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"is not base64: {error}") from None


def read_integer(value: object, low: int, high: int) -> int:
    """Return a whole number given as a number (1e2 too) or as the text of one."""
    number = _whole(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"must be a whole number from {low} to {high}, not {shown(value)}")
    return number


def _whole(value: object) -> int | None:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None:
            return None
        # float() also where int() would refuse thousands of digits: out of range either way.
        plain = match.group(1) is None and match.group(2) is None and len(value) <= 20
        value = int(value) if plain else float(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_float(value: object) -> float:
    """Return the float32 nearest to a number, or to the text of one, as a Python float."""
    number: object = value
    if isinstance(value, str):
        if value in _NON_FINITE:
            return _NON_FINITE[value]
        number = float(value) if _NUMBER.fullmatch(value) else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"must be a number, not {shown(value)}")
    try:
        # json reads 1e400 as infinity.
        if number in (math.inf, -math.inf):
            raise OverflowError
        return narrow(float(number))
    except OverflowError:
        raise ValueError(f"is {shown(value)}, which is beyond float32") from None


def narrow(number: float) -> float:
    """Return the float32 nearest to `number`; OverflowError if it is beyond that type."""
    narrowed: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return narrowed


def to_vector(values: Sequence[float]) -> Vector:
    """Return the numbers as float32; OverflowError if one is beyond that type.

    `struct` tells an overflow and takes a third of the time of `np.array`, which does not.
    """
    if not values:
        return NO_VECTOR
    return np.frombuffer(struct.pack(f"<{len(values)}f", *values), dtype="<f4")


def write_float(value: float) -> object:
    """Return what orjson prints with the fewest digits that still name this float32."""
    if math.isfinite(value):
        return np.float32(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def write_vector(vector: Vector) -> object:
    """Return what orjson prints value by value as `write_float`'s."""
    if np.isfinite(vector).all():
        return np.ascontiguousarray(vector, dtype=np.float32)
    return [write_float(float(value)) for value in vector]


def read_enum(value: object, numbers: Mapping[str, int]) -> int:
    """Return the number of an enum's value given by name or by number, known or not."""
    if isinstance(value, str) and value in numbers:
        return numbers[value]
    number = None if isinstance(value, str) and not _PLAIN.fullmatch(value) else _whole(value)
    if number is None or not -(2**31) <= number < 2**31:
        raise ValueError(f"must be one of {', '.join(numbers)} or its number, not {shown(value)}")
    return number
