"""Text replaced inside office files, in the paragraphs of their parts, the formatting kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module without stubs

from system.tools.parts import Element, check_package, parse_part, save_parts
from system.tools.splice import occurrences, spliced

_SPACE = "{http://www.w3.org/XML/1998/namespace}space"


def replace_text(
    file: Path, parts: Callable[[ZipFile], list[str]], namespace: str, old: str, new: str, *, every: bool
) -> int:
    """Replace a text in the paragraphs of some parts of a file; gives how often.

    Args:
        file: An office file.
        parts: Names the parts to look through.
        namespace: Of the elements `p` (paragraph) and `t` (its text) there, with braces.
        old: What to replace; it must lie within one paragraph.
        new: What to put there.
        every: Replace all; else `old` must occur once.
    """
    if not old:
        raise ValueError("old must not be empty")
    check_package(file)
    with ZipFile(file) as archive:
        trees = {name: parse_part(archive, name) for name in parts(archive)}
    found: list[tuple[str, list[Element]]] = []
    for name, tree in trees.items():
        for paragraph in tree.iter(f"{namespace}p"):
            pieces = list(_own_texts(paragraph, namespace))
            found += [(name, pieces)] * (occurrences([piece.text or "" for piece in pieces], old) > 0)
    count = sum(occurrences([piece.text or "" for piece in pieces], old) for _, pieces in found)
    if count == 0:
        raise ValueError(f"old must be a text within one paragraph of {file.name}, got {old!r}")
    if count > 1 and not every:
        raise ValueError(f"old must occur once, got {count} times; give more of the text, or set every")
    for _, pieces in found:
        for piece, text in zip(pieces, spliced([piece.text or "" for piece in pieces], old, new)):
            piece.text = text
            if namespace.endswith("wordprocessingml/2006/main}"):
                piece.set(_SPACE, "preserve")
    changed = {name for name, _ in found}
    save_parts(
        file,
        {
            name: etree.tostring(trees[name], xml_declaration=True, encoding="UTF-8", standalone=True)
            for name in changed
        },
    )
    return count


def _own_texts(paragraph: Element, namespace: str) -> Iterator[Element]:
    """The texts of a paragraph, without those of a paragraph inside it, as a text box has."""
    for piece in paragraph.iter(f"{namespace}t"):
        if next(piece.iterancestors(f"{namespace}p")) is paragraph:
            yield piece
