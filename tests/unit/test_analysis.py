"""Two spellings of a word are one term, and what has no blanks is found by what is inside."""

from __future__ import annotations

import threading
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindgrid.shards.analysis import LANGUAGES, SIMPLE, TERM_CHARACTERS_MAX, Analyzer
from mindgrid.shards.errors import ConfigError

SIMPLE_RULES = Analyzer(SIMPLE)
ENGLISH = Analyzer("english")

SCRIPTS = (
    "aAzZ09_'’-. \u0301\u00ad\u200déÉßſıİøæŁ"
    "сйЙёЁї́ςΣσάΆ"
    "नमस्ते़ க்"
    "אָבּ أبِتّـ"
    "東京にガｶﾞー々한국어가"
    "สวัำ่ ລາວ ខ្មែ မြန်"
    "😀🇩🇪²½ﬁ\U00020000\U0001e900\ud800"
)
texts = st.text(st.sampled_from(SCRIPTS) | st.characters(), max_size=40)


def _terms(text: str) -> list[str]:
    return SIMPLE_RULES.document(text).terms


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Café", "CAFE"),
        ("cafe\u0301", "café"),
        ("Straße", "STRASSE"),
        ("İstanbul IŞIK", "istanbul ışık"),
        ("Σίσυφος", "ΣΙΣΥΦΟΣ"),
        ("τῷ", "τω"),
        ("Ёлка", "елка"),
        ("мо́жет", "может"),
        ("ÅNGSTRÖM \u212bngström", "ångström angstrom"),
        ("Łódź Ærøskøbing", "lodz aeroskobing"),
        ("ﬁne ｆｕｌｌ m²", "fine full m2"),
        ("ｶﾞﾗｽ", "ガラス"),
        ("\u1112\u1161\u11ab국", "한국"),
        ("شَدَّة", "شدة"),
        ("ســـلام", "سلام"),
        ("שָׁלוֹם", "שלום"),
        ("co\u00adoperate", "cooperate"),
        ("น้ำ", "น\u0e49\u0e4d\u0e32"),
    ],
)
def test_two_spellings_of_a_word_are_one_term(one: str, other: str) -> None:
    assert _terms(one) == _terms(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("край", "краи"),
        ("її", "іі"),
        ("की", "क"),
        ("कि", "की"),
        ("ก็", "ก"),
        ("أب", "اب"),
        ("が", "か"),
        ("한", "하"),
    ],
)
def test_marks_that_make_another_letter_stay(one: str, other: str) -> None:
    assert _terms(one) != _terms(other)


def test_a_word_is_a_run_of_letters_marks_and_digits() -> None:
    text = "snake_case don't l’eau 3.14 नमस्ते\tv2;C++"
    words = ["snake", "case", "don", "t", "l", "eau", "3", "14", "नमस्ते", "v2", "c"]
    assert _terms(text) == words
    assert SIMPLE_RULES.document(text).length == len(words)


def test_an_unspaced_text_is_found_by_each_word_inside_it() -> None:
    for text, words in {
        "東京都に住んでいます": ["東京", "東京都", "都", "住んで", "に"],
        "我喜欢吃苹果": ["苹果", "喜欢", "我", "果"],
        "서울에서 만나요": ["서울", "만나요", "서", "에서"],
        "สวัสดีชาวโลก": ["สวัสดี", "โลก", "ชาว", "ดี"],
        "ສະບາຍດີ": ["ສະບາຍ", "ດີ"],
        "ភាសាខ្មែរ": ["ខ្មែរ", "ភាសា"],
        "မြန်မာစာ": ["မြန်မာ", "စာ"],
        "データを保存": ["データ", "保存", "ー"],
    }.items():
        document = set(SIMPLE_RULES.document(text).terms)
        for word in words:
            query = SIMPLE_RULES.query(word)
            assert query, word
            assert set(query) <= document, word


def test_a_query_looks_for_single_characters_only_where_they_stand_alone() -> None:
    assert SIMPLE_RULES.query("東京都 に GPU") == ["gpu", "東京", "京都", "に"]


def test_the_length_counts_each_character_once_and_bigrams_not_at_all() -> None:
    document = SIMPLE_RULES.document("GPU東京都")
    assert sorted(document.terms) == sorted(["gpu", "東", "京", "都", "東京", "京都"])
    assert document.length == 4


def test_words_beside_unspaced_characters_are_words() -> None:
    assert SIMPLE_RULES.query("iPhoneを2024年") == ["iphone", "2024", "を", "年"]


def test_a_language_stems_and_drops_stop_words_and_simple_does_neither() -> None:
    text = "The runners weren't running"
    assert ENGLISH.document(text).terms == ["runner", "run"]
    assert ENGLISH.document(text).length == 2
    assert _terms(text) == ["the", "runners", "weren", "t", "running"]


def test_a_stop_word_is_one_in_any_spelling() -> None:
    assert Analyzer("french").query("ÉTÉ à l’A\u0300") == []
    assert Analyzer("german").query("FÜR fu\u0308r fur") == []
    assert Analyzer("turkish").query("ARTIK artık") == []


def test_words_of_substance_are_no_stop_words() -> None:
    words = "computer system test work name important fire home first new microsoft"
    assert len(ENGLISH.query(words)) == len(words.split())


@pytest.mark.parametrize(
    ("language", "forms"),
    [
        ("english", "connect connected connecting connections"),
        ("french", "général générale généraux GENERAUX"),
        ("german", "Haus Häuser Häusern hauser"),
        ("russian", "ёлка ёлки елку"),
        ("spanish", "canción canciones"),
        ("turkish", "ağaç ağaçlar agac"),
    ],
)
def test_the_forms_of_a_word_are_one_term(language: str, forms: str) -> None:
    assert len(set(Analyzer(language).query(forms))) == 1


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_finds_a_word_with_and_without_its_accents(language: str) -> None:
    analyzer = Analyzer(language)
    assert analyzer.query("Café RÉSUMÉS") == analyzer.query("cafe resumes") != []


@pytest.mark.parametrize("name", ["", "klingon", "English", "porter", "dutch_porter"])
def test_an_unknown_language_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ConfigError, match=r"simple or one of: arabic, .*yiddish") as caught:
        Analyzer(name)
    assert caught.value.where == "text_search"


@pytest.mark.parametrize("letter", ["x", "é", "я", "न\u093c", "ก\u0e49"])
def test_a_word_without_end_makes_short_terms(letter: str) -> None:
    for analyzer in (SIMPLE_RULES, ENGLISH):
        assert max(map(len, analyzer.document(letter * 10_000).terms)) <= TERM_CHARACTERS_MAX
    assert len(_terms("x" * 10_000)) == 1
    digest = "0123456789abcdef" * 8
    assert _terms(f"sha512 {digest}")[1:] == SIMPLE_RULES.query(digest)


def test_marks_without_end_on_one_character_make_short_terms() -> None:
    assert max(map(len, _terms("ก" + "\u0e49" * 10_000 + "ข"))) <= 10


@given(texts)
def test_terms_are_never_empty_and_can_always_be_stored(text: str) -> None:
    for analyzer in (SIMPLE_RULES, ENGLISH):
        document = analyzer.document(text)
        assert all(0 < len(term.encode()) <= 4 * TERM_CHARACTERS_MAX for term in document.terms)
        assert 0 <= document.length <= len(document.terms)


@given(texts)
def test_a_text_is_found_by_itself(text: str) -> None:
    for analyzer in (SIMPLE_RULES, ENGLISH):
        document = analyzer.document(text)
        assert set(analyzer.query(text)) <= set(document.terms)
        assert bool(analyzer.query(text)) == bool(document.terms)


@given(texts)
def test_terms_do_not_depend_on_how_the_text_is_composed(text: str) -> None:
    composed = {form: _terms(unicodedata.normalize(form, text)) for form in ("NFC", "NFD", "NFKC")}
    assert all(terms == _terms(text) for terms in composed.values()), composed


@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_ascii_takes_a_short_cut_to_the_same_terms(text: str) -> None:
    # A letter beyond ASCII, apart from the rest, sends the whole text the long way.
    assert _terms(text) == _terms(f"{text} я")[:-1]


def test_threads_share_an_analyzer() -> None:
    words = [f"running{i} happily{i}ness" for i in range(3_000)]
    expected = [Analyzer("english").query(text) for text in words]
    shared = Analyzer("english")
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(
            text for text, terms in zip(words, expected, strict=True) if shared.query(text) != terms
        )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_fingerprint_tells_rules_apart() -> None:
    fingerprints = {name: Analyzer(name).fingerprint for name in (SIMPLE, *LANGUAGES)}
    assert len(set(fingerprints.values())) == len(fingerprints)
    assert all(0 <= fingerprint < 2**63 for fingerprint in fingerprints.values())
    assert Analyzer("english").fingerprint == fingerprints["english"]
