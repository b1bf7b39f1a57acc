"""An index of passages by their words, searched by BM25 (Robertson and Zaragoza 2009). Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)?")
_SATURATION, _LENGTH_SHARE = 1.2, 0.75
_LONGEST_STEM = 4


class Hit(NamedTuple):
    """A passage that was found: `Hit(("fees.xlsx", 3), 2.7)`."""

    key: Hashable
    score: float


class Ranking:
    """Passages under keys; more can be added and any taken out at any time.

    A word counts the more, the fewer passages have it; its repetition counts less and less; a long passage has to
    have it more often.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, Counter[str]] = {}
        self._lengths: dict[Hashable, int] = {}
        self._holders: dict[str, set[Hashable]] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, key: Hashable, text: str) -> None:
        """Add a passage under a new key."""
        if key in self._counts:
            raise ValueError(f"key must be new, got {key!r}")
        found = words(text)
        self._counts[key] = Counter(found)
        self._lengths[key] = len(found)
        self._total += len(found)
        for word in self._counts[key]:
            self._holders.setdefault(word, set()).add(key)

    def remove(self, keys: Iterable[Hashable]) -> None:
        """Take passages out."""
        for key in keys:
            for word in self._counts.pop(key):
                holders = self._holders[word]
                holders.discard(key)
                if not holders:
                    del self._holders[word]
            self._total -= self._lengths.pop(key)

    def search(self, query: str, count: int) -> list[Hit]:
        """The passages that fit best, at most `count`, the best first; of equals the first key."""
        score: dict[Hashable, float] = {}
        size = len(self._counts)
        mean = self._total / size if size else 1.0
        for word in dict.fromkeys(words(query)):
            holders = self._holders.get(word, set())
            rarity = math.log(1 + (size - len(holders) + 0.5) / (len(holders) + 0.5))
            for key in holders:
                often = self._counts[key][word]
                length = 1 - _LENGTH_SHARE + _LENGTH_SHARE * self._lengths[key] / mean
                gain = rarity * often * (_SATURATION + 1) / (often + _SATURATION * length)
                score[key] = score.get(key, 0.0) + gain
        best = sorted(score.items(), key=lambda item: (-item[1], str(item[0])))
        return [Hit(key, value) for key, value in best[:count]]


def words(text: str) -> list[str]:
    """The words of a text, folded, plain plurals as their singular; numbers without separators of thousands."""
    return [_folded(word) for word in _WORD.findall(text)]


def _folded(word: str) -> str:
    if word[0].isdigit():
        return re.sub(r",(?=\d{3}\b)", "", word)
    word = word.casefold().removesuffix("'s")
    if len(word) > _LONGEST_STEM and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > _LONGEST_STEM - 1 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word
