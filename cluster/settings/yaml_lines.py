"""Reads a YAML file into plain values and remembers on which line each of them stands.

PyYAML's loader gives values without lines and lets the later of two equal keys win without a word.
So the node tree, which knows its marks, is composed first, walked once for lines and doubles, and
only then turned into values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from mindgrid.shards.errors import ConfigError

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
KeyPath = tuple[str | int, ...]

FILE_BYTES_MAX = 1 << 20
_NODES_MAX = 100_000  # a few nested aliases can stand for billions of values


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The values of a file, and the line of each key and list item by its path."""

    name: str
    values: dict[str, Value]
    lines: dict[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """Return `file:line` of the value at `path`, or of the nearest thing that holds it."""
        return f"{self.name}:{self.line(path)}"

    def line(self, path: KeyPath) -> int:
        """Return the line of the value at `path`, or of the nearest thing that holds it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read(path: Path) -> ConfigFile:
    """Return what the file says; ConfigError names the line where it cannot be read.

    No error repeats the file's text: a secret may stand where it should not.
    """
    name = str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            name, "this file does not exist; copy deploy/mindgrid.yaml there and edit it"
        ) from None
    except OSError as error:
        raise ConfigError(name, f"this file cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(name, f"this file is over {FILE_BYTES_MAX} bytes, which no settings need")
    return parse(name, data)


def parse(name: str, data: bytes) -> ConfigFile:
    """Return what `data`, read from the file called `name`, says."""
    loader = yaml.SafeLoader(_decoded(name, data))
    try:
        root = loader.get_single_node()
        if root is None:
            return ConfigFile(name, {}, {})
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{name}:{_line(root)}", "write settings as `name: value`, not a list or a text"
            )
        walk = _Walk(name)
        walk.visit(root, ())
        return ConfigFile(name, loader.construct_document(root), walk.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(
            f"{name}:{line}", f"this is not YAML: {error.problem or error.context}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # For example a date such as 2026-02-31, or brackets nested a thousand deep.
        raise ConfigError(name, f"this is not YAML: {type(error).__name__}") from None
    finally:
        loader.dispose()


class _Walk:
    """One pass over the node tree."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = _NODES_MAX
        self.lines: dict[KeyPath, int] = {}

    def visit(self, node: yaml.Node, path: KeyPath) -> None:
        self._left -= 1
        if self._left < 0:
            raise ConfigError(self._name, f"this file holds over {_NODES_MAX} values")
        self.lines.setdefault(path, _line(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._pair(key, value, path)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index))

    def _pair(self, key: yaml.Node, value: yaml.Node, path: KeyPath) -> None:
        here = f"{self._name}:{_line(key)}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(here, "a setting's name must be a plain word")
        if key.tag == "tag:yaml.org,2002:merge":
            self.visit(value, (*path, "<<"))
            return
        if key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(
                here, "a setting's name must be a word; YAML reads this one as something else"
            )
        inner = (*path, key.value)
        if inner in self.lines:
            raise ConfigError(
                here,
                f"{key.value!r} is written twice, first on line {self.lines[inner]}; remove one",
            )
        self.lines[inner] = _line(key)
        self.visit(value, inner)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}:{line}", "this is not UTF-8 text") from None
