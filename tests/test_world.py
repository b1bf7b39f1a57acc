"""Worlds: the same bytes from the same seed, files that real libraries read, splits that share nothing."""

from __future__ import annotations

import json
import mailbox
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pdfplumber
import pptx
import pytest
from icalendar import Calendar

from system.world import names
from system.world.assignment import CALLS_OF_LEVEL, draw_assignment
from system.world.company import KINDS, Company, make_company
from system.world.generate import LEVEL_SHARES, draw_assignments, generate
from system.world.office import write_world
from system.world.task import read_task


@pytest.fixture(scope="module")
def company() -> Company:
    return make_company(3, split="train")


@pytest.fixture(scope="module")
def world(company: Company, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(company, tmp_path_factory.mktemp("world"))


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {
        f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()
    }


def test_names_of_the_splits_are_disjoint_and_share_every_syllable():
    train, heldout = names.ENTITY_NAMES["train"], names.ENTITY_NAMES["heldout"]
    assert not set(train) & set(heldout)
    assert len(set(train) | set(heldout)) == len(train) + len(heldout) == 24 * 24
    for split in (train, heldout):
        assert {name[:3] for name in split} == set(names.FIRST_SYLLABLES)
        assert {name[3:] for name in split} == set(names.SECOND_SYLLABLES)


def test_no_name_is_part_of_another_and_no_attribute_begins_another():
    every = [name.lower() for split in names.SPLITS for name in names.ENTITY_NAMES[split]]
    assert {len(name) for name in every} == {6}
    for attributes in names.ATTRIBUTES.values():
        assert not any(a != b and b.startswith(a) for a in attributes for b in attributes)


def test_filler_text_holds_no_digit_and_no_attribute():
    filler = [
        *names.PROSE,
        *names.OPENINGS,
        *names.CHATTER,
        *(text for pair in names.SMALL_TALK for text in pair),
    ]
    assert not any(char.isdigit() for text in filler for char in text)


def test_make_company_gives_the_same_record_for_the_same_seed():
    assert make_company(11, split="train") == make_company(11, split="train")
    assert make_company(11, split="train") != make_company(12, split="train")
    assert make_company(11, split="train").facts != make_company(11, split="heldout").facts


def test_make_company_refuses_an_unknown_split():
    with pytest.raises(ValueError, match=r"split must be one of .*, got 'test'"):
        make_company(0, split="test")  # type: ignore[arg-type]


def test_company_knows_about_forty_distinct_values_over_nine_sources():
    for seed in range(40):
        company = make_company(seed, split="heldout")
        values = [fact.value for fact in company.facts]
        assert len(company.sources) == 9 and {source.kind for source in company.sources} == set(KINDS)
        assert all(4 <= len(source.facts) <= 8 for source in company.sources)
        assert 38 <= len(values) <= 51 and len(set(values)) == len(values)
        assert all(10 <= value <= 9999 for value in values)


def test_a_label_occurs_once_but_for_ten_that_renew_a_sheet():
    for seed in range(40):
        company = make_company(seed, split="train")
        in_sheets = [f.label for s in company.sources if s.kind == "xlsx" for f in s.facts]
        elsewhere = [f.label for s in company.sources if s.kind != "xlsx" for f in s.facts]
        assert len(set(in_sheets)) == len(in_sheets) and len(set(elsewhere)) == len(elsewhere)
        assert len(set(in_sheets) & set(elsewhere)) == 10


def test_write_world_gives_the_same_bytes_in_another_process(company: Company, world: Path, tmp_path: Path):
    script = (
        "import sys, pathlib\nfrom system.world.company import make_company\n"
        "from system.world.office import write_world\n"
        "write_world(make_company(3, split='train'), pathlib.Path(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "other")], check=True, env=environment)
    assert bytes_below(world) == bytes_below(tmp_path / "other")


def test_write_world_refuses_a_folder_that_holds_something(company: Company, world: Path):
    with pytest.raises(ValueError, match="folder must be empty, got"):
        write_world(company, world)


def test_sheets_hold_formulas_and_their_cached_values(company: Company, world: Path):
    for source in (source for source in company.sources if source.kind == "xlsx"):
        formulas = openpyxl.load_workbook(world / source.name)
        values = openpyxl.load_workbook(world / source.name, data_only=True)
        rows = list(values.worksheets[0].iter_rows(values_only=True))
        total = sum(fact.value for fact in source.facts)
        assert rows == [("Item", "Value"), *((f.label, f.value) for f in source.facts), ("Total", total)]
        end = len(rows)
        assert formulas.worksheets[0][f"B{end}"].value == f"=SUM(B2:B{end - 1})"
        assert (
            formulas.worksheets[1]["B4"].value == f"=Values!B{end}"
            and values.worksheets[1]["B4"].value == total
        )


def test_other_files_open_with_the_libraries_of_their_kind(company: Company, world: Path):
    by_kind = {source.kind: source for source in company.sources}
    deck: Any = pptx.Presentation(str(world / by_kind["pptx"].name))
    shown = [shape.text_frame.text for slide in deck.slides for shape in slide.shapes if shape.has_text_frame]
    paragraphs = [paragraph.text for paragraph in docx.Document(str(world / by_kind["docx"].name)).paragraphs]
    notes = (world / by_kind["txt"].name).read_text().splitlines()
    for kind, lines in (("pptx", "\n".join(shown).split("\n")), ("docx", paragraphs), ("txt", notes)):
        assert [f"{f.label}: {f.value}" for f in by_kind[kind].facts] == [x for x in lines if ": " in x]
    with pdfplumber.open(world / by_kind["pdf"].name) as pdf:
        layout = pdf.pages[0].extract_text(layout=True)
    assert all(any(line.split()[-3:] == [*f.label.split(), str(f.value)] for line in layout.splitlines())
               for f in by_kind["pdf"].facts)  # fmt: skip


def test_mail_chat_and_calendar_open_with_the_libraries_of_their_kind(company: Company, world: Path):
    box = mailbox.mbox(world / "mail.mbox")
    read = [(m["From"], m["Subject"], str(m.get_payload()).strip()) for m in box]
    box.close()
    assert read == [(mail.sender, mail.subject, mail.body) for mail in company.mails]
    for channel, messages in company.chats.items():
        chat = json.loads((world / "chat" / f"{channel}.json").read_text())
        assert [(entry["user"], entry["text"]) for entry in chat] == list(messages)
    events = Calendar.from_ical((world / "calendar.ics").read_bytes()).walk("VEVENT")
    assert [str(event["SUMMARY"]) for event in events] == list(company.events)


def test_generate_gives_the_same_bytes_for_the_same_seed(tmp_path: Path):
    first = generate(tmp_path / "a", split="train", worlds=2, tasks=6, seed=5)
    second = generate(tmp_path / "b", split="train", worlds=2, tasks=6, seed=5)
    assert [f.name for f in first] == [f.name for f in second]
    assert bytes_below(tmp_path / "a") == bytes_below(tmp_path / "b")


def test_generated_splits_share_no_label(tmp_path: Path):
    text = {}
    for split in names.SPLITS:
        tasks = generate(tmp_path / split, split=split, worlds=3, tasks=30, seed=0)
        text[split] = " ".join(read_task(task).instruction for task in tasks)
        assert all(read_task(task).split == split for task in tasks)
    assert not any(name in text["train"] for name in names.ENTITY_NAMES["heldout"])
    assert not any(name in text["heldout"] for name in names.ENTITY_NAMES["train"])


def test_heldout_label_occurs_in_no_train_company():
    labels = {
        split: {fact.label for seed in range(100) for fact in make_company(seed, split=split).facts}
        for split in names.SPLITS
    }
    assert not labels["train"] & labels["heldout"]


def test_draw_assignments_keeps_the_mix_and_repeats_nothing():
    companies = [make_company(seed, split="train") for seed in range(12)]
    drawn = draw_assignments(companies, tasks=100, seed=1, level_shares=LEVEL_SHARES)
    levels = [assignment.level for _, assignment in drawn]
    assert [levels.count(level) for level in (1, 2, 3, 4)] == [15, 35, 30, 20]
    assert levels != sorted(levels)
    assert len({(place, assignment.instruction) for place, assignment in drawn}) == 100
    assert {assignment.family for _, assignment in drawn} == {"find", "sum", "edit", "write"}


def test_draw_assignments_refuses_more_tasks_than_a_world_has():
    with pytest.raises(ValueError, match="worlds must be more for 200 different tasks, got 1"):
        draw_assignments([make_company(0, split="train")], tasks=200, seed=0, level_shares={1: 1.0})


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"worlds": 0}, "worlds must be from 1 to 10000, got 0"),
        ({"tasks": 0}, "tasks must be positive, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"level_shares": {5: 1.0}}, r"level_shares must give levels \[1, 2, 3, 4\] shares, got {5: 1.0}"),
        ({"level_shares": {1: float("nan")}}, "level_shares must give levels"),
    ],
)
def test_generate_refuses_numbers_out_of_range(wrong: dict, line: str, tmp_path: Path):
    with pytest.raises(ValueError, match=line):
        generate(tmp_path / "x", **{"split": "train", "worlds": 1, "tasks": 1, "seed": 0, **wrong})


def test_assignment_calls_fit_the_level():
    for seed in range(60):
        company = make_company(seed, split="heldout")
        for level, (least, most) in CALLS_OF_LEVEL.items():
            assert least <= draw_assignment(company, level=level, index=seed).calls <= most


def test_draw_assignment_refuses_an_unknown_level(company: Company):
    with pytest.raises(ValueError, match=r"level must be one of \[1, 2, 3, 4\], got 5"):
        draw_assignment(company, level=5, index=0)
