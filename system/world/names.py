"""The words that worlds are made of: entity names, attributes, people, file stems and filler sentences.

An entity name is two syllables of three letters each, so no name is part of another one. The pairs are
split by a Latin square: every syllable occurs in both splits, no pair does.
"""

from __future__ import annotations

from typing import Literal

Split = Literal["train", "heldout"]
Domain = Literal["law", "consulting", "banking"]

SPLITS: tuple[Split, ...] = ("train", "heldout")
DOMAINS: tuple[Domain, ...] = ("law", "consulting", "banking")

FIRST_SYLLABLES = (
    "Nor", "Bal", "Tav", "Kes", "Mir", "Dol", "Var", "Sel", "Gan", "Pol", "Rud", "Lem",
    "Hal", "Cor", "Fen", "Jas", "Zan", "Bri", "Tor", "Wen", "Mos", "Kal", "Del", "Per",
)  # fmt: skip
SECOND_SYLLABLES = (
    "vik", "den", "dor", "lin", "mar", "sen", "tig", "ron", "bel", "cas", "fur", "gor",
    "hem", "jin", "kar", "lop", "mun", "nel", "pas", "qui", "rad", "sul", "tem", "wix",
)  # fmt: skip

ATTRIBUTES: dict[Domain, tuple[str, ...]] = {
    "law": ("fee", "hours", "claim"),
    "consulting": ("cost", "revenue", "staff"),
    "banking": ("price", "debt", "cash"),
}

COMPANY_SUFFIX: dict[Domain, str] = {"law": "LLP", "consulting": "Partners", "banking": "Bank"}

PEOPLE = ("ana", "ben", "cora", "dev", "eli", "fay", "gus", "hana", "ivo", "jude", "kim", "leo")

FILE_STEMS: dict[Domain, dict[str, tuple[str, ...]]] = {
    "law": {
        "xlsx": ("fees", "claims", "matters", "billing"),
        "pdf": ("report", "filing", "opinion"),
        "pptx": ("deck", "briefing"),
        "docx": ("memo", "letter"),
        "txt": ("notes", "minutes"),
        "chat": ("cases", "team", "billing"),
    },
    "consulting": {
        "xlsx": ("costs", "budget", "projects", "plan"),
        "pdf": ("report", "survey", "review"),
        "pptx": ("deck", "pitch"),
        "docx": ("memo", "proposal"),
        "txt": ("notes", "minutes"),
        "chat": ("projects", "team", "clients"),
    },
    "banking": {
        "xlsx": ("prices", "debts", "model", "comps"),
        "pdf": ("report", "rating", "prospectus"),
        "pptx": ("deck", "teaser"),
        "docx": ("memo", "terms"),
        "txt": ("notes", "minutes"),
        "chat": ("deals", "team", "desk"),
    },
}

PROSE = (
    "The figures below were checked by two people.",
    "Please treat this page as a draft until the partners have signed it.",
    "All amounts are in thousands unless the page says otherwise.",
    "The client asked for a short summary and a clear table.",
    "Open points are kept in a separate list.",
    "Nothing here replaces the signed agreement.",
    "The next meeting will settle the order of work.",
    "We thank the team for the quick turnaround.",
    "Earlier versions of this document should be deleted.",
    "Questions go to the person named at the end.",
    "The method is the same as in the year before.",
    "Late changes are marked in the margin.",
    "The numbers come from the ledger and not from estimates.",
    "A second review is planned before the end of the month.",
    "Travel is not included and is billed apart.",
    "Sources are listed by name on the last page.",
)

OPENINGS = ("Here is the figure.", "As agreed.", "For the file.", "Please note.", "See below.")

SMALL_TALK = (
    ("Lunch on Friday", "Shall we try the new place at the corner?"),
    ("Office plants", "Somebody please water them while I am away."),
    ("Printer", "The printer on our floor works again."),
    ("Holiday list", "Please enter your days in the shared list."),
    ("Parking", "The garage is closed next week."),
    ("Training", "The course on writing starts after the break."),
)

CHATTER = (
    "morning all",
    "on my way",
    "thanks, got it",
    "can we move the call",
    "done from my side",
    "who has the key",
)

EVENTS = ("review", "call", "workshop", "hearing")


def _pairs(split: Split) -> tuple[str, ...]:
    size = len(SECOND_SYLLABLES)
    return tuple(
        first + second
        for row, first in enumerate(FIRST_SYLLABLES)
        for column, second in enumerate(SECOND_SYLLABLES)
        if ((row + column) % size % 4 == 0) == (split == "heldout")
    )


ENTITY_NAMES: dict[Split, tuple[str, ...]] = {split: _pairs(split) for split in SPLITS}
"""All entity names of a split: 432 for train, 144 for heldout, no name in both."""
