"""What the tidy tests look at: the files that git knows, and the paths that documents name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

_SUFFIXES = (".py", ".md", ".yaml", ".toml", ".txt", ".sh", ".proto")
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def tracked() -> list[Path]:
    """Return every file in git's index, relative to the root, links left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    paths = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


def texts() -> list[tuple[Path, str]]:
    """Return every tracked text file with its text."""
    found = []
    for path in tracked():
        data = (ROOT / path).read_bytes()
        if b"\0" not in data:
            found.append((path, data.decode()))
    return found


def modules() -> list[Path]:
    """Return every Python module that a person wrote."""
    return [path for path in tracked() if path.suffix == ".py" and "_pb2" not in path.name]


def named_paths(text: str) -> set[str]:
    """Return what a document names as a file or folder of this repository.

    That is code in backticks which begins with a folder of the top level or ends like a source
    file, and the target of a link which is no address.
    """
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    found = {
        code
        for code in _CODE.findall(text)
        if re.fullmatch(r"[\w./-]+", code)
        and (("/" in code and code.split("/")[0] in folders) or code.endswith(_SUFFIXES))
    }
    links = {target for target in _LINK.findall(text) if "://" not in target}
    return found | links
