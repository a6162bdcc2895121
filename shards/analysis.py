"""How a text becomes terms: folding, words, stop words, stems, and bigrams where no blanks are.

The same rules serve documents and queries, so what matters is that two spellings of one word meet:

    fold     compatibility forms, case and accents go: Café, CAFÉ and cafe are one word
    split    a word is a run of letters, marks and digits; everything else, _ and ' too, ends it
    reduce   a Snowball language drops its stop words and stems the rest; `simple` does neither
    bigrams  scripts without blanks between words are cut into overlapping pairs of characters

Folding comes first, as with PostgreSQL's unaccent in front of its stemmers: a stemmer that saw the
accents would give café and cafe different stems. It costs a few stems (French mangée is not mangé
any more). Why the other rules are as they are: docs/decisions/0014-words.md.

A change to any rule is a change of format: terms that are already stored would not be found any
more. `Analyzer.fingerprint` tells stored terms of other rules apart; raise `_RULES` with a change.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import Stemmer

from mindgrid.shards.errors import ConfigError

SIMPLE = "simple"
LANGUAGES = tuple(sorted({*Stemmer.algorithms()} - {"porter", "dutch_porter"}))
"""What `text_search` may name besides `simple`; Snowball's second algorithms of a language do not
count as languages."""

TERM_CHARACTERS_MAX = 64
"""A longer word is known by its beginning: a hash in hex is still found, and a megabyte of base64
is one short term."""

_RULES = 1
_CACHE_TOKENS_MAX = 1 << 17

_STOP_WORDS = {
    "danish": "STOPWORDS_DANISH",
    "dutch": "STOPWORDS_DUTCH",
    "english": "STOPWORDS_EN_PLUS",
    "french": "STOPWORDS_FRENCH",
    "german": "STOPWORDS_GERMAN",
    "italian": "STOPWORDS_ITALIAN",
    "norwegian": "STOPWORDS_NORWEGIAN",
    "portuguese": "STOPWORDS_PORTUGUESE",
    "russian": "STOPWORDS_RUSSIAN",
    "spanish": "STOPWORDS_SPANISH",
    "swedish": "STOPWORDS_SWEDISH",
    "turkish": "STOPWORDS_TURKISH",
}
"""The lists of bm25s, which are NLTK's, most of them Snowball's. The other languages drop none:
their stop words are found, and weigh little."""


class Document(NamedTuple):
    """A text as it is stored: its terms, repeats included, and its length as BM25 counts it.

    The length counts each word and each character of an unspaced script once. The bigrams, which
    stand for the same characters again, do not count, or Chinese texts would seem twice as long.
    """

    terms: list[str]
    length: int


class Analyzer:
    """The rules of one `text_search`. Safe for any number of threads, and made to be shared."""

    def __init__(self, text_search: str) -> None:
        """Raises ConfigError if `text_search` is neither `simple` nor one of LANGUAGES."""
        if text_search != SIMPLE and text_search not in LANGUAGES:
            problem = f"{text_search!r} must be {SIMPLE} or one of: {', '.join(LANGUAGES)}"
            raise ConfigError("text_search", problem)
        stop_words = _stop_words(text_search)
        self.fingerprint = _fingerprint(text_search, stop_words)
        """Terms are comparable only among analyzers with the same one; 63 bits."""
        self._stems = None if text_search == SIMPLE else _Stems(text_search, stop_words)

    def document(self, text: str) -> Document:
        """Return the terms under which `text` is found.

        The order is fixed, but not that of the text: unspaced characters come after the words.
        """
        words, runs = split(text)
        terms = self._reduced(words)
        length = len(terms)
        for characters in runs:
            # Alone too, so that a query of one character finds every text that has it.
            terms += characters
            terms += bigrams(characters)
            length += len(characters)
        return Document(terms, length)

    def query(self, text: str) -> list[str]:
        """Return the terms to look for, repeats included; none if `text` is all stop words.

        Of unspaced characters only the bigrams, unless one stands alone: a text that shares single
        characters with the query is mostly about something else.
        """
        words, runs = split(text)
        terms = self._reduced(words)
        for characters in runs:
            terms += bigrams(characters) if len(characters) > 1 else characters
        return terms

    def reduce(self, word: str) -> str:
        """Return the term of a word that `split` returned, "" for a stop word."""
        return word if self._stems is None else self._stems[word]

    def _reduced(self, words: list[str]) -> list[str]:
        if self._stems is None:
            return words
        return [term for term in map(self._stems.__getitem__, words) if term]


@functools.cache
def analyzer_of(text_search: str) -> Analyzer:
    """Return the process's one analyzer of this name, whose stems all shards share."""
    return Analyzer(text_search)


class _Stems(dict[str, str]):
    """From a word to its stem, or to "" if it is a stop word; each is worked out once."""

    def __init__(self, language: str, stop_words: frozenset[str]) -> None:
        super().__init__()
        self._stop_words = stop_words
        self._stem = Stemmer.Stemmer(language, 0).stemWord
        self._lock = threading.Lock()

    def __missing__(self, word: str) -> str:
        if word in self._stop_words:
            term = ""
        else:
            # A Stemmer works in a buffer of its own and must not be entered twice.
            with self._lock:
                term = self._stem(word)
            # The Turkish one ends agac, which is ağaç folded, in ç again.
            term = term if term.isascii() else _fold(term)
        if len(self) >= _CACHE_TOKENS_MAX:
            self.clear()
        self[word] = term
        return term


def split(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the folded words, and each run of unspaced characters, a character with its marks."""
    if text.isascii():
        # A third of the time of a regular expression.
        words = text.encode().translate(ASCII_WORDS).decode().split()
        if max(map(len, words), default=0) > TERM_CHARACTERS_MAX:
            words = [word[:TERM_CHARACTERS_MAX] for word in words]
        return words, []
    classes = _classes()
    text = _fold(text)
    if classes.special.search(text) is None:
        return _WORDS(text), []
    runs = [classes.characters.findall(run) for run in classes.runs.findall(text)]
    if runs:
        text = classes.runs.sub(" ", text)
    return classes.words.findall(text), runs


def bigrams(characters: list[str]) -> Iterable[str]:
    """Return each pair of neighbours as one term."""
    return map(str.__add__, characters, characters[1:])


def _fold(text: str) -> str:
    """Return `text` without what two spellings of a word may differ in.

    Decomposed first, so that accents can be taken off, and composed again at the end, which puts
    syllables of Hangul and voiced kana back together.
    """
    text = _IGNORED.sub("", unicodedata.normalize("NFKD", text))
    text = _ACCENTS.sub("", text.casefold())
    text = _STROKES.sub(lambda letter: _PLAIN[letter[0]], text)
    return unicodedata.normalize("NFKC", text)


ASCII_WORDS = bytes(
    byte if byte > 127 else ord(chr(byte).lower()) if chr(byte).isalnum() else ord(" ")
    for byte in range(256)
)
"""For `bytes.translate`: lower case, and blanks between words. Bytes of other characters stay."""

_WORDS = re.compile(rf"(\w{{1,{TERM_CHARACTERS_MAX}}})\w*").findall

_IGNORED = re.compile(
    "[\u00ad\u200d\u2060\ufeff\ufe00-\ufe0f"  # soft hyphen, joiners, variation selectors
    "\u0345"  # iota subscript, which folding the case would make a letter
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # points and accents of Hebrew
    "\u0610-\u061a\u0640\u064b-\u0652\u0656-\u065f\u0670"  # points of Arabic, and its stretcher;
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed]"  # hamza and madda make letters and stay
)

# The blocks of combining marks that Latin, Greek and Cyrillic share; vowel signs and marks of other
# scripts lie in the blocks of those. й, ў, ї, ѓ and ќ are letters and keep theirs.
_ACCENTS = re.compile(
    "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
    "(?<![иу]\u0306|і\u0308|[гк]\u0301)"
)

# Letters that have no decomposition, as PostgreSQL's unaccent writes them; and _ ends a word.
_PLAIN = {"ı": "i", "ø": "o", "đ": "d", "ð": "d", "ł": "l", "ħ": "h", "ŧ": "t", "ŋ": "n", "ĸ": "q"}
_PLAIN |= {"þ": "th", "æ": "ae", "œ": "oe", "_": " "}
_STROKES = re.compile(f"[{''.join(_PLAIN)}]")

_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1100, 0x11FF),  # Hangul, which has blanks, but glues its endings to the word
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x31FF),  # radicals, kana, Bopomofo, Hangul
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xA960, 0xA97F),
    (0xAC00, 0xD7FF),
    (0xF900, 0xFAFF),
    (0x1AFF0, 0x1B16F),  # kana
)


_MARKS = ("Mn", "Mc", "Me")
_LETTERS = ("Lo", "Lm", "Nl")


@dataclass(frozen=True, slots=True)
class _Classes:
    """What Python's `re` has no names for."""

    special: re.Pattern[str]
    """What `_WORDS` may not see for what it is: only a text that has some pays for the others."""
    words: re.Pattern[str]
    runs: re.Pattern[str]
    characters: re.Pattern[str]


@functools.cache
def _classes() -> _Classes:
    # 60 ms, and a process that only sees ASCII needs none of it. No mark lies beyond plane 1 but
    # variation selectors, and planes 2 and 3 are Han throughout.
    plane_0 = _ranges(range(0x10000), _MARKS)
    marks = plane_0 + _ranges(range(0x10000, 0x20000), _MARKS)
    letters = "".join(_ranges(range(low, high + 1), _LETTERS) for low, high in _UNSPACED)
    letters += "\U00020000-\U0003ffff"
    return _Classes(
        # `re` looks a character of plane 0 up in a table, and tries the ranges beyond it one by
        # one; so here all of those are one range.
        special=re.compile(f"[{plane_0}{letters}\U00010000-\U0010ffff]"),
        words=re.compile(rf"([\w{marks}]{{1,{TERM_CHARACTERS_MAX}}})[\w{marks}]*"),
        runs=re.compile(f"[{letters}][{letters}{marks}]*"),
        # More marks than any writing puts on a character would make terms without bound.
        characters=re.compile(f"[{letters}][{marks}]{{0,4}}"),
    )


def _ranges(codes: range, categories: tuple[str, ...]) -> str:
    """Return the characters of these categories as they stand in a class of `re`."""
    inside = [unicodedata.category(chr(code)) in categories for code in codes]
    edges = [at for at, (a, b) in enumerate(pairwise([False, *inside, False])) if a != b]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return "".join(f"{chr(codes[low])}-{chr(codes[high - 1])}" for low, high in pairs)


@functools.cache
def _stop_words(text_search: str) -> frozenset[str]:
    """Return the language's stop words as they look when folded and split."""
    if text_search not in _STOP_WORDS:
        return frozenset()
    # Takes 0.2 s, which only they need who stem in one of these languages.
    import bm25s.stopwords

    listed: Iterable[str] = getattr(bm25s.stopwords, _STOP_WORDS[text_search])
    words = [split(word)[0] for word in listed]
    # Lists that have "don't" have "don" and "t" too.
    return frozenset(parts[0] for parts in words if len(parts) == 1)


def _fingerprint(text_search: str, stop_words: frozenset[str]) -> int:
    version = "" if text_search == SIMPLE else Stemmer.version()
    rules = f"{_RULES} {text_search} {version} {' '.join(sorted(stop_words))}"
    return int.from_bytes(hashlib.blake2b(rules.encode(), digest_size=8).digest()) >> 1
