"""Writes the reference of all settings: `python -m mindgrid.cluster.settings.page`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mindgrid.cluster.embedders import registry
from mindgrid.cluster.settings.load import section_of
from mindgrid.cluster.settings.model import Settings
from mindgrid.cluster.settings.quantities import byte_count, bytes_text, duration_text, seconds

_HEAD = """# Configuration

<!-- Made by `make docs` from cluster/settings/model.py; a test keeps it fresh. -->

One YAML file, given to `mindgrid serve --config FILE`, describes a server; `deploy/mindgrid.yaml`
is one that starts as it is. What cannot work is refused before anything starts, with the line and
a sentence on what to write instead.

- **Variables override the file**: `MINDD_` and the path with `__` between its parts, as in
  `MINDD_SERVER__HTTP__PORT=8081`. A list is written whole, as JSON: `MINDD_NAMESPACES='[{…}]'`.
- **Durations** have a unit: `500ms`, `30s`, `10m`, `12h`, `7d`. **Sizes** are bytes, or `64KiB`,
  `32MiB`, `1GiB`.
- **Secrets** never stand in the file: write the name of an environment variable (`api_key_env`).
- `[]` stands for each entry of a list.

| setting | default | bounds | what it does |
|---|---|---|---|
"""


_PROVIDERS = """
## Options of one provider

Under `namespaces[].embedder.options`, beside those above.

| provider | option | what it does |
|---|---|---|
"""


def page() -> str:
    """Return the reference as Markdown."""
    rows = [
        f"| `{path}` | {_default(field)} | {_bounds(field)} | {_sentence(field)} |"
        for path, field in each_setting()
    ]
    options = [
        f"| `{provider}` | `{name}` | {sentence} |"
        for provider in registry.names()
        for name, sentence in registry.find(provider).options.items()
    ]
    return _HEAD + "\n".join(rows) + "\n" + _PROVIDERS + "\n".join(options) + "\n"


def each_setting(
    section: type[BaseModel] = Settings, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the path and the field of each setting, in the file's order, groups before parts."""
    for name, field in section.model_fields.items():
        inner = section_of(field)
        many = "[]" if inner and "tuple" in str(field.annotation) else ""
        yield f"{prefix}{name}{many}", field
        if inner is not None:
            yield from each_setting(inner, f"{prefix}{name}{many}.")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*must be given*"
    if section_of(field) is not None:
        return ""
    if field.default is None:
        return "*none*"
    if field.default in ("", ()):
        return "*empty*"
    return f"`{_spelled(field.default, _kinds(field))}`"


def _bounds(field: FieldInfo) -> str:
    """Return the smallest and the largest value allowed."""
    found = {
        name: _spelled(getattr(part, name), _kinds(field))
        for part in field.metadata
        for name in ("ge", "gt", "le")
        if getattr(part, name, None) is not None
    }
    above = f"over {found['gt']}" if "gt" in found else ""
    if "le" in found:
        return f"{found.get('ge') or above} to {found['le']}"
    return above or (f"{found['ge']} or more" if "ge" in found else "")


def _kinds(field: FieldInfo) -> list[object]:
    return [getattr(part, "func", None) for part in field.metadata]


def _spelled(value: object, kinds: list[object]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if seconds in kinds and isinstance(value, int | float):
        return duration_text(value)
    if byte_count in kinds and isinstance(value, int):
        return bytes_text(value)
    return str(value)


def _sentence(field: FieldInfo) -> str:
    text = (field.description or "").replace("|", "\\|")
    if field.examples:
        text += f" For example `{field.examples[0]}`."
    return re.sub(r"\s+", " ", text)


if __name__ == "__main__":
    print(page(), end="")
