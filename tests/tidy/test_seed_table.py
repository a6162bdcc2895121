"""What the specifications and the contract promise is shown by tests that exist, or put off."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from typing import TypedDict, cast

import pytest
from tests.tidy.repository import ROOT, tracked

CLAIMS = {"semantic": "semantic", "episodic": "events"}
"""The folder in tests/contract of each block's claims; `seed_<block>.toml` lies beside it."""


class Row(TypedDict, total=False):
    """A sentence of a specification, or the words of a decision."""

    seed: str
    words: str
    tests: list[str]
    later: str
    replaced: str
    note: str


class Table(TypedDict):
    """See the head of the files."""

    row: list[Row]
    decision: list[Row]


def _rows(block: str) -> list[Row]:
    text = (ROOT / "tests" / "contract" / f"seed_{block}.toml").read_text()
    table = cast(Table, tomllib.loads(text))
    return [*table["row"], *table["decision"]]


ROWS = {block: _rows(block) for block in CLAIMS}
ALL = [row for rows in ROWS.values() for row in rows]


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


@pytest.mark.parametrize("block", CLAIMS)
def test_no_promise_stands_twice(block: str) -> None:
    promises = [_promise(row) for row in ROWS[block]]
    assert len(promises) == len(set(promises))


@pytest.mark.parametrize("block", CLAIMS)
def test_every_claim_about_a_block_shows_a_promise(block: str) -> None:
    named = {name for row in ROWS[block] for name in row.get("tests", [])}
    claims = {
        f"{path}::{test}"
        for path in map(str, tracked())
        if path.startswith(f"tests/contract/{CLAIMS[block]}/test_")
        for test in _tests(path)
    }
    assert claims
    assert sorted(claims - named) == []
