"""Real texts that every machine has: the docstrings of the Python that runs this."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "tkinter", "encodings"}
)
_CHARS_MIN, _CHARS_MAX = 40, 300


@dataclass(frozen=True, slots=True)
class Docstring:
    """One documented function, class or method of the standard library."""

    id: str
    """`module:qualified.name`."""
    module: str
    kind: str
    text: str

    @property
    def metadata(self) -> dict[str, str]:
        """Return what the demo stores beside the text."""
        return {"module": self.module, "kind": self.kind, "length": str(len(self.text))}


def sources() -> list[Path]:
    """Return the standard library's source files, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIPPED & set(path.relative_to(root).parts)
        and not any(part.startswith("_") and part != "__init__.py" for part in path.parts[-2:])
    )


def docstrings(source: Path) -> Iterator[Docstring]:
    """Yield the first paragraphs of a file's public docstrings; it is read, never imported."""
    root = Path(sysconfig.get_path("stdlib"))
    module = ".".join(source.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings
        tree = ast.parse(source.read_bytes())
    for name, kind, node in _public(tree, ""):
        summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
        text = " ".join(summary.split())[:_CHARS_MAX]
        if len(text) >= _CHARS_MIN:
            yield Docstring(f"{module}:{name}", module, kind, text)


Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _public(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str, Documented]]:
    for node in tree.body:
        if not isinstance(node, Documented) or node.name.startswith("_"):
            continue
        name = prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield name, "class", node
            yield from _public(node, f"{name}.")
        else:
            yield name, "method" if prefix else "function", node
