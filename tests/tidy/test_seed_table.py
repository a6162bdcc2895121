"""What the specification and the contract promise is shown by tests that exist, or put off."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from typing import TypedDict, cast

import pytest
from tests.tidy.repository import ROOT, tracked

CLAIMS = {"seed_semantic.toml": "semantic", "seed_episodic.toml": "events"}
"""Of each table in tests/contract, the folder of the claims that it must name."""


class Row(TypedDict, total=False):
    """A sentence of the specification, or the words of a decision."""

    seed: str
    words: str
    tests: list[str]
    later: str
    replaced: str
    note: str


class Table(TypedDict):
    """See the head of seed_semantic.toml."""

    row: list[Row]
    decision: list[Row]


def _promises(table: str) -> list[Row]:
    read = cast(Table, tomllib.loads((ROOT / "tests" / "contract" / table).read_text()))
    return [*read["row"], *read["decision"]]


TABLES = {table: _promises(table) for table in CLAIMS}
ALL = [row for rows in TABLES.values() for row in rows]


def _promise(row: Row) -> str:
    return row.get("seed") or row.get("words", "")


@cache
def _tests(path: str) -> frozenset[str]:
    """Return the names of the tests that a file defines."""
    tree = ast.parse((ROOT / path).read_bytes())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize("row", ALL, ids=lambda row: " ".join(_promise(row).split())[:40])
def test_each_promise_is_shown_by_tests_that_exist(row: Row) -> None:
    assert row.keys() <= Row.__annotations__.keys()
    assert _promise(row)
    assert all(row.values()), "no part of it is empty"
    assert row.get("tests") or row.get("later"), "neither shown nor put off"
    files = {str(path) for path in tracked()}
    for name in row.get("tests", []):
        path, _, test = name.partition("::")
        assert path in files
        assert test in _tests(path), name


def test_what_is_put_off_or_replaced_says_to_what() -> None:
    for row in ALL:
        assert re.match(r"issue \d+, \w", row.get("later", "issue 0, x"))
        assert re.match(r"CONTRACT 1\.\d.*: .", row.get("replaced", "CONTRACT 1.0: x"))


@pytest.mark.parametrize("table", TABLES)
def test_no_promise_stands_twice(table: str) -> None:
    promises = [_promise(row) for row in TABLES[table]]
    assert len(promises) == len(set(promises))


@pytest.mark.parametrize("table", TABLES)
def test_every_claim_about_a_block_shows_a_promise(table: str) -> None:
    named = {name for row in TABLES[table] for name in row.get("tests", [])}
    claims = {
        f"{path}::{test}"
        for path in map(str, tracked())
        if path.startswith(f"tests/contract/{CLAIMS[table]}/test_")
        for test in _tests(path)
    }
    assert sorted(claims - named) == []
