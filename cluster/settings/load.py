"""Turns a file and the environment into checked settings, or into one error with every problem.

Values are never repeated in a sentence about a wrong type, so that a secret in the wrong place
reaches no log.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, SettingsError

from mindgrid.cluster.settings.model import ENV_PREFIX, Settings
from mindgrid.cluster.settings.relations import Problem, problems, unknown
from mindgrid.cluster.settings.yaml_lines import ConfigFile, KeyPath, read
from mindgrid.shards.errors import ConfigError

_SECRET = re.compile(r"(?:^|_|-)(?:api_?key|key|token|secret|password|authorization)$", re.I)
_MISSING_AUTH = (
    'is missing. Tokens come with a later release; until then write `auth: {mode: "off"}`, '
    "with the quotes, which starts on a loopback server.host only"
)
_TYPES = {
    "too_short": "must have an entry",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "tuple_type": "must be a list",
    "model_type": "must be a group of settings, written as `name: value` lines or {name: value}",
    "model_attributes_type": "must be a group of settings, written as `name: value` lines",
    "dict_type": "must be a group of settings, written as `name: value` lines",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def load(path: Path) -> Settings:
    """Return the settings of a YAML file, overridden by the environment.

    ConfigError names every problem with its line: the first in its fields, the others after it.
    """
    file = read(path)
    settings, found = _validated(file)
    if settings is not None:
        found.extend(problems(settings))
    if found:
        raise _error(file, found)
    assert settings is not None
    return settings


def _validated(file: ConfigFile) -> tuple[Settings | None, list[Problem]]:
    try:
        overrides = EnvSettingsSource(Settings)()
    except SettingsError as error:
        # Its text names the field and not the value.
        raise ConfigError("environment", f"{error}: write it as JSON") from None
    found = [*_secrets(file.values), *_secrets(overrides), *_unknown_variables()]
    if found:
        return None, found
    try:
        return Settings(**typing.cast(dict[str, typing.Any], file.values)), []
    except ValidationError as error:
        return None, _problems(error)


def _secrets(values: object, path: KeyPath = ()) -> Iterator[Problem]:
    """Yield each place where a secret itself seems to stand."""
    pairs: Iterable[tuple[str | int, object]] = ()
    if isinstance(values, dict):
        pairs = values.items()
    elif isinstance(values, list):
        pairs = enumerate(values)
    for key, value in pairs:
        if isinstance(key, str) and _SECRET.search(key) and not isinstance(value, dict | list):
            yield (
                (*path, key),
                "looks like a secret, which must not stand in a configuration; put it into an "
                "environment variable and write the variable's name, as in "
                "`api_key_env: OPENAI_API_KEY`",
            )
        else:
            yield from _secrets(value, (*path, key))


def _unknown_variables() -> Iterator[Problem]:
    """Yield overrides that would be ignored; only names with `__` are surely meant as such."""
    for name in sorted(os.environ):
        if not name.upper().startswith(ENV_PREFIX) or "__" not in name:
            continue
        path = name.upper().removeprefix(ENV_PREFIX).lower().split("__")
        if path[0] not in Settings.model_fields:
            yield tuple(path), unknown(path[0], [*Settings.model_fields])


def _problems(error: ValidationError) -> list[Problem]:
    found = [(detail["type"], _problem(detail)) for detail in error.errors(include_url=False)]
    # A list is also called too short when all its items were refused.
    return [
        problem
        for kind, problem in found
        if kind != "too_short" or not any(_is_inside(other[0], problem[0]) for _, other in found)
    ]


def _is_inside(path: KeyPath, outer: KeyPath) -> bool:
    return len(path) > len(outer) and path[: len(outer)] == outer


def _problem(detail: ErrorDetails) -> Problem:
    path: KeyPath = tuple(detail["loc"])
    kind = detail["type"]
    if path == ("auth",) and kind == "missing":
        return path, _MISSING_AUTH
    if kind == "missing":
        return path, f"is missing{_example(path)}"
    if kind == "extra_forbidden":
        return path, unknown(str(path[-1]), _names_beside(path))
    if kind == "value_error":
        return path, str(detail["ctx"]["error"])
    if kind == "string_type":
        return path, _text_wanted(detail["input"])
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return path, f"must be {word} {detail['ctx'][key]}"
    return path, f"{_TYPES.get(kind) or _lower(detail['msg'])}{_example(path)}"


def _text_wanted(value: object) -> str:
    if isinstance(value, bool):
        return "must be text; YAML reads an unquoted on, off, yes or no as true or false: quote it"
    if isinstance(value, int | float):
        return "must be text; put the number in quotes"
    return "must be text"


def _lower(message: str) -> str:
    return message.replace("Input should be", "must be").replace("Value should", "must")


def _example(path: KeyPath) -> str:
    field = _field(path)
    if field is None or not field.examples:
        return ""
    return f"; write for example `{path[-1]}: {field.examples[0]}`"


def _field(path: KeyPath) -> FieldInfo | None:
    """Return the field of the model that `path` leads to."""
    section: type[BaseModel] | None = Settings
    field: FieldInfo | None = None
    for step in path:
        if isinstance(step, int):
            continue
        if section is None or step not in section.model_fields:
            return None
        field = section.model_fields[step]
        section = section_of(field)
    return field


def _names_beside(path: KeyPath) -> list[str]:
    names = [step for step in path[:-1] if isinstance(step, str)]
    parent = _field(tuple(names)) if names else None
    section = Settings if parent is None else section_of(parent)
    return [] if section is None else [*section.model_fields]


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, one or a list of them; None for a plain value."""
    return _section_in(field.annotation)


def _section_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next(
        (found for inner in typing.get_args(annotation) if (found := _section_in(inner))), None
    )


def _error(file: ConfigFile, found: list[Problem]) -> ConfigError:
    found = sorted(found, key=lambda problem: file.line(problem[0]))
    lines = [(_where(file, path), f"{dotted(path)} {sentence}") for path, sentence in found]
    (where, first), *others = lines
    return ConfigError(where, "\n".join([first, *(f"{at}: {text}" for at, text in others)]))


def dotted(path: KeyPath) -> str:
    """Return a path as people write it: `namespaces[0].embedder.model`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.lstrip(".")


def _where(file: ConfigFile, path: KeyPath) -> str:
    """Return the variable that set the value or a part of it, else the line of the file."""
    whole = ENV_PREFIX + "__".join(str(step).upper() for step in path) + "__"
    for name in sorted(os.environ, key=len, reverse=True):
        own = f"{name.upper()}__"
        if not own.startswith(ENV_PREFIX) or not os.environ[name]:
            continue
        if whole.startswith(own) or (own.startswith(whole) and path not in file.lines):
            return name
    return file.where(path)
