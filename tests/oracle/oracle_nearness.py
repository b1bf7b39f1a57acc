"""Numbers by a regular expression, nearness by lists of words."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[0-9](?:[0-9]|(?<=[0-9])[.,])*")


def numbers_in(text: str) -> list[float]:
    """Every run of digits with single points and commas in it; a sign stands before it and not behind a letter."""
    found = []
    for run in NUMBER.finditer(text):
        plain = run.group().rstrip(".,").replace(",", "")
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?|[0-9]+\.", plain):
            ahead = text[: run.start()]
            signed = ahead[-1:] in ("-", "−") and not ahead[:-1][-1:].isalnum()
            found.append(float(plain) * (-1 if ahead[-1:] and signed else 1))
    return found


def near_miss(expected: str, got: str) -> bool:
    """The wanted number at an end of the given ones; else the wanted words in a row among the given."""
    numbers = numbers_in(expected)
    if len(numbers) == 1 and not re.search(r"[^\W\d_]", expected):
        given = numbers_in(got)
        return given != [] and (given[0] == numbers[0] or given[-1] == numbers[0])
    wanted, words = split(expected), split(got)
    places = range(len(words) - len(wanted) + 1)
    return wanted != [] and any(words[place : place + len(wanted)] == wanted for place in places)


def split(text: str) -> list[str]:
    """Its words in lower case."""
    return re.findall(r"[^\W_]+", text.casefold())
