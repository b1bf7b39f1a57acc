"""The set `full`: every tool of `brief`, some with more arguments, and the rest."""

from __future__ import annotations

from system.tools import channels, decks, drafts, finding, letters, pages, programs, tabs, texts

TOOLS = tuple(
    each
    for room in (texts, finding, tabs, pages, decks, drafts, letters, channels, programs)
    for each in room.TOOLS
)
"""The tools in the order in which a server lists them."""
