"""The scripted expert's calls, made with the tools of the code agent: the same texts come back."""

from __future__ import annotations

import shlex

from system.harness.chat import ToolCall

from . import expert

_ROWS = """
import openpyxl
for sheet in openpyxl.load_workbook({path!r}):
    for row in sheet.iter_rows():
        if any(c.value == {find!r} for c in row):
            print(" | ".join(f"{{c.coordinate}}: {{c.value}}" for c in row if c.value is not None))
"""
_EDIT = """
import openpyxl
book = openpyxl.load_workbook({path!r})
book.active[{cell!r}] = int({value!r})
book.save({path!r})
"""
_PDF = """
import pdfplumber
for page in pdfplumber.open({path!r}).pages:
    print("\\n".join(line for line in page.extract_text().splitlines() if {find!r} in line))
"""
_SLIDES = """
import pptx
for slide in pptx.Presentation({path!r}).slides:
    for shape in slide.shapes:
        lines = shape.text_frame.text.splitlines() if shape.has_text_frame else []
        rows = shape.table.rows if shape.has_table else []
        lines += [": ".join(cell.text for cell in row.cells) for row in rows]
        print("\\n".join(line for line in lines if {find!r} in line))
"""
_DOCUMENT = """
import docx
document = docx.Document({path!r})
lines = [p.text for p in document.paragraphs]
lines += [": ".join(c.text for c in row.cells) for table in document.tables for row in table.rows]
print("\\n".join(line for line in lines if {find!r} in line))
"""
_CHANNEL = """
import json
for said in json.load(open("chat/" + {channel!r} + ".json")):
    print(said["user"] + ": " + said["text"])
"""
_MAILS = """
import mailbox
for n, mail in enumerate(mailbox.mbox("mail.mbox", create=False), start=1):
    if mail["Subject"] == {query!r}:
        print(f"m{{n}} | {{mail['From']}} | {{mail['Subject']}}")
"""
_MAIL = """
import mailbox
mail = list(mailbox.mbox("mail.mbox", create=False))[int({id!r}[1:]) - 1]
print(mail.get_payload(decode=True).decode())
"""
_PROGRAMS = {
    "read_sheet": _ROWS,
    "edit_cell": _EDIT,
    "read_pdf": _PDF,
    "read_slides": _SLIDES,
    "read_document": _DOCUMENT,
    "read_channel": _CHANNEL,
    "search_mail": _MAILS,
    "read_mail": _MAIL,
}


def by_shell(call: expert.ToolCall) -> ToolCall:
    """The call of the code agent in place of one with an office tool."""
    if call.name == "write_file":
        path, content = call.arguments["path"], call.arguments["content"]
        return ToolCall("write", {"filePath": path, "content": content})
    if call.name == "search_files":
        query = shlex.quote(call.arguments["query"])
        return ToolCall("bash", {"command": f"grep -F {query} *.txt /dev/null | sed 's/:/: /'"})
    if call.name == "run_code":
        return ToolCall("bash", {"command": f"python3 -c {shlex.quote(call.arguments['code'])}"})
    program = _PROGRAMS[call.name].format(**call.arguments)
    return ToolCall("bash", {"command": f"python3 - <<'END'\n{program}\nEND"})
