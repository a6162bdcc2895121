"""Search by words, and by words and meaning at once: BM25 and fusion by their formulas."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from tests.support.callers import DIMENSIONS, FUTURE, Caller, Json, record

SPARSE, HYBRID = "SEARCH_MODE_SPARSE", "SEARCH_MODE_HYBRID"
CORPUS = {
    "a": "apple pie recipe",
    "b": "apple crumble and apple sauce with an apple",
    "c": "how to debug a go panic",
    "d": "pie",
    "e": "a pie of an apple is an apple pie indeed so it is",
}
Ranks = dict[str, tuple[int, float]]


def bm25(texts: dict[str, str], query: str) -> dict[str, float]:
    """Return the score of each text that shares a word with the query."""
    words = {id: text.split() for id, text in texts.items()}
    mean = sum(len(each) for each in words.values()) / len(words)
    scores: dict[str, float] = {}
    for id, each in words.items():
        counts = Counter(each)
        score = 0.0
        for term in query.split():
            df = sum(term in other for other in words.values())
            idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            tf = counts[term]
            score += idf * tf * 2.2 / (tf + 1.2 * (1 - 0.75 + 0.75 * len(each) / mean))
        if score:
            scores[id] = score
    return scores


def scored(hits: list[Json]) -> dict[str, float]:
    return {hit["record"]["id"]: hit["score"] for hit in hits}


def lane(hits: list[Json]) -> Ranks:
    return {hit["record"]["id"]: (n, hit.get("score", 0.0)) for n, hit in enumerate(hits, 1)}


def write(notes: Caller, texts: dict[str, str]) -> None:
    notes.upsert(*({"id": id, "content": text} for id, text in texts.items()))


def test_sparse_is_bm25_and_finds_only_what_shares_a_word(notes: Caller) -> None:
    write(notes, CORPUS)
    for query in ("apple", "apple pie", "apple apple pie", "panic nowhere"):
        hits = notes.search(queryText=query, mode=SPARSE)
        expected = bm25(CORPUS, query)
        assert scored(hits) == pytest.approx(expected, rel=1e-6)
        best_first = sorted(expected, key=lambda one: (-expected[one], one))
        assert [hit["record"]["id"] for hit in hits] == best_first
    assert notes.search(queryText="zebra", mode=SPARSE) == []


def test_words_are_counted_over_all_that_is_not_hard_deleted(notes: Caller) -> None:
    write(notes, CORPUS | {"gone": "apple", "out": "words that do not count any more apple"})
    notes.upsert({"id": "later", "content": "apple later", "validFrom": FUTURE})
    notes.upsert({"id": "d", "content": "a pie by another name", "metadata": {"k": "v"}})
    notes.delete("gone")
    notes.delete("out", hard=True)
    counted = CORPUS | {"gone": "apple", "later": "apple later", "d": "a pie by another name"}
    expected = bm25(counted, "apple pie")
    del expected["gone"], expected["later"]
    assert scored(notes.search(queryText="apple pie", mode=SPARSE)) == pytest.approx(expected)
    only = notes.search(queryText="apple pie", mode=SPARSE, filter={"k": "v"})
    assert scored(only) == pytest.approx({"d": expected["d"]})


def test_dense_is_the_default_and_looks_at_no_word(notes: Caller) -> None:
    write(notes, CORPUS)
    hits = notes.search(queryText="zebra")
    assert len(hits) == len(CORPUS)
    for mode in (0, 1, "SEARCH_MODE_UNSPECIFIED", "SEARCH_MODE_DENSE"):
        assert notes.search(queryText="zebra", mode=mode) == hits


def test_words_need_text_and_take_no_vector(notes: Caller) -> None:
    vector = [1.0] * DIMENSIONS
    for mode in (SPARSE, HYBRID):
        words = notes.refused("Search", mode=mode, queryVector=vector)
        assert "query_text: must be set" in words
        assert "query_text: must be set" in notes.refused("Search", mode=mode)
        words = notes.refused("Search", mode=mode, queryText="x", queryVector=vector)
        assert "takes query_text alone" in words
    assert "mode: is 9" in notes.refused("Search", mode=9, queryText="x")
    words = notes.refused("Search", mode=HYBRID, queryText="x", rerankCandidateK=10_001)
    assert "rerank_candidate_k: is 10001" in words


SPELLINGS = [
    ("我喜欢吃苹果派", ["苹果", "喜欢", "苹果派"]),
    ("東京都に住んでいます", ["東京", "東京都", "住んで"]),
    ("カタカナでアップルパイ", ["アップル", "ｱｯﾌﾟﾙ"]),
    ("학교에서 공부합니다", ["학교", "공부"]),
    ("ฉันชอบกินข้าวผัด", ["ข้าวผัด", "ชอบ"]),
    ("Crème Brûlée à la carte", ["creme brulee", "CRÈME", "Cre\u0300me", "carté"]),
    ("Die Straße nach Zürich", ["strasse", "STRASSE", "zurich"]),
    ("ΑΘΉΝΑ", ["αθηνα", "Αθήνα"]),
    ("plain cafes", ["cafés", "CAFÉS"]),
]


def test_words_are_found_in_any_script_and_spelling(notes: Caller) -> None:
    write(notes, {f"r{n}": content for n, (content, _) in enumerate(SPELLINGS)})
    for n, (_, queries) in enumerate(SPELLINGS):
        for query in queries:
            assert notes.found(queryText=query, mode=SPARSE) == [f"r{n}"], query
            hits = notes.search(queryText=query, mode=HYBRID, explain=True)
            by_words = [hit["record"]["id"] for hit in hits if "sparseRank" in hit["explanation"]]
            assert by_words == [f"r{n}"], query


def test_a_language_stems_and_simple_does_not(notes: Caller, english: Caller) -> None:
    for caller in (notes, english):
        caller.upsert({"id": "a", "content": "debugging the panics"}, record("b"))
    assert english.found(queryText="debug a panic", mode=SPARSE) == ["a"]
    assert english.found(queryText="the", mode=SPARSE) == [], "a stop word"
    assert notes.found(queryText="debug a panic", mode=SPARSE) == []
    assert notes.found(queryText="the", mode=SPARSE) == ["a"]


FRUITS = ["apple", "pear", "plum", "fig"]


def write_fruits(notes: Caller) -> None:
    """Write 64 texts, of which three quarters have the word `apple` once or more."""
    notes.upsert(
        *(
            {"id": f"r{n:02}", "content": " ".join(["apple"] * (n % 4) + [FRUITS[n % 3], str(n)])}
            for n in range(64)
        )
    )


def fused(lanes: list[Ranks], depth: int, k: int = 60) -> list[tuple[str, float]]:
    """Return what plain RRF makes of two lanes."""
    scores: Counter[str] = Counter()
    for ranks in lanes:
        for id, (rank, _) in ranks.items():
            if rank <= depth:
                scores[id] += 1.0 / (k + rank)  # type: ignore[assignment]
    shown = {id: float(str(np.float32(score))) for id, score in scores.items()}
    return sorted(shown.items(), key=lambda pair: (-pair[1], pair[0]))


def lanes_of(caller: Caller, query: str) -> list[Ranks]:
    return [lane(caller.search(queryText=query, mode=mode)) for mode in (1, SPARSE)]


DEPTHS: list[tuple[dict[str, int], int]] = [
    ({"topK": 10}, 50),
    ({"topK": 100}, 100),
    ({"topK": 5, "rerankCandidateK": 7}, 7),
    ({"topK": 9, "rerankCandidateK": 3}, 9),
]


def test_hybrid_is_reciprocal_rank_fusion_of_both_lanes_to_a_depth(notes: Caller) -> None:
    write_fruits(notes)
    for query in ("apple", "fig 7 plum"):
        lanes = lanes_of(notes, query)
        for asked, depth in DEPTHS:
            hits = notes.search(queryText=query, mode=HYBRID, **asked)
            found = [(hit["record"]["id"], hit["score"]) for hit in hits]
            assert found == fused(lanes, depth)[: asked["topK"]]


def test_hybrid_is_deterministic_and_plain_rrf_its_default(notes: Caller) -> None:
    write_fruits(notes)
    hits = notes.search(queryText="apple", mode=HYBRID)
    plain = {"method": "FUSION_METHOD_RRF", "k": 60, "denseWeight": 1, "sparseWeight": 1}
    for fusion in (None, {}, plain):
        assert notes.search(queryText="apple", mode=HYBRID, fusion=fusion) == hits


def test_hybrid_filters_both_lanes_before_it_ranks(notes: Caller) -> None:
    write_fruits(notes)
    notes.upsert(*({"id": f"x{n}", "content": "apple", "metadata": {"k": "v"}} for n in range(3)))
    hits = notes.search(queryText="apple", mode=HYBRID, filter={"k": "v"}, explain=True)
    assert [hit["record"]["id"] for hit in hits] == ["x0", "x1", "x2"]
    assert [hit["explanation"]["denseRank"] for hit in hits] == [1, 2, 3]
    assert [hit["explanation"]["sparseRank"] for hit in hits] == [1, 2, 3]


def test_explain_tells_the_rank_and_score_of_each_lane(notes: Caller) -> None:
    write_fruits(notes)
    dense, sparse = lanes_of(notes, "apple fig")
    asked = {"queryText": "apple fig", "topK": 20}
    for hit in notes.search(mode=HYBRID, explain=True, **asked):
        why = hit["explanation"]
        for name, ranks in (("dense", dense), ("sparse", sparse)):
            rank, score = ranks.get(hit["record"]["id"], (0, 0.0))
            if rank > 50:
                rank, score = 0, 0.0
            assert why.get(f"{name}Rank", 0) == rank
            assert why.get(f"{name}Score", 0.0) == score
    for mode, name in ((1, "dense"), (SPARSE, "sparse")):
        hits = notes.search(mode=mode, explain=True, **asked)
        assert [hit["explanation"] for hit in hits] == [
            {f"{name}Rank": n, f"{name}Score": hit["score"]} for n, hit in enumerate(hits, 1)
        ]
    assert "explanation" not in notes.search(mode=HYBRID, **asked)[0]


def test_convex_fusion_weighs_each_lanes_share_of_its_best(notes: Caller) -> None:
    write_fruits(notes)
    lanes = lanes_of(notes, "apple fig")
    for given, weights in (({}, (0.3, 0.7)), ({"denseWeight": 2, "sparseWeight": 0.5}, (2.0, 0.5))):
        scores: dict[str, float] = {}
        for weight, ranks in zip(weights, lanes, strict=True):
            best = max(score for _, score in ranks.values())
            for id, (rank, score) in ranks.items():
                if rank <= 50:
                    scores[id] = scores.get(id, 0.0) + weight * score / best
        fusion = {"method": "FUSION_METHOD_CONVEX", **given}
        hits = notes.search(queryText="apple fig", mode=HYBRID, topK=20, fusion=fusion)
        best_first = sorted(scores, key=lambda one: (-scores[one], one))[:20]
        assert [hit["record"]["id"] for hit in hits] == best_first
        assert scored(hits) == pytest.approx({id: scores[id] for id in best_first}, rel=1e-5)


def test_rrf_takes_weights_and_another_k(notes: Caller) -> None:
    write_fruits(notes)
    (_, sparse) = lanes_of(notes, "apple fig")
    hits = notes.search(
        queryText="apple fig", mode=HYBRID, topK=10, fusion={"sparseWeight": 3, "k": 1}
    )
    assert scored(hits) == pytest.approx(
        {id: 3 / (1 + rank) for id, (rank, _) in sparse.items() if rank <= 10}
    )
    for fusion, words in (({"denseWeight": -1}, "fusion.dense_weight"), ({"method": 7}, "fusion.")):
        assert words in notes.refused("Search", queryText="x", mode=HYBRID, fusion=fusion)
