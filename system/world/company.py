"""A simulated company as a value: which facts it knows and in which source each one is written.

Pure: `make_company(seed)` gives the same record on every machine, and nothing here touches a file.
`office.py` writes the record as office files, `demonstration.py` answers tool calls from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from . import names
from .names import Domain, Split

Kind = Literal["xlsx", "pdf", "pptx", "docx", "txt", "mail", "chat"]
KINDS: tuple[Kind, ...] = ("xlsx", "pdf", "pptx", "docx", "txt", "mail", "chat")

_ENTITY_COUNT = 15
_FACTS_PER_SLIDE = 2
_FACT_COUNT: dict[str, tuple[int, int]] = {
    "xlsx": (5, 7),
    "pdf": (4, 6), "pptx": (4, 6),
    "docx": (4, 6), "txt": (4, 5),
    "mail": (4, 6), "chat": (4, 4),
}  # fmt: skip
_RENEWED_COUNT = {"pdf": 2, "pptx": 1, "docx": 2, "txt": 1, "mail": 2, "chat": 1}
"""Sheet labels that a source repeats with a newer value: ten in all, as many as two sheets hold at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One keyed number in one source: `Fact(label="Norvik fee", value=4821, source="fees.xlsx")`."""

    label: str
    value: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place where facts are written: `Source(name="fees.xlsx", kind="xlsx", facts=(...))`.

    name is the word that instructions use (a file name, `mail`, or `#channel`), facts are in the order in
    which they stand in the source.
    """

    name: str
    kind: Kind
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """One message of the mailbox: `Mail(sender="ana@tavdor.example", subject="Norvik fee", body="...")`."""

    sender: str
    subject: str
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """Everything a world holds: `make_company(7, split="train").sources[0].facts[0].label`.

    sources are sorted by kind in the order of `KINDS`; mails hold the facts of the source `mail` among small
    talk, message number i is `m{i}` counted from 1; chats map a channel to its (user, text) messages.
    """

    seed: int
    split: Split
    domain: Domain
    name: str
    entities: tuple[str, ...]
    sources: tuple[Source, ...]
    mails: tuple[Mail, ...]
    chats: dict[str, tuple[tuple[str, str], ...]]
    events: tuple[str, ...]

    @property
    def id(self) -> str:
        """The world's name, such as `train-law-7`."""
        return f"{self.split}-{self.domain}-{self.seed}"

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts in the order of the sources."""
        return tuple(fact for source in self.sources for fact in source.facts)

    def source(self, name: str) -> Source:
        """The source called `name`; a ValueError that names it when there is none."""
        for source in self.sources:
            if source.name == name:
                return source
        raise ValueError(f"source must be one of {[s.name for s in self.sources]}, got {name!r}")


def slide_number(index: int) -> int:
    """The slide that shows fact number `index` of a deck (slide 1 is the title)."""
    return 2 + index // _FACTS_PER_SLIDE


def row_number(index: int) -> int:
    """The sheet row of fact number `index` (row 1 is the header)."""
    return 2 + index


def make_company(seed: int, *, split: Split) -> Company:
    """The company of one seed: about forty facts over nine sources, some sheet values out of date.

    Values are distinct within a company. Each source that is not a sheet repeats one or two labels of the
    sheets with a newer value: these are what `edit` tasks carry over. Otherwise a label occurs once.

    Raises:
        ValueError: split is not one of `train`, `heldout`.
    """
    if split not in names.SPLITS:
        raise ValueError(f"split must be one of {names.SPLITS}, got {split!r}")
    rng = random.Random(f"company:{split}:{seed}")
    domain = rng.choice(names.DOMAINS)
    drawn = rng.sample(names.ENTITY_NAMES[split], _ENTITY_COUNT + 1)
    entities, house = tuple(drawn[1:]), drawn[0]
    people = rng.sample(names.PEOPLE, 4)
    sources = _draw_sources(rng, domain, entities)
    return Company(
        seed=seed,
        split=split,
        domain=domain,
        name=f"{house} {names.COMPANY_SUFFIX[domain]}",
        entities=entities,
        sources=sources,
        mails=_draw_mails(rng, house, people, next(s for s in sources if s.kind == "mail")),
        chats={s.name[1:]: _draw_chat(rng, people, s) for s in sources if s.kind == "chat"},
        events=tuple(f"{entity} {rng.choice(names.EVENTS)}" for entity in entities[:4]),
    )


def _draw_sources(rng: random.Random, domain: Domain, entities: tuple[str, ...]) -> tuple[Source, ...]:
    labels = [f"{entity} {attribute}" for entity in entities for attribute in names.ATTRIBUTES[domain]]
    rng.shuffle(labels)
    values = _distinct_values(rng, 64)
    outdated: list[str] = []
    sources = []
    for kind, name in _source_names(rng, domain):
        count = rng.randint(*_FACT_COUNT[kind])
        if kind == "xlsx":
            taken = [labels.pop() for _ in range(count)]
            outdated += taken
        else:
            renewed = [outdated.pop(rng.randrange(len(outdated))) for _ in range(_RENEWED_COUNT[kind])]
            taken = renewed + [labels.pop() for _ in range(count - len(renewed))]
            rng.shuffle(taken)
        facts = tuple(Fact(label=label, value=values.pop(), source=name) for label in taken)
        sources.append(Source(name=name, kind=kind, facts=facts))
    return tuple(sources)


def _source_names(rng: random.Random, domain: Domain) -> list[tuple[Kind, str]]:
    stems = names.FILE_STEMS[domain]
    chosen: list[tuple[Kind, str]] = [("xlsx", f"{stem}.xlsx") for stem in rng.sample(stems["xlsx"], 2)]
    for kind in ("pdf", "pptx", "docx", "txt"):
        chosen.append((kind, f"{rng.choice(stems[kind])}.{kind}"))
    chosen.append(("mail", "mail"))
    return chosen + [("chat", f"#{stem}") for stem in rng.sample(stems["chat"], 2)]


def _distinct_values(rng: random.Random, count: int) -> list[int]:
    """Numbers of two to four digits, each length equally often."""
    values: dict[int, None] = {}
    while len(values) < count:
        low = 10 ** int(1 + 3 * rng.random())
        values[int(low + 9 * low * rng.random())] = None
    return list(values)


def _draw_mails(rng: random.Random, house: str, people: Sequence[str], source: Source) -> tuple[Mail, ...]:
    def mail(subject: str, lines: tuple[str, ...]) -> Mail:
        person = rng.choice(people)
        body = "\n".join((*lines, person.capitalize()))
        return Mail(sender=f"{person}@{house.lower()}.example", subject=subject, body=body)

    mails = [mail(f.label, (rng.choice(names.OPENINGS), f"{f.label}: {f.value}")) for f in source.facts]
    mails += [mail(subject, (line,)) for subject, line in rng.sample(names.SMALL_TALK, 3)]
    rng.shuffle(mails)
    return tuple(mails)


def _draw_chat(rng: random.Random, people: Sequence[str], source: Source) -> tuple[tuple[str, str], ...]:
    texts = [f"{f.label}: {f.value}" for f in source.facts] + rng.sample(names.CHATTER, 3)
    rng.shuffle(texts)
    return tuple((rng.choice(people), text) for text in texts)
