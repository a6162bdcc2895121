"""The oracle shares nothing with the engine it judges but vocabulary, kernel and checks."""

from __future__ import annotations

import ast

from tests.tidy.repository import ROOT

VOCABULARY = {"clock", "config", "driver", "errors", "transactions", "types"}
SHARED = {"analysis", "checks", "scores"}


def _imports(module: str) -> set[str]:
    """Return the siblings that a module of `shards` imports."""
    tree = ast.parse((ROOT / "shards" / f"{module}.py").read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mindgrid"):
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}".split(".")[2])
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("mindgrid") for alias in node.names)
    return found


def test_the_memory_driver_imports_no_part_of_the_engine() -> None:
    assert _imports("memory") <= VOCABULARY | SHARED


def test_what_the_oracle_shares_imports_no_part_of_the_engine_either() -> None:
    for module in sorted(VOCABULARY | SHARED):
        assert _imports(module) <= VOCABULARY | SHARED, module
