"""Whether a rejected answer is the wanted one in another spelling."""

from __future__ import annotations

_DIGITS = "0123456789"


def near_miss(expected: str, got: str) -> bool:
    """Whether `got` is or holds what was wanted, in other words: another case, other blanks, units, a sentence around.

    A wanted number must be the first or the last number that was given; any other wanted text must occur whole.
    Nothing is near to an empty text.
    """
    wanted, given = numbers_in(expected), numbers_in(got)
    if len(wanted) == 1 and not any(letter.isalpha() for letter in expected):
        return bool(given) and wanted[0] in (given[0], given[-1])
    return bool(_words(expected)) and f" {_words(expected)} " in f" {_words(got)} "


def numbers_in(text: str) -> list[float]:
    """The numbers of a text in order; commas may group digits, and the minus of 5-7 is none."""
    found: list[float] = []
    start = -1
    for place, letter in enumerate(f"{text} "):
        inside = letter in _DIGITS or (start >= 0 and letter in ".," and text[place - 1] in _DIGITS)
        if inside and start < 0:
            start = place
        elif start >= 0 and not inside:
            sign = -1 if f" {text}"[start] in "-−" and not f"  {text}"[start].isalnum() else 1
            found += [sign * number for number in _number(text[start:place])]
            start = -1
    return found


def _number(spelt: str) -> list[float]:
    """What digits, commas and points spell; a point or comma at the end is the sentence's."""
    plain = spelt.rstrip(".,").replace(",", "")
    return [float(plain)] if plain.count(".") <= 1 else []


def _words(text: str) -> str:
    """Letters and digits of a text, in one case, single blanks between them."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
