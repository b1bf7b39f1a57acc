"""The code agent: the same loop with a shell, the files, and a system prompt that says how to use them."""

from dataclasses import dataclass
from typing import Any

from system.engine import Engine
from system.harness.chat import Chat
from system.harness.conversation import Call, Episode, Limits, converse

SYSTEM = """\
You work alone, in a folder that holds the files of a company. Nobody can answer a question while you work.
Say in a sentence what you are about to do, then make one tool call. Paths are relative to that folder.
Read a text file before you edit or overwrite it. Office files (xlsx, docx, pptx, pdf) are read and written by Python
through bash, with openpyxl, python-docx, python-pptx and pdfplumber; there is no network and nothing can be installed.
For work of several steps keep the list of todowrite up to date. When all is done, answer without a tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeAgent:
    """One tool call a turn until a turn calls none: that text is the answer."""

    trial_id: str
    seed: int
    engine: Engine
    chat: Chat
    limits: Limits

    async def __call__(self, *, instruction: str, tools: list[dict[str, Any]], call: Call) -> Episode:
        opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
        return await converse(self, opening, tools, call)
