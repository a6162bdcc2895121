"""The committed stubs are what the protos generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _stubs(root: Path) -> dict[str, bytes]:
    paths = [path for path in (root / "mindd").rglob("*_pb2*") if path.suffix in {".py", ".pyi"}]
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted([*paths, root / "mindd" / "descriptors.binpb"])
    }


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", str(ROOT / "deploy" / "proto.sh"), str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=120,
    )
    fresh, committed = _stubs(tmp_path), _stubs(ROOT / "src")
    assert sorted(fresh) == sorted(committed), "run deploy/proto.sh"
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, "run deploy/proto.sh"


def test_the_package_mindgrid_is_not_shadowed() -> None:
    import mindgrid
    from mindd.mindgrid.v1 import records_pb2

    assert mindgrid.__version__
    assert records_pb2.DESCRIPTOR.package == "mindgrid.v1"
