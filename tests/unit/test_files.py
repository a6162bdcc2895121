"""Digests find what changed, small files are replaced whole, orphans go and nothing else."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from mindgrid.shards import files
from mindgrid.shards.errors import Corruption


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "a.bin").write_bytes(random.Random(1).randbytes(3 << 20))
    (folder / "deep" / "empty").write_bytes(b"")
    (folder / "deep" / "deeper" / "b.bin").write_bytes(b"bytes" * 100)
    return folder


def test_an_untouched_tree_verifies(tree: Path) -> None:
    digests = files.digest_tree(tree)
    assert [d.path for d in digests] == ["a.bin", "deep/deeper/b.bin", "deep/empty"]
    files.verify(tree, digests)


def test_a_flipped_bit_anywhere_is_corruption(tree: Path) -> None:
    digests = files.digest_tree(tree)
    path = tree / "a.bin"
    rng = random.Random(2)
    for _ in range(20):
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(Corruption, match=r"a\.bin"):
            files.verify(tree, digests)
        data[place] = random.Random(1).randbytes(3 << 20)[place]
        path.write_bytes(data)
    files.verify(tree, digests)


def test_a_missing_and_a_shorter_file_are_corruption(tree: Path) -> None:
    digests = files.digest_tree(tree)
    path = tree / "deep" / "deeper" / "b.bin"
    os.truncate(path, 499)
    with pytest.raises(Corruption, match="499 bytes"):
        files.verify(tree, digests)
    path.unlink()
    with pytest.raises(Corruption, match="missing"):
        files.verify(tree, digests)


def test_a_tree_can_be_synced(tree: Path) -> None:
    files.sync_tree(tree)


def test_a_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    files.create_folder(tmp_path / "a" / "b" / "c")
    files.create_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "small"
    files.write_atomically(path, b"one")
    files.write_atomically(path, b"other")
    assert path.read_bytes() == b"other"
    assert os.listdir(tmp_path) == ["small"]


def test_orphans_go_and_what_is_named_stays(tree: Path) -> None:
    (tree / "link").symlink_to(tree / "deep")
    assert files.remove_orphans(tree, {"a.bin"}) == ["deep", "link"]
    assert os.listdir(tree) == ["a.bin"]
