"""Durations and sizes as people write them: `30s`, `7d`, `32MiB`."""

from __future__ import annotations

import re

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m|h|d)")
_SECONDS_MAX = 366 * 86_400.0 * 10_000
_UNITS_BYTES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BYTES = re.compile(r"([0-9]+)\s*(|B|KiB|MiB|GiB)")


def seconds(value: object) -> float:
    """Return the seconds of `30s`, `7d` or `1h30m`; ValueError says how to write one.

    A bare number is refused: half of all readers take it for milliseconds.
    """
    if isinstance(value, str):
        parts = _DURATION.findall(value)
        if parts and "".join(number + unit for number, unit in parts) == value:
            total = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
            if total <= _SECONDS_MAX:
                return total
    raise ValueError("must be a duration with a unit, such as 500ms, 30s, 10m, 12h or 7d")


def byte_count(value: object) -> int:
    """Return the bytes of `32MiB`; a plain number is bytes already."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := _BYTES.fullmatch(value)):
        return int(match[1]) * _UNITS_BYTES[match[2]]
    raise ValueError("must be a size, such as 65536, 64KiB or 32MiB")


def duration_text(seconds: float) -> str:
    """Return the shortest spelling of a duration."""
    for unit, size in sorted(_UNITS_S.items(), key=lambda pair: -pair[1]):
        if seconds >= size and round(seconds / size, 9).is_integer():
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"


def bytes_text(count: int) -> str:
    """Return the shortest spelling of a size."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= _UNITS_BYTES[unit] and count % _UNITS_BYTES[unit] == 0:
            return f"{count // _UNITS_BYTES[unit]}{unit}"
    return str(count)
