"""A text that is spread over pieces, as the runs of a paragraph are: replaced in place. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def occurrences(pieces: Sequence[str], old: str) -> int:
    """Count how often `old` stands in the joined pieces, without overlap."""
    return "".join(pieces).count(old)


def spliced(pieces: Sequence[str], old: str, new: str) -> list[str]:
    """Replace every `old` in the joined pieces; `new` goes into the piece where `old` began.

    So a word that is half bold becomes a word in the font of its first half; no other piece changes.
    """
    joined = "".join(pieces)
    result = []
    start = skip = 0
    for piece in pieces:
        end = start + len(piece)
        text = []
        place = max(start, skip)
        while place < end:
            found = joined.find(old, place)
            if found < 0 or found >= end:
                text.append(joined[place:end])
                break
            text += [joined[place:found], new]
            place = skip = found + len(old)
        result.append("".join(text))
        start = end
    return result
