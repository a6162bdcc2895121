"""Postings of a run of rows: for each term the rows that hold it, and how often.

A block never changes. In a file it is one header and these arrays, in the order that aligns each:

    keys     (t,) uint64      the first 8 bytes of each term, big-endian
    ends     (t + 1,) uint32  term i is text[ends[i] : ends[i + 1]]
    starts   (t + 1,) uint32  its postings are those from starts[i] to starts[i + 1]
    rows     (p,) int32       ascending within a term
    lengths  (n,) int32       of each row, as BM25 counts it
    counts   (p,) uint8, uint16 or uint32, whatever the largest needs
    text     uint8            the terms in UTF-8, ascending

An open block costs no memory but what the system keeps of the mapped pages. A term is found by
bisection, first among the keys, then among the few terms that begin alike, in some microseconds; a
dict of all terms would hold about 100 bytes for each in the heap, and be built at every open.

A merge copies postings and analyses no text. It writes only the terms that a kept row still holds:
the words of hard-deleted records must leave the disk too.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mindgrid.shards.analysis import (
    ASCII_WORDS,
    TERM_CHARACTERS_MAX,
    Analyzer,
    bigrams,
    split,
)
from mindgrid.shards.errors import Corruption

Rows = NDArray[np.int32]
Counts = NDArray[np.unsignedinteger]
Kept = NDArray[np.bool_]

WORDS_FILE = "words.bin"

_MAGIC = b"mgwords1"
_HEADER = struct.Struct("<8s7q")
"""The magic, the fingerprint of the analysis, n, t, p, bytes of a count, bytes of text, 0."""
_BATCH_CHARACTERS = 4_000_000
"""Analysing takes some fifteen times as many bytes; and a word's place in Arrow has 31 bits."""
_KEY_BYTES = 8


class Terms:
    """Distinct terms in ascending order, by code point and so by UTF-8 too."""

    def __init__(
        self, keys: NDArray[np.uint64], ends: NDArray[np.uint32], text: NDArray[np.uint8]
    ) -> None:
        self.keys = keys
        self.ends = ends
        self.text = text
        # Reading one value of an array makes an object of NumPy's, at several times the price.
        self._keys, self._ends, self._text = keys.data, ends.data, text.data

    @classmethod
    def of(cls, terms: pa.StringArray) -> Terms:
        """Return these terms, which ascend and are distinct, with their keys."""
        # A slice of an array, which this is not, would begin elsewhere in its buffers.
        assert terms.offset == 0
        _, ends, text = terms.buffers()
        bounds = np.frombuffer(ends, np.uint32, len(terms) + 1)
        data = np.frombuffer(text, np.uint8, int(bounds[-1])) if text else np.empty(0, np.uint8)
        return cls(_keys(bounds, data), bounds, data)

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, term: str) -> int | None:
        """Return the place of `term`, or None."""
        wanted = term.encode()
        key = int.from_bytes(wanted[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"))
        low = bisect_left(self._keys, key)
        if low == len(self) or self._keys[low] != key:
            return None
        high = bisect_right(self._keys, key, low)
        at = low + bisect_left(range(low, high), wanted, key=self._term)
        return at if at < high and self._term(at) == wanted else None

    def array(self) -> pa.StringArray:
        """Return the terms as an Arrow array on the same memory."""
        ends, text = pa.py_buffer(self.ends), pa.py_buffer(self.text)
        return pa.StringArray.from_buffers(len(self), ends, text)

    def _term(self, at: int) -> bytes:
        return bytes(self._text[self._ends[at] : self._ends[at + 1]])


@dataclass(frozen=True, slots=True, eq=False)
class WordBlock:
    """The postings of a run of rows, in RAM or mapped. Safe for any number of reading threads."""

    fingerprint: int
    """Of the analyzer that made the terms: another one's terms would not be found."""
    lengths: Rows
    terms: Terms
    starts: NDArray[np.uint32]
    rows: Rows
    counts: Counts

    @classmethod
    def of(cls, texts: Sequence[str], analyzer: Analyzer) -> WordBlock:
        """Return the postings of these texts, each a row."""
        blocks = [_analysed(batch, analyzer) for batch in _batches(texts)]
        if len(blocks) == 1:
            return blocks[0]
        return merged([(block, np.ones(len(block), np.bool_)) for block in blocks])

    @classmethod
    def open(cls, folder: Path, rows: int) -> WordBlock:
        """Return the block that `save` left in `folder`, mapped.

        Raises Corruption if the file is missing or is not one of `rows` rows, whole. A mapped file
        must not be truncated while the block is in use.
        """
        return _open(folder / WORDS_FILE, rows)

    def __len__(self) -> int:
        return len(self.lengths)

    def postings(self, term: str) -> tuple[Rows, Counts]:
        """Return the rows that hold `term`, ascending, and how often each does: (m,) and (m,)."""
        at = self.terms.find(term)
        if at is None:
            return self.rows[:0], self.counts[:0]
        span = slice(int(self.starts[at]), int(self.starts[at + 1]))
        return self.rows[span], self.counts[span]

    def save(self, folder: Path) -> Path:
        """Write the block into `folder` and return the file, which is not synced."""
        path = folder / WORDS_FILE
        shape = len(self), len(self.terms), len(self.rows)
        header = _HEADER.pack(
            _MAGIC, self.fingerprint, *shape, self.counts.itemsize, len(self.terms.text), 0
        )
        with path.open("wb") as file:
            file.write(header)
            keys, ends, text = self.terms.keys, self.terms.ends, self.terms.text
            for values in (keys, ends, self.starts, self.rows, self.lengths, self.counts, text):
                file.write(values.data)
        return path


def merged(parts: Sequence[tuple[WordBlock, Kept]]) -> WordBlock:
    """Return the postings of the kept rows of all blocks, end to end.

    The mask of a block is (n,) bool. There is at least one block, and all have one fingerprint.
    """
    fingerprint = parts[0][0].fingerprint
    assert all(block.fingerprint == fingerprint for block, _ in parts)
    kept = list(_kept(parts))
    terms, places = _union([part.terms for part in kept])
    frequencies = np.zeros(len(terms), np.int64)
    for part, place in zip(kept, places, strict=True):
        frequencies[place] += part.frequencies
    starts = np.concatenate(([0], np.cumsum(frequencies)))
    rows, counts = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.uint32)
    free = starts[:-1].copy()
    for part, place in zip(kept, places, strict=True):
        # The part's postings of a term go to the first free place of that term.
        begins = np.cumsum(part.frequencies) - part.frequencies
        to = np.repeat(free[place] - begins, part.frequencies) + np.arange(len(part.rows))
        rows[to], counts[to] = part.rows, part.counts
        free[place] += part.frequencies
    lengths = np.concatenate([block.lengths[mask] for block, mask in parts])
    return _block(fingerprint, lengths, terms, starts, rows, counts)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a merge keeps of a block; its terms are those that are left, its rows the new ones."""

    terms: pa.StringArray
    frequencies: NDArray[np.int64]
    rows: Rows
    counts: Counts


def _kept(parts: Sequence[tuple[WordBlock, Kept]]) -> Iterator[_Kept]:
    before = 0
    for block, mask in parts:
        assert mask.shape == (len(block),)
        stay = mask[block.rows]
        sums = np.concatenate(([0], np.cumsum(stay, dtype=np.int64)))
        frequencies = np.diff(sums[block.starts])
        left = frequencies > 0
        moved = np.cumsum(mask, dtype=np.int32) + np.int32(before - 1)
        yield _Kept(
            block.terms.array().filter(pa.array(left)),
            frequencies[left],
            moved[block.rows[stay]],
            block.counts[stay],
        )
        before += int(np.count_nonzero(mask))


def _union(tables: Sequence[pa.StringArray]) -> tuple[pa.StringArray, list[NDArray[np.int64]]]:
    """Return all terms, ascending, and for each table where its terms are among them."""
    encoded = pa.concat_arrays(tables).dictionary_encode()
    order = pc.sort_indices(encoded.dictionary)
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    bounds = np.cumsum([len(table) for table in tables])[:-1]
    places = np.split(rank[encoded.indices.to_numpy()], bounds)
    return encoded.dictionary.take(order), places


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts in batches of about `_BATCH_CHARACTERS`, at least one batch."""
    low, size = 0, 0
    for high, text in enumerate(texts):
        if high > low and size + len(text) > _BATCH_CHARACTERS:
            yield texts[low:high]
            low, size = high, 0
        size += len(text)
    yield texts[low:]


def _analysed(texts: Sequence[str], analyzer: Analyzer) -> WordBlock:
    """Return what `Analyzer.document` says of each text, for all of them at once.

    Arrow and NumPy cut and count, in less than half the time that a dict of words takes, and
    without the GIL. Left to Python are each distinct word, and each text that is not ASCII.
    """
    chunks: list[bytes] = []
    characters: list[str] = []
    row_of_character: list[int] = []
    pairs: list[str] = []
    row_of_pair: list[int] = []
    for row, text in enumerate(texts):
        if text.isascii():
            chunks.append(text.encode())
            continue
        words, runs = split(text)
        chunks.append(" ".join(words).encode())
        for run in runs:
            characters += run
            row_of_character += [row] * len(run)
            pairs += bigrams(run)
            row_of_pair += [row] * (len(run) - 1)
    found, row_of_word = _words(chunks)
    encoded = found.dictionary_encode()
    reduced = pa.array(map(analyzer.reduce, encoded.dictionary.to_pylist()), pa.string())
    left = pc.not_equal(reduced, "").to_numpy(zero_copy_only=False)
    terms, (of_reduced, of_character, of_pair) = _union(
        [reduced.filter(left), pa.array(characters, pa.string()), pa.array(pairs, pa.string())]
    )
    of_distinct = np.full(len(reduced), -1)
    of_distinct[left] = of_reduced
    of_word = of_distinct[encoded.indices.to_numpy()]
    # Stop words are out, and bigrams do not count in the length.
    rows = np.concatenate([row_of_word[of_word >= 0], np.array(row_of_character, np.int64)])
    lengths = np.bincount(rows, minlength=len(texts)).astype(np.int32)
    rows = np.concatenate([rows, np.array(row_of_pair, np.int64)])
    places = np.concatenate([of_word[of_word >= 0], of_character, of_pair])
    # Term and row in one number, so that one sort puts equal ones side by side.
    postings = places << 32 | rows
    postings.sort()
    first = np.flatnonzero(np.diff(postings, prepend=-1))
    counts = np.diff(first, append=len(postings)).astype(np.uint32)
    postings = postings[first]
    starts = np.searchsorted(postings, np.arange(len(terms) + 1) << 32)
    rows = (postings & 0xFFFFFFFF).astype(np.int32)
    return _block(analyzer.fingerprint, lengths, terms, starts, rows, counts)


def _words(chunks: Sequence[bytes]) -> tuple[pa.StringArray, NDArray[np.int64]]:
    """Return the words of all chunks, and the number of each one's chunk."""
    data = np.frombuffer(b" ".join(chunks).translate(ASCII_WORDS), np.uint8)
    inside = data != ord(" ")
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    begins, sizes = edges[::2], edges[1::2] - edges[::2]
    for at in np.flatnonzero(sizes > TERM_CHARACTERS_MAX).tolist():
        begin, end = begins[at], begins[at] + sizes[at]
        sizes[at] = len(data[begin:end].tobytes().decode()[:TERM_CHARACTERS_MAX].encode())
        inside[begin + sizes[at] : end] = False
    ends = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    text = pa.py_buffer(data[inside])
    words = pa.StringArray.from_buffers(len(sizes), pa.py_buffer(ends), text)
    chunk_ends = np.cumsum([len(chunk) + 1 for chunk in chunks])
    return words, np.searchsorted(chunk_ends, begins, side="right")


def _block(
    fingerprint: int,
    lengths: Rows,
    terms: pa.StringArray,
    starts: NDArray[np.int64],
    rows: Rows,
    counts: NDArray[np.uint32],
) -> WordBlock:
    assert starts[-1] < 2**32
    narrow = np.min_scalar_type(int(counts.max(initial=1)))
    return WordBlock(
        fingerprint,
        lengths,
        Terms.of(terms),
        starts.astype(np.uint32),
        rows,
        counts.astype(narrow),
    )


def _keys(ends: NDArray[np.uint32], text: NDArray[np.uint8]) -> NDArray[np.uint64]:
    at = ends[:-1, np.newaxis] + np.arange(_KEY_BYTES)
    inside = at < ends[1:, np.newaxis]
    heads = np.zeros(at.shape, np.uint8)
    heads[inside] = text[at[inside]]
    return heads.view(">u8")[:, 0].astype(np.uint64)


def _open(path: Path, rows: int) -> WordBlock:
    try:
        data = np.asarray(np.memmap(path, np.uint8, "r"))
    except FileNotFoundError:
        raise Corruption(str(path), "the file is missing") from None
    except ValueError:
        raise Corruption(str(path), "it is empty") from None
    if len(data) < _HEADER.size:
        raise Corruption(str(path), f"it has {len(data)} bytes, less than its header")
    magic, fingerprint, n, t, p, width, text, _ = _HEADER.unpack_from(data.data)
    if magic != _MAGIC or n != rows or width not in (1, 2, 4):
        raise Corruption(str(path), f"it does not hold the words of {rows} rows")
    sizes = [8 * t, 4 * (t + 1), 4 * (t + 1), 4 * p, 4 * n, width * p, text]
    ends = np.cumsum([_HEADER.size, *sizes])
    if len(data) != ends[-1]:
        raise Corruption(str(path), f"it has {len(data)} bytes and should have {ends[-1]}")
    keys, bounds, starts, in_rows, lengths, counts, letters = np.split(data, ends[:-1])[1:]
    return WordBlock(
        fingerprint,
        lengths.view(np.int32),
        Terms(keys.view(np.uint64), bounds.view(np.uint32), letters),
        starts.view(np.uint32),
        in_rows.view(np.int32),
        counts.view(f"u{width}"),
    )
