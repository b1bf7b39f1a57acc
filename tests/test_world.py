"""Worlds: the same bytes from the same seed, files that real libraries read, splits that share nothing."""

from __future__ import annotations

import hashlib
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
from playing import copied, play

from system.verify import verify
from system.world import names
from system.world.assignment import CALLS_OF_LEVEL, draw_assignment
from system.world.company import KINDS, Company, make_company
from system.world.distractor import MOST_DISTRACTORS, draw_distractors
from system.world.generate import LEVEL_SHARES, draw, draw_assignments, generate
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


def test_what_a_seed_gives_stays_as_it_was(tmp_path: Path):
    """The policy that comes with the project has learnt these worlds: a change here makes it a stranger to them."""
    found = {}
    for split in names.SPLITS:
        drawn = draw(split=split, worlds=4, tasks=16, seed=3)
        folders = generate(tmp_path / split, split=split, worlds=4, tasks=16, seed=3)
        plain = [f for f in (tmp_path / split).rglob("*") if f.suffix in (".txt", ".csv", ".json")]
        text = repr(drawn) + repr([folder.name for folder in folders])
        content = b"".join(file.read_bytes() for file in sorted(plain))
        found[split] = hashlib.sha256(text.encode() + content).hexdigest()[:16]
    assert found == {"train": "39c92109f7f260c9", "heldout": "24e0becf2bb3cbbe"}


def test_dozens_of_worlds_give_hundreds_of_tasks_of_every_domain_kind_and_length():
    companies, drawn = draw(split="train", worlds=36, tasks=480, seed=0)
    assert {company.domain for company in companies} == set(names.DOMAINS) and len(names.DOMAINS) == 3
    assert {assignment.family for _, assignment in drawn} == {"find", "sum", "edit", "write"}
    levels = [assignment.level for _, assignment in drawn]
    assert {level: levels.count(level) for level in LEVEL_SHARES} == {1: 72, 2: 168, 3: 144, 4: 96}
    assert len({(place, assignment.instruction) for place, assignment in drawn}) == 480


def test_old_editions_hold_the_same_labels_and_no_value_that_is_true_today():
    for seed in range(40):
        company = make_company(seed, split="train")
        today = {fact.value for fact in company.facts}
        editions = draw_distractors(company, MOST_DISTRACTORS)
        assert len({source.name for source in editions}) == MOST_DISTRACTORS
        assert draw_distractors(company, 3) == editions[:3]
        for number, edition in enumerate(editions):
            original = [source for source in company.sources if "." in source.name][number % 6]
            assert {fact.label for fact in edition.facts} == {fact.label for fact in original.facts}
            assert not {fact.value for fact in edition.facts} & today
            assert edition.name.startswith("old/") and {fact.source for fact in edition.facts} == {
                edition.name
            }


@pytest.mark.parametrize("count", [-1, 13])
def test_more_old_editions_than_a_search_shows_are_refused(count: int, company: Company, tmp_path: Path):
    with pytest.raises(ValueError, match=f"distractors must be from 0 to 12, got {count}"):
        draw_distractors(company, count)
    with pytest.raises(ValueError, match=f"distractors must be from 0 to 12, got {count}"):
        generate(tmp_path / "x", split="train", worlds=1, tasks=1, seed=0, distractors=count)


@pytest.mark.parametrize("distractors", [0, MOST_DISTRACTORS])
def test_expert_solves_a_sample_of_every_set_and_an_answer_wrong_by_one_earns_nothing(
    distractors: int, tmp_path: Path
):
    shares = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    folders = generate(
        tmp_path / "set",
        split="heldout",
        worlds=3,
        tasks=12,
        seed=1,
        level_shares=shares,
        distractors=distractors,
    )
    for folder in folders:
        task = read_task(folder)
        assert task.world is not None
        assert len(list(task.world.glob("old/*"))) == distractors
        world = copied(task.world, tmp_path / "play" / task.id)
        answer, _ = play(task.instruction, tmp_path / "play" / task.id)
        assert verify(folder, world, answer).reward == 1.0, task.instruction
        if task.family in ("find", "sum"):
            assert {verify(folder, world, str(int(answer) + by)).reward for by in (-1, 1)} == {0.0}


def test_worlds_with_old_editions_make_other_tasks(tmp_path: Path):
    arguments: Any = {"split": "train", "worlds": 1, "tasks": 2, "seed": 0}
    without = generate(tmp_path / "a", **arguments)
    with_two = generate(tmp_path / "b", **arguments, distractors=2)
    assert not {folder.name for folder in without} & {folder.name for folder in with_two}
    assert [read_task(f).instruction for f in without] == [read_task(f).instruction for f in with_two]
    assert "distractors = 2" in (with_two[0] / "task.toml").read_text()
