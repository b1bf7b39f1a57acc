"""Paths that lead out of the world, in every argument of every tool, as the tools' own schemas list them.

A new tool is attacked from the day on which it has a warm-up call, and it must have one (`system.fleet.office`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attack_stage import Stage
from attacking import CANARY, SOUND, foreign_task, gives_up, python, says, solves

from system.fleet.office import calls_of
from system.harness.chat import ToolCall

Call = tuple[str, dict[str, Any]]

CODE = {("run_code", "code"), ("bash", "command")}
"""What these arguments say is done inside the sandbox, whatever it is."""
NAMES_A_PLACE = re.compile(
    "path|file|folder|dir|^to$|attachments|channel|name|^id$|include|pattern", re.IGNORECASE
)
"""Arguments that are tried in every way; of the others, which might turn out to be names as well, in a few."""
SUFFIXES = ("txt", "csv", "json", "mbox", "ics", "xlsx", "docx", "pptx", "pdf")
OUTSIDE = f"""
import os
folder = FOLDER
os.makedirs(folder, exist_ok=True)
word = {CANARY[:9]!r} + {CANARY[9:]!r}
for suffix in {SUFFIXES[:3]!r}: open(f'{{folder}}/secret.{{suffix}}', 'w').write(f'"{{word}}"')
open(folder + '/secret.json', 'w').write('[{{"user": "x", "text": "' + word + '"}}]')
open(folder + '/secret', 'w').write(word)
open(folder + '/mail.mbox', 'w').write('From x Mon Mar  2 09:00:00 2026\\nSubject: ' + word + '\\n\\n' + word + '\\n')
event = 'BEGIN:VEVENT\\nSUMMARY:' + word + '\\nEND:VEVENT\\n'
open(folder + '/secret.ics', 'w').write('BEGIN:VCALENDAR\\n' + event + 'END:VCALENDAR\\n')
import docx, openpyxl, pptx, shutil
from reportlab.pdfgen.canvas import Canvas
shutil.copy(folder + '/mail.mbox', folder + '/secret.mbox')
shutil.copy(folder + '/secret.ics', folder + '/calendar.ics')
book = openpyxl.Workbook(); book.active['A1'] = word; book.save(folder + '/secret.xlsx')
text = docx.Document(); text.add_paragraph(word); text.save(folder + '/secret.docx')
deck = pptx.Presentation(); deck.slides.add_slide(deck.slide_layouts[5]).shapes.title.text = word
deck.save(folder + '/secret.pptx')
page = Canvas(folder + '/secret.pdf'); page.drawString(99, 99, word); page.save()
"""
LINKS = f"""
import os
folder = FOLDER
os.symlink(folder, 'link'); os.symlink('link', 'chain'); os.symlink('/proc/self/root' + folder, 'proc')
for suffix in {SUFFIXES!r}:
    os.symlink(f'{{folder}}/secret.{{suffix}}', f'linked.{{suffix}}')
    os.symlink(f'{{folder}}/made.{{suffix}}', f'dangling.{{suffix}}')
    os.symlink(f'{{folder}}/secret.{{suffix}}', f'.new.{{suffix}}.part')
os.symlink(folder + '/secret.json', 'chat/linked.json')
os.makedirs('.spill', exist_ok=True); os.symlink(folder + '/secret.txt', '.spill/1.txt')
"""


def ways_out(folder: str, suffix: str) -> Iterator[str]:
    """Names of the same file outside."""
    up = "../" * 30
    name = f"secret{suffix}"
    yield from (f"{folder}/{name}", f"{up}{folder[1:]}/{name}", f"chat/../{up}{folder[1:]}/{name}")
    yield from (
        f"/proc/self/root{folder}/{name}",
        f"/proc/self/cwd/{up}{folder[1:]}/{name}",
        f"/world/{up}{folder[1:]}/{name}",
    )
    yield from (
        f"link/{name}",
        f"chain/{name}",
        f"proc/{name}",
        f"./link/../link/{name}",
        f"linked{suffix}",
        f"dangling{suffix}",
    )
    yield from (
        f"{up}{folder[1:]}/made{suffix}",
        f"{folder}/made{suffix}",
        f"link/made{suffix}",
        f"link/deep/made{suffix}",
    )
    yield from (
        f"file://{folder}/{name}",
        f"..\\..\\{name}",
        f"%2e%2e/{name}",
        f"{folder}/{name}\0",
        f"x\0/../{name}",
        folder,
        "link",
        up,
    )


def attacks(calls: list[Call], schemas: list[dict[str, Any]], folder: str) -> Iterator[Call]:
    """Every warm-up call with every text in it, one at a time, replaced by a way out; arguments left out as well."""
    properties = {s["function"]["name"]: s["function"]["parameters"]["properties"] for s in schemas}
    for name, usual in calls:
        for argument, schema in properties[name].items():
            kind = schema.get("type")
            texts = kind == "string" or kind == "array" and schema.get("items", {}).get("type") == "string"
            if not texts or (name, argument) in CODE:
                continue
            given = usual.get(argument, "")
            given = given[0] if isinstance(given, list) and given else given
            suffixes = {os.path.splitext(given)[1] if isinstance(given, str) else "", "", ".txt"}
            for suffix in sorted(s for s in suffixes if s.lstrip(".") in ("", *SUFFIXES)):
                ways = list(ways_out(folder, suffix))
                for way in (
                    ways
                    if NAMES_A_PLACE.search(argument) or str(given).endswith(suffix or "/")
                    else ways[:11:2]
                ):
                    yield name, usual | {argument: [way] if kind == "array" else way}


def state(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.is_file()
    }


@pytest.mark.parametrize("kit", ["full", "brief", "code"])
def test_no_argument_of_any_tool_leads_out_of_the_world(stage: Stage, kit: str, tmp_path: Path) -> None:
    """In a sandbox that hides nothing: only the tools themselves stand before the files outside."""
    world, outside = tmp_path / "world", tmp_path / "outside"
    shutil.copytree(stage.tasks["find"] / "environment/world", world)
    subprocess.run([sys.executable, "-c", OUTSIDE.replace("FOLDER", repr(str(outside)))], check=True)
    before = state(outside)
    assert all(
        CANARY.encode() in (outside / name).read_bytes()
        for name in ("secret.txt", "secret.json", "mail.mbox")
    )
    plain = {
        "action": "call_tools",
        "kit": kit,
        "sandbox": "process",
        "world": str(world),
        "outside": str(outside),
    }
    plain |= {"scratch": str(stage.scratch), "deadline_s": 100.0}
    link = python("code" if kit == "code" else "brief", LINKS.replace("FOLDER", repr(str(outside))))
    link = ToolCall(
        link.name, {key: value for key, value in link.arguments.items() if kit != "brief" or key == "code"}
    )
    schemas = played(stage, plain | {"calls": []})["schemas"]
    calls = calls_of(kit, world)
    assert {schema["function"]["name"] for schema in schemas} == {name for name, _ in calls}
    made = [*calls, tuple(link), *attacks(calls, schemas, str(outside)), *searches(kit)]
    result = played(stage, plain | {"calls": made})
    assert len(result["answers"]) == len(made) > 300 and result["restarts"] == 0
    shown = [(call, answer) for call, (answer, _) in zip(made, result["answers"]) if CANARY in answer]
    assert shown == []
    assert state(outside) == before and result["left"] == sorted(before)


def searches(kit: str) -> list[Call]:
    """What looks through the whole world meets the links in it."""
    if kit == "code":
        return [
            ("grep", {"pattern": CANARY[:8]}),
            ("grep", {"pattern": "a", "path": "link"}),
            ("glob", {"pattern": "**/*"}),
        ]
    found: list[Call] = [
        ("search_files", {"query": CANARY[:8]}),
        ("list_files", {"path": "link"}),
        ("list_files", {}),
    ]
    return found if kit == "brief" else [*found, ("find", {"query": CANARY}), ("list_channels", {})]


def played(stage: Stage, spec: dict[str, Any]) -> dict[str, Any]:
    stage.start(None, **spec)
    (result,) = stage.results(1)
    assert "outcome" not in result, result["outcome"]
    return result


@pytest.mark.parametrize("kit", ["full", "code"])
def test_a_trial_whose_calls_all_lead_out_is_told_so_and_goes_on(
    stage: Stage, kit: str, tmp_path: Path
) -> None:
    """The first ways through a whole trial: each call is answered by an error, and the work still counts."""
    task = foreign_task(tmp_path / "task", SOUND)
    name, key = ("read_file", "path") if kit == "full" else ("read", "filePath")
    calls = [
        python(kit, OUTSIDE.replace("FOLDER", "'/tmp/outside'")),
        python(kit, "import os; os.mkdir('chat')"),
    ]
    calls += [python(kit, LINKS.replace("FOLDER", "'/tmp/outside'"))]
    ways = [way for way in ways_out("/tmp/outside", ".txt") if "\0" not in way]
    calls += [ToolCall(name, {key: way}) for way in ways]
    work = ToolCall("write_file", {"path": "out.txt", "content": "48\n"})
    calls += [work if kit == "full" else ToolCall("write", {"filePath": "out.txt", "content": "48\n"})]
    answers: list[str] = []
    limits = {"turns": 100}
    result = stage.trial(says(calls, answers, gives_up()), task=task, kit=kit, limits=limits)
    assert not [answer for answer in answers if CANARY in answer]
    assert all(answer.startswith("error: ") for answer in answers[3:-1]), answers
    solves(result)
