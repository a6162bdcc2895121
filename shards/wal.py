"""Tells a torn end of SQLite's write-ahead log from damage in it, before SQLite opens it.

SQLite reads a WAL up to the first frame that does not verify and drops the rest in silence: one
flipped bit and every later commit is gone, while integrity_check says "ok". So we read it first.

    header, 32 bytes: magic, version, page size, checkpoint number, salts, checksum
    frame, 24 + page bytes: page number, database size after a commit or 0, salts, checksum, page

A frame's checksum covers all frames before it, but each frame stores its own, so every frame can be
verified by itself with the one stored before it as the seed. The checksum is linear over 32-bit
words, so thousands of frames are verified by one matrix product.

A bad end is either a commit that a power cut tore, never acknowledged, or damage to one that was.
The log alone cannot tell. The `Mark` does: a small file that is written, but not synced, after
each commit, and says how many frames were durable then. It never says too much, and after anything
but a power cut it says exactly enough. After a power cut it may lag some 30 s behind; damage to the
very last commit of that time passes for a torn one.

Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindgrid.shards.errors import Corruption

PAGE_BYTES = 4096
HEADER_BYTES = 32
FRAME_BYTES = 24 + PAGE_BYTES
_MAGIC = 0x377F0682
"""The last bit says that checksums are over big-endian words."""
_PAIRS_HEADER = 3
_PAIRS_FRAME = 1 + PAGE_BYTES // 8
_MARK = struct.Struct("<4s8sqq")
_MARK_MAGIC = b"MGMK"
MARK_BYTES = _MARK.size + 4

Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Mark:
    """What was durable: so many frames of the log with these salts, so many commits ever."""

    salts: bytes
    frames: int
    commits: int

    def encode(self) -> bytes:
        """Return MARK_BYTES bytes with a checksum of their own."""
        packed = _MARK.pack(_MARK_MAGIC, self.salts, self.frames, self.commits)
        return packed + zlib.crc32(packed).to_bytes(4, "little")

    @staticmethod
    def decode(data: bytes) -> Mark | None:
        """Return the mark, None where these are not the bytes of one."""
        packed, crc = data[: _MARK.size], data[_MARK.size :]
        if len(data) != MARK_BYTES or zlib.crc32(packed).to_bytes(4, "little") != crc:
            return None
        magic, salts, frames, commits = _MARK.unpack(packed)
        return Mark(salts, frames, commits) if magic == _MARK_MAGIC else None


NO_MARK_YET = Mark(bytes(8), 0, 0)


def read_salts(path: Path) -> bytes:
    """Return the salts of the log; they change whenever it starts anew."""
    with open(path, "rb", buffering=0) as file:
        return (file.read(HEADER_BYTES) or b"")[16:24]


def frames_in(size: int) -> int:
    """Return how many whole frames a log of `size` bytes holds."""
    return max(0, size - HEADER_BYTES) // FRAME_BYTES


def check_wal(path: Path, mark: Mark | None) -> None:
    """Verify the log; a missing, empty or cleanly cut one is in order.

    Raises Corruption for damage, which is any frame that does not verify, unless it can only
    belong to the commit that was being written when the power went. Without a mark every frame
    that does not verify is damage.
    """
    if not path.exists():
        return
    # Not a memory map: were the lock lost, another owner might cut the file under it (SIGBUS).
    data = np.fromfile(path, np.uint8)
    if len(data) <= HEADER_BYTES or not data.any():
        # SQLite syncs the header before the first frame, so a torn header has nothing after it.
        return
    log = _Log(path, data)
    intact = log.first_bad()
    if intact < log.frames:
        log.judge_end(intact, mark)


class _Log:
    """A log whose header verifies, and for each of its frames whether it does."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        header = data[:HEADER_BYTES].tobytes()
        magic, version, page_bytes = struct.unpack_from(">III", header)
        word = ">u4" if magic & 1 else "<u4"
        words = np.frombuffer(header, word, 6)
        checksum = np.frombuffer(header, ">u4", 2, offset=24).astype(np.uint32)
        expected = _sums(words[None, :], _WEIGHTS[_PAIRS_HEADER])[0]
        if magic & ~1 != _MAGIC or not np.array_equal(expected, checksum):
            raise Corruption(str(path), "the header of the log does not match its checksum")
        if (version, page_bytes) != (3_007_000, PAGE_BYTES):
            raise Corruption(str(path), f"not a log of ours: {version=}, {page_bytes=}")
        self.salts = header[16:24]
        self.frames = frames_in(len(data))
        self._data = data
        self._body = data[HEADER_BYTES : HEADER_BYTES + self.frames * FRAME_BYTES]
        raw = self._body.reshape(-1, FRAME_BYTES)
        heads = np.ascontiguousarray(raw[:, :24]).view(">u4").astype(np.uint32)
        # The salts and the checksum itself, bytes 8 to 24, are not part of what is summed.
        weights = _WEIGHTS[_PAIRS_FRAME]
        self._content = _sums(raw[:, :8].view(word), weights[:, :2])
        self._content += _sums(raw[:, 24:].view(word), weights[:, 2:])
        self._stored = heads[:, 4:6]
        seeds = np.concatenate([checksum[None, :], self._stored[:-1]])
        self._chains = (_advance(seeds, _PAIRS_FRAME) + self._content == self._stored).all(axis=1)
        salts = np.frombuffer(self.salts, ">u4").astype(np.uint32)
        self._ours = (heads[:, 2:4] == salts).all(axis=1)
        self._commits = heads[:, 1] != 0
        self._valid = self._chains & self._ours
        self._seeds = seeds

    def first_bad(self) -> int:
        """Return the number of frames before the first that does not verify."""
        return int(np.argmin(self._valid)) if not self._valid.all() else self.frames

    def judge_end(self, bad: int, mark: Mark | None) -> None:
        """Raise Corruption unless the frames from `bad` on were a commit torn by a power cut."""
        where = f"frame {bad} of {self.frames}"
        if self._chains[bad]:
            raise Corruption(str(self.path), f"{where} follows its predecessor with other salts")
        if self._is_cut(bad):
            return
        if mark is None:
            raise Corruption(
                str(self.path),
                f"{where} does not match its checksum, and journal.mark, which would tell "
                "whether it was ever acknowledged, is missing or damaged too",
            )
        if mark.salts == self.salts and mark.frames > bad:
            raise Corruption(
                str(self.path), f"{where} does not match its checksum, and was acknowledged"
            )
        later = bad + 1 + np.flatnonzero(self._valid[bad + 1 :])
        if self._only_checksum_is_bad(bad):
            later = np.insert(later, 0, bad + 1)
        if len(later) and self._commits[later[:-1]].any():
            # The next commit is written only after the one before was synced.
            raise Corruption(
                str(self.path), f"{where} does not match its checksum, and later commits do"
            )

    def _is_cut(self, bad: int) -> bool:
        """Say whether the file is zero from some byte of frame `bad` on, past its end."""
        after = self._data[HEADER_BYTES + (bad + 1) * FRAME_BYTES :]
        if not self._body[bad * FRAME_BYTES : (bad + 1) * FRAME_BYTES].any():
            return not after.any()
        # One frame that ends in zeros is not enough: a page may end so by itself.
        return len(after) >= FRAME_BYTES and not after.any()

    def _only_checksum_is_bad(self, bad: int) -> bool:
        """Say whether frame `bad + 1` verifies with what `bad`'s checksum ought to be."""
        if bad + 1 >= self.frames:
            return False
        ought = _advance(self._seeds[bad : bad + 1], _PAIRS_FRAME) + self._content[bad]
        chained = (_advance(ought, _PAIRS_FRAME) + self._content[bad + 1])[0]
        return bool(self._ours[bad + 1] and np.array_equal(chained, self._stored[bad + 1]))


def _advance(seeds: Words, pairs: int) -> Words:
    """Return what `pairs` pairs of zero words make of the running checksums (n, 2).

    Arrays only: NumPy warns when a scalar overflows, which is what the checksum is made of.
    """
    power = _POWERS[pairs]
    zero = seeds[:, 0] * power[0, 0] + seeds[:, 1] * power[0, 1]
    one = seeds[:, 0] * power[1, 0] + seeds[:, 1] * power[1, 1]
    return np.stack([zero, one], axis=-1)


def _sums(words: Words, weights: Words) -> Words:
    """Return (n, 2): what the words of each row add to a running checksum."""
    # einsum, since @ has no fast loop for integers and would copy the strided rows.
    native = words.astype(np.uint32, copy=False)
    return np.stack([np.einsum("ij,j->i", native, row) for row in weights], axis=-1)


def _weigh(pairs: int) -> tuple[Words, Words]:
    """Return the weights of the words and the matrix that carries the seed, modulo 2**32.

    One pair (a, b) of words does s0 += a + s1; s1 += b + s0, so the state (s0, s1) is multiplied
    by [[1, 1], [1, 2]] and (a, a + b) is added.
    """
    weights = np.empty((2, 2 * pairs), np.uint32)
    a, b, c, d = 1, 0, 0, 1
    for pair in reversed(range(pairs)):
        weights[:, 2 * pair] = (a + b) % 2**32, (c + d) % 2**32
        weights[:, 2 * pair + 1] = b, d
        a, b, c, d = ((a + b), (a + 2 * b), (c + d), (c + 2 * d))
        a, b, c, d = a % 2**32, b % 2**32, c % 2**32, d % 2**32
    return weights, np.array([[a, b], [c, d]], np.uint32)


_WEIGHTS: dict[int, Words] = {}
_POWERS: dict[int, Words] = {}
for _pairs in (_PAIRS_HEADER, _PAIRS_FRAME):
    _WEIGHTS[_pairs], _POWERS[_pairs] = _weigh(_pairs)
