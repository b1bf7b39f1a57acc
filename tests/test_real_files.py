"""Every tool on office files that nobody here wrote, and on crude ones: a text, or one line that says why not.

The real ones are fetched: `python tests/real_files/fetch.py FOLDER --test`; the tests find them in REAL_FILES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_tools import write_deck, write_fees, write_memo, write_report

from system.tools.server import tools_of

ROOT = Path(__file__).resolve().parents[1]
REAL = os.environ.get("REAL_FILES", "")
FULL = tools_of("full")

real = pytest.mark.skipif(
    not REAL, reason="the real files are not here: tests/real_files/fetch.py FOLDER --test"
)


def probed(folder: Path) -> list[dict[str, Any]]:
    """Every call on the files of a folder, in a process of its own."""
    command = [sys.executable, str(ROOT / "tests" / "real_files" / "probe.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(calls: list[dict[str, Any]]) -> None:
    """Each call gives a text or one line of error, within ten seconds and 300 megabytes, the interpreter included."""
    for call in calls:
        assert call["text"] or (call["set"] == "brief" and call["tool"] == "read_file"), call
        assert call["text"] != "None" and call["seconds"] < 10 and call["megabytes"] < 300, call
        if call["failed"]:
            assert call["text"].startswith("error: ") and "\n" not in call["text"], call
            assert "Traceback" not in call["text"] and "/tmp/" not in call["text"], call


# real files


@pytest.fixture(scope="module")
def real_calls() -> list[dict[str, Any]]:
    return probed(Path(REAL))


@real
def test_every_tool_opens_each_real_file_or_says_why_it_can_not(real_calls: list[dict[str, Any]]) -> None:
    check(real_calls)
    kinds = Counter(file.parent.name for file in Path(REAL).glob("*/*"))
    assert kinds["pptx"] >= 60 and kinds["docx"] >= 40 and kinds["pdf"] >= 60, kinds
    read = {"read_pdf", "read_slides", "read_document", "read_sheet", "read_mail", "find"}
    refused = {call["file"]: call["text"] for call in real_calls if call["failed"] and call["tool"] in read}
    assert all("password" in line for line in refused.values()), refused
    assert len(refused) < 15


@real
def test_every_real_file_can_be_changed_or_the_line_says_why_not(real_calls: list[dict[str, Any]]) -> None:
    changes = {"add_slide", "edit_slides", "delete_slide", "append_document", "edit_document", "edit_cell"}
    refused = {
        call["text"].split(" is ")[-1] for call in real_calls if call["failed"] and call["tool"] in changes
    }
    assert refused <= {"in the strict form of its format, which can only be read here"}
    changed = {
        call["file"] for call in real_calls if call["tool"].startswith("read_") and "Quagga" in call["text"]
    }
    files = {
        f.name for f in Path(REAL).glob("*/*") if f.suffix in (".docx", ".pptx") and "strict" not in f.name
    }
    assert files <= changed


@real
def test_a_real_page_of_two_columns_is_read_one_after_the_other() -> None:
    arguments = {"path": "pypdf-resources-issue-604.pdf", "page": 5, "order": "columns"}
    text, failed = FULL["read_pdf"].call(Path(REAL) / "pdf", arguments)
    places = [
        text.index(words)
        for words in (
            "Updates in Version 1.2020",
            "Last bullet was updated",
            "recommended by the ATA",
            "Papillary Carcinoma",
            'All of the following: "or NIFTP"',
        )
    ]
    assert not failed and places == sorted(places)


@real
def test_a_real_table_keeps_its_rows_and_cells() -> None:
    arguments = {"path": "pypdf-resources-GeoBase_NHNC1_Data_Model_UML_EN.pdf", "page": 3}
    text, failed = FULL["read_pdf_tables"].call(Path(REAL) / "pdf", arguments)
    assert not failed and text.startswith("table 1 of 1, 9 rows:\nDate | Version | Description\n")
    assert "\nSeptember 2002 | Draft 01 | First draft for discussion with Nova Scotia\n" in text
    assert "with Nova Scotia, British Columbia, and the Yukon. Meeting in Victoria, May 2003.\n" in text


# crude files, made here

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
BOOK = (
    f'<workbook xmlns="{MAIN}" xmlns:r="{RELATION}">'
    '<sheets><sheet name="S" sheetId="1" r:id="r"/></sheets></workbook>'
)
LINKS = (
    f'<Relationships xmlns="{RELATIONS}">'
    f'<Relationship Id="r" Type="{RELATION}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>'
)
HEAD = f'<worksheet xmlns="{MAIN}"><sheetData>'
TAIL = "</sheetData></worksheet>"
LAUGHS = "".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10}'>" for n in range(1, 10))
SHEETS = {
    "entity": '<!DOCTYPE w [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    f'{HEAD}<row r="1"><c r="A1" t="str"><v>&a;</v></c></row>{TAIL}',
    "deep": HEAD + "<a>" * 50_000 + "</a>" * 50_000 + TAIL,
    "odd": f'{HEAD}<row><c><v>1</v></c><c t="s"><v>99</v></c></row>{TAIL}',
    "laughs": f"<!DOCTYPE w [<!ENTITY a0 'haha'>{LAUGHS}]>"
    f'{HEAD}<row r="1"><c r="A1" t="str"><v>&a9;</v></c></row>{TAIL}',
    "bomb": HEAD + " " * 100_000_000 + TAIL,
}
"""The one worksheet of a crude workbook."""


@pytest.fixture(scope="module")
def crude(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole files of each kind, then what damage and malice make of them."""
    folder = tmp_path_factory.mktemp("crude")
    for kind, write in {
        "xlsx": write_fees,
        "pdf": write_report,
        "pptx": write_deck,
        "docx": write_memo,
    }.items():
        place = folder / kind
        place.mkdir()
        whole = place / f"whole.{kind}"
        write(whole)
        data = whole.read_bytes()
        (place / f"empty.{kind}").write_bytes(b"")
        (place / f"half.{kind}").write_bytes(data[: len(data) // 2])
        (place / f"noise.{kind}").write_bytes(bytes(range(256)) * 40)
        (place / f"no-parts.{kind}").write_bytes(b"PK\x05\x06" + bytes(18))
        broken = bytearray(data)
        for place_of_damage in range(200, len(broken), 997):
            broken[place_of_damage] ^= 0xFF
        (place / f"broken.{kind}").write_bytes(bytes(broken))
    for name, part in SHEETS.items():
        with zipfile.ZipFile(folder / "xlsx" / f"{name}.xlsx", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("xl/workbook.xml", BOOK)
            archive.writestr("xl/_rels/workbook.xml.rels", LINKS)
            archive.writestr("xl/worksheets/sheet1.xml", part)
    messages = {
        "plain": b"From: a@b.example\nSubject: x\n\nhi",
        "no-headers": b"\nonly a body",
        "odd-charset": b"Subject: =?klingon?q?=E4?=\nContent-Type: text/plain; charset=klingon\n\n\xe4\xff",
        "broken-parts": b'Content-Type: multipart/mixed; boundary="x"\nDate: soon\n\n--x\n\n--y\n',
        "nested": b"".join(
            b'Content-Type: multipart/mixed; boundary="%d"\n\n--%d\n' % (n, n) for n in range(90)
        ),
        "bytes": bytes(range(256)),
    }
    (folder / "eml").mkdir()
    for name, data in messages.items():
        (folder / "eml" / f"{name}.eml").write_bytes(data)
    return folder


def test_every_tool_answers_in_one_line_whatever_the_file_holds(crude: Path) -> None:
    calls = probed(crude)
    check(calls)
    for call in calls:
        assert "root:" not in call["text"], call
        if call["file"].startswith("whole") and call["tool"] not in ("read_file",):
            assert not call["failed"], call
        if call["file"].startswith(("half", "noise", "empty", "bomb")) and call["tool"] in (
            "read_sheet",
            "read_pdf",
            "read_slides",
            "read_document",
            "edit_cell",
            "append_rows",
        ):
            assert call["failed"] or call["file"] == "half.pdf", call
    unread = {call["file"] for call in calls if call["tool"] == "find" and "[not readable:" in call["text"]}
    assert {"noise.docx", "half.pptx", "bomb.xlsx"} <= unread
