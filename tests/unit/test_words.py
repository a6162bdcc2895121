"""Search by words finds what plain BM25 finds, row by row, wherever a row's postings lie."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.data import glosses

from mindgrid.shards import scores
from mindgrid.shards.analysis import SIMPLE, Analyzer, Document
from mindgrid.shards.errors import Corruption
from mindgrid.shards.postings import WORDS_FILE, WordBlock, merged
from mindgrid.shards.scores import WordStats
from mindgrid.shards.words import Postings, Words, WordTail

RULES = Analyzer(SIMPLE)
ENGLISH = Analyzer("english")

WORDS = [
    "cat",
    "dog",
    "Cat's",
    "internationalise",
    "internationally",
    "naïve",
    "über",
    "x9",
    "край",
]
WORDS += ["東京都", "都", "서울은", "สวัสดี", "नमस्ते", "سلام", "", "cat cat cat", "_", "𠀀𠀁"]
WORDS += ["x" * 70, "é" * 70, "न" * 90, "東" * 70, "ab" * 40 + "!"]
texts = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join) | st.text(max_size=12)


@dataclass(frozen=True)
class Oracle:
    """BM25 as its formula reads, over one row after the other."""

    texts: Sequence[str]
    counted: NDArray[np.bool_]

    def stats(self, terms: Sequence[str]) -> WordStats:
        documents = [
            RULES.document(text) for text, c in zip(self.texts, self.counted, strict=True) if c
        ]
        return WordStats(
            rows=len(documents),
            length=sum(document.length for document in documents),
            frequencies=tuple(
                sum(term in document.terms for document in documents)
                for term in dict.fromkeys(terms)
            ),
        )

    def search(self, terms: Sequence[str], allowed: NDArray[np.int64], k: int) -> dict[int, bytes]:
        stats = self.stats(terms)
        found = {}
        for position in allowed.tolist():
            score = _score(self.texts[position], terms, stats)
            if score > 0.0:
                found[position] = np.float32(score)
        floor = sorted(found.values())[-k] if k < len(found) else -math.inf
        return {position: score.tobytes() for position, score in found.items() if score >= floor}


def _score(text: str, terms: Sequence[str], stats: WordStats) -> float:
    document = RULES.document(text)
    mean = stats.length / stats.rows if stats.length else 1.0
    score = 0.0
    for (term, times), df in zip(Counter(terms).items(), stats.frequencies, strict=True):
        tf = document.terms.count(term)
        if tf:
            idf = math.log(1.0 + (stats.rows - df + 0.5) / (df + 0.5))
            below = (document.length / mean * 0.75 + (1 - 0.75)) * 1.2 + tf
            score += times * idf * tf * (1.2 + 1) / below
    return score


def _found(
    words: Words,
    terms: Sequence[str],
    counted: NDArray[np.bool_] | None,
    allowed: NDArray[np.int64] | None,
    k: int,
) -> dict[int, bytes]:
    stats = words.stats(terms, counted, words.totals(counted))
    scored = words.search(terms, stats, allowed, k)
    assert scored.positions.dtype == np.int64
    assert scored.scores.dtype == np.float32
    found = {
        int(position): score.tobytes()
        for position, score in zip(scored.positions, scored.scores, strict=True)
    }
    assert len(found) == len(scored.positions)
    return found


def _laid_out(texts: Sequence[str], rng: np.random.Generator, folder: Path) -> Words:
    """Return the rows as some mapped block, some merged, some in RAM and a tail would hold them."""
    cuts = np.sort(rng.integers(0, len(texts) + 1, 4)).tolist()
    parts = [list(texts[low:high]) for low, high in zip([0, *cuts], [*cuts, None], strict=True)]
    WordBlock.of(parts[0], RULES).save(folder)
    dropped = WordBlock.of([*parts[1], "cat gone"], RULES)
    both = [
        (dropped, np.arange(len(dropped)) < len(parts[1])),
        (WordBlock.of(parts[2], RULES), np.ones(len(parts[2]), np.bool_)),
    ]
    tail = WordTail(RULES, parts[4][: len(parts[4]) // 2])
    tail.block.postings("cat")
    for text in parts[4][len(parts[4]) // 2 :]:
        tail.append([text])
    blocks: list[Postings] = [WordBlock.open(folder, len(parts[0])), merged(both)]
    return Words([*blocks, WordBlock.of(parts[3], RULES), tail.block])


@given(
    st.lists(texts, max_size=30),
    texts,
    st.integers(1, 10),
    st.sampled_from([1.0, 0.5, 0.1]),
    st.integers(0, 2**32 - 1),
)
def test_search_is_plain_bm25_to_the_byte_wherever_a_row_lies(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[str],
    query: str,
    k: int,
    share: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    words = _laid_out(rows, rng, tmp_path_factory.mktemp("words"))
    counted = rng.random(len(rows)) < 0.8
    allowed = np.flatnonzero(rng.random(len(rows)) < share)
    oracle, terms = Oracle(rows, counted), RULES.query(query)
    assert words.stats(terms, counted, words.totals(counted)) == oracle.stats(terms)
    assert _found(words, terms, counted, allowed, k) == oracle.search(terms, allowed, k)
    everything = Oracle(rows, np.ones(len(rows), np.bool_))
    every = np.arange(len(rows))
    assert _found(words, terms, None, None, k) == everything.search(terms, every, k)


def _zipf(rows: int, seed: int) -> list[str]:
    """Return texts of about 12 words whose frequencies fall as in a natural language."""
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.zipf(1.3, (rows, 12)), 5_000)
    return [" ".join(f"w{rank}" for rank in row[: 6 + i % 7]) for i, row in enumerate(ranks)]


@pytest.mark.parametrize("query", ["w1 w2 w3", "w300 w301 w1 w300", "w4000 w4001", "nowhere"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.05, 0.002])
def test_search_is_plain_bm25_by_every_road(query: str, share: float) -> None:
    rows = _zipf(2_500, seed=1)
    rng = np.random.default_rng(2)
    allowed = np.flatnonzero(rng.random(len(rows)) < share)
    blocks = [WordBlock.of(rows[:1_500], RULES), WordBlock.of(rows[1_500:], RULES)]
    counted = np.ones(len(rows), np.bool_)
    found = _found(Words(blocks), RULES.query(query), None, allowed, 10)
    assert found == Oracle(rows, counted).search(RULES.query(query), allowed, 10)


def test_the_kernel_scores_a_row_alone_as_among_others() -> None:
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 9, 500).astype(np.uint8)
    lengths = rng.integers(1, 99, 500).astype(np.int32)
    weights = rng.random(500) * 9
    together = scores.bm25(counts, lengths, weights, 31.7)
    for i in range(500):
        alone = scores.bm25(counts[i : i + 1], lengths[i : i + 1], weights[i : i + 1], 31.7)
        assert alone.tobytes() == together[i : i + 1].tobytes()
    assert together.min() > 0.0


def test_statistics_of_shards_add_up_to_those_of_one() -> None:
    rows = _zipf(300, seed=4)
    terms = RULES.query("w1 w7 w1 w99")
    parts = [Words([WordBlock.of(rows[low::3], RULES)]) for low in range(3)]
    whole = Words([WordBlock.of(rows, RULES)])
    total = reduce(add, (part.stats(terms, None, part.totals()) for part in parts))
    assert total == whole.stats(terms, None, whole.totals())
    assert len(total.frequencies) == 3
    expected = _found(whole, terms, None, None, 400)
    for low, part in enumerate(parts):
        scored = part.search(terms, total, None, 400)
        for position, score in zip(scored.positions, scored.scores, strict=True):
            assert score.tobytes() == expected[3 * int(position) + low]


def test_all_rows_that_tie_with_the_last_are_found() -> None:
    words = Words([WordBlock.of(["a b", "b a", "a c", "d", "a a"], RULES)])
    stats = words.stats(["a"], None, words.totals())
    assert words.search(["a"], stats, None, 1).positions.tolist() == [4]
    assert sorted(words.search(["a"], stats, None, 2).positions.tolist()) == [0, 1, 2, 4]


def test_a_term_counts_as_often_as_the_query_has_it() -> None:
    words = Words([WordBlock.of(["a b", "c d", "a d"], RULES)])
    once = words.search(["a"], words.stats(["a"], None, words.totals()), None, 9)
    terms = ["a", "z", "a"]
    twice = words.search(terms, words.stats(terms, None, words.totals()), None, 9)
    assert twice.scores.tolist() == (2 * once.scores).tolist()


def test_rows_that_do_not_count_can_still_be_found() -> None:
    words = Words([WordBlock.of(["old cat", "new dog"], RULES)])
    for counted in (np.array([False, True]), np.array([False, False])):
        stats = words.stats(["cat"], counted, words.totals(counted))
        assert stats.frequencies == (0,)
        scored = words.search(["cat"], stats, None, 5)
        assert scored.positions.tolist() == [0]
        assert np.isfinite(scored.scores).all()


def test_no_rows_no_terms_and_no_allowed_rows_find_nothing() -> None:
    for words in (Words([]), Words([WordBlock.of([], RULES)]), Words([WordTail(RULES).block])):
        assert len(words) == 0
        assert _found(words, ["cat"], None, None, 3) == {}
    words = Words([WordBlock.of(["cat", "", "?!"], RULES)])
    assert words.totals() == (3, 1)
    assert _found(words, [], None, None, 3) == {}
    assert _found(words, ["cat"], None, np.empty(0, np.int64), 3) == {}


def _equal(one: WordBlock, other: WordBlock) -> bool:
    pairs: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = [
        (one.lengths, other.lengths),
        (one.terms.keys, other.terms.keys),
        (one.terms.ends, other.terms.ends),
        (one.terms.text, other.terms.text),
        (one.starts, other.starts),
        (one.rows, other.rows),
        (one.counts, other.counts),
    ]
    same = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    return same and one.fingerprint == other.fingerprint


@given(st.lists(st.lists(texts, max_size=8), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_a_merge_is_the_block_of_the_rows_that_are_left(parts: list[list[str]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(len(part)) < 0.6 for part in parts]
    blocks = [(WordBlock.of(part, RULES), mask) for part, mask in zip(parts, masks, strict=True)]
    left = [
        text
        for part, mask in zip(parts, masks, strict=True)
        for text, kept in zip(part, mask.tolist(), strict=True)
        if kept
    ]
    assert _equal(merged(blocks), WordBlock.of(left, RULES))


def test_many_texts_are_analysed_in_batches_to_one_block() -> None:
    rows = [f"w{i % 7} w{i % 1000} {'long ' * 20}" for i in range(70_000)]
    block = WordBlock.of(rows, RULES)
    assert len(block) == len(rows)
    for term in ("w3", "w999", "w0", "long"):
        held, counts = block.postings(term)
        expected = {i: row.split().count(term) for i, row in enumerate(rows) if f"{term} " in row}
        assert dict(zip(held.tolist(), counts.tolist(), strict=True)) == expected


def test_a_text_as_long_as_a_batch_is_one_row() -> None:
    rows = ["a", "b " * 3_000_000, "", "c a"]
    block = WordBlock.of(rows, RULES)
    assert block.lengths.tolist() == [1, 3_000_000, 0, 2]
    assert block.postings("a")[0].tolist() == [0, 3]


@given(st.lists(texts, max_size=12))
def test_a_saved_block_opens_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("words")
    block = WordBlock.of(rows, ENGLISH)
    assert block.save(folder) == folder / WORDS_FILE
    opened = WordBlock.open(folder, len(rows))
    assert _equal(opened, block)
    assert opened.fingerprint == ENGLISH.fingerprint
    for text in rows:
        for term in ENGLISH.document(text).terms:
            held, counts = opened.postings(term)
            assert held.tolist() == block.postings(term)[0].tolist() != []
            assert counts.sum() == sum(ENGLISH.document(t).terms.count(term) for t in rows)


@pytest.mark.parametrize("times", [1, 255, 256, 65_535, 65_536])
def test_a_count_is_kept_however_large(tmp_path: Path, times: int) -> None:
    WordBlock.of(["a " * times, "b"], RULES).save(tmp_path)
    block = WordBlock.open(tmp_path, 2)
    assert block.postings("a")[1].tolist() == [times]
    assert block.lengths.tolist() == [times, 1]


def test_terms_that_begin_alike_are_told_apart() -> None:
    rows = [f"international{i:04}" for i in range(500)] + ["internat", "international", "zzz"]
    block = WordBlock.of(rows, RULES)
    for row, term in enumerate(rows):
        assert block.postings(term)[0].tolist() == [row]
    for absent in ("internationa", "international05", "a", "zzzz", "international0500"):
        assert block.postings(absent)[0].tolist() == []


def test_the_words_of_a_dropped_row_leave_the_file(tmp_path: Path) -> None:
    rows = ["a common word", "the secret xylophone", "common xylograph"]
    block = WordBlock.of(rows, RULES)
    block.save(tmp_path)
    path = tmp_path / WORDS_FILE
    assert b"secret" in path.read_bytes()
    after = tmp_path / "after"
    after.mkdir()
    kept = np.array([True, False, True])
    left = merged([(WordBlock.open(tmp_path, 3), kept)]).save(after).read_bytes()
    assert b"xylograph" in left
    for gone in (b"secret", b"xylophone", b"phon", b"the"):
        assert gone not in left
    for term in RULES.document(rows[1]).terms:
        assert term.encode()[:8].ljust(8, b"\0")[::-1] not in left


def test_a_file_that_is_not_whole_is_corruption_that_names_it(tmp_path: Path) -> None:
    path = WordBlock.of(["one two", "two three"], RULES).save(tmp_path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(Corruption, match=WORDS_FILE):
            WordBlock.open(tmp_path, 2)
    path.write_bytes(data + b"x")
    with pytest.raises(Corruption, match=WORDS_FILE):
        WordBlock.open(tmp_path, 2)
    path.write_bytes(b"x" + data[1:])
    with pytest.raises(Corruption, match=WORDS_FILE):
        WordBlock.open(tmp_path, 2)
    path.write_bytes(data)
    with pytest.raises(Corruption, match="3 rows"):
        WordBlock.open(tmp_path, 3)
    path.unlink()
    with pytest.raises(Corruption, match="missing"):
        WordBlock.open(tmp_path, 2)


def test_an_open_block_takes_hardly_any_memory(tmp_path: Path) -> None:
    WordBlock.of([f"word{i} other{i}" for i in range(2_000)], RULES).save(tmp_path)
    block = WordBlock.open(tmp_path, 2_000)
    parts = [block.lengths, block.starts, block.rows, block.counts, block.terms.keys]
    assert all(not part.flags.owndata for part in parts)
    assert sum(sys.getsizeof(part) for part in parts) < 1_000


def test_a_tail_analyses_nothing_until_somebody_looks() -> None:
    class Counting(Analyzer):
        seen = 0

        def document(self, text: str) -> Document:
            self.seen += 1
            return super().document(text)

    rules = Counting(SIMPLE)
    tail = WordTail(rules)
    for i in range(200):
        tail.append([f"word{i}"])
    assert rules.seen == 0
    assert tail.block.postings("word199")[0].tolist() == [199]
    assert rules.seen == 200
    assert tail.block.postings("word7")[0].tolist() == [7]
    assert rules.seen == 200


def test_a_readers_tail_stays_as_it_was() -> None:
    tail = WordTail(RULES)
    blocks = []
    for i in range(40):
        tail.append([f"cat w{i}", "dog"])
        blocks.append(tail.block)
        if i % 7 == 0:
            assert len(tail.block.postings("cat")[0]) == i + 1
    for i, block in enumerate(blocks):
        assert len(block) == len(block.lengths) == 2 * (i + 1)
        assert block.postings("cat")[0].tolist() == list(range(0, 2 * (i + 1), 2))
        assert block.postings(f"w{i + 1}")[0].tolist() == []


def test_readers_see_whole_rows_while_a_tail_grows() -> None:
    tail = WordTail(RULES)
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            block = tail.block
            rows, counts = block.postings("cat")
            if len(rows) != len(block) or len(block.lengths) != len(block) or (counts != 2).any():
                wrong.append(len(block))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(3_000):
        tail.append([f"cat cat w{i}"])
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_scores_are_those_of_bm25s_on_real_texts() -> None:
    rows = glosses()
    if rows is None:
        pytest.skip("no shared data (set MINDGRID_DATA)")
    import bm25s

    rows, queries = rows[:8_000], rows[8_000:8_030]
    peer = bm25s.BM25(k1=scores.K1, b=scores.B, method="lucene")
    peer.index([ENGLISH.document(text).terms for text in rows], show_progress=False)
    words = Words([WordBlock.of(rows, ENGLISH)])
    totals = words.totals()
    for query in queries:
        # bm25s refuses terms that it does not know.
        terms = [term for term in ENGLISH.query(query) if term in peer.vocab_dict]
        ours = np.zeros(len(rows), np.float32)
        scored = words.search(terms, words.stats(terms, None, totals), None, len(rows))
        ours[scored.positions] = scored.scores
        theirs = peer.get_scores(terms) * (scores.K1 + 1)
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
