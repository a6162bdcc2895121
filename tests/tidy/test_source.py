"""Each module opens with a sentence, and no file knows a registry or somebody's machine."""

from __future__ import annotations

import ast
import re

import pytest
from tests.tidy.repository import ROOT, modules, texts

# Put together here, so that this file does not name them either.
REGISTRIES = ("pypi" + ".org", "python" + "hosted", "npm" + "js", "conda" + ".io", "docker" + ".io")
FOLDERS = ("/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/", "/Us" + "ers/")


@pytest.mark.parametrize("path", modules(), ids=str)
def test_a_module_opens_with_a_sentence(path: object) -> None:
    tree = ast.parse((ROOT / str(path)).read_bytes())
    opening = (ast.get_docstring(tree) or "").split("\n\n")[0].split("\n")[0]
    assert re.match(r"\S.* .*[.:]$", opening), f"opens with {opening!r}"


def test_no_file_names_a_registry_or_a_path_of_a_machine() -> None:
    found = [
        f"{path}: {word}"
        for path, text in texts()
        for word in (*REGISTRIES, *FOLDERS)
        if word in text
    ]
    assert found == []
