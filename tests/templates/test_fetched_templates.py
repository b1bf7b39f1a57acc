"""The laws of deltas on the templates that `fetch.py` brings; without them there is nothing to run here."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
from family import (
    ANSWER_STUBS,
    CALL_STUBS,
    FAMILIES,
    Letters,
    answer,
    call,
    compiled,
    of_chatml,
    of_glm,
    of_llama,
    system,
    text_of,
    tool,
    user,
)
from jinja2 import TemplateError

from core.tito import agreed_delta

FOLDER = Path(os.environ.get("FETCHED_TEMPLATES") or "nowhere")
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="python tests/templates/fetch.py fetches seventy templates and runs this"
)
KNOWN = {
    "Qwen-Qwen3-0.6B": of_chatml,
    "Qwen3.5-4B": of_chatml,
    "GLM-4.6": of_glm,
    "GLM-4.7-Flash": of_glm,
    "meta-llama-Llama-3.1-8B-Instruct": of_llama,
    "meta-llama-Llama-3.2-3B-Instruct": of_llama,
    "meta-llama-Llama-3.3-70B-Instruct": of_llama,
}
STEP = [call("c", reasoning="why", cell="B2"), tool("4")]
PASTS = [
    [user("x")],
    [system("s"), user("x")],
    [user("x"), *STEP, *STEP],
    [user("x"), *STEP, answer("y", reasoning="so"), user("z")],
    [system("s"), user("x"), answer("y", reasoning="so"), user("z"), *STEP],
]
LAST = {"tool": STEP[0], "user": answer("a", reasoning="r")}
CONTROL = re.compile(
    r"<[|｜][^<>\n]*[|｜]>|<[a-z_]*(?:turn|role|sep)[a-z_]*>|\[/?[A-Z_]+\]|</?s>|<\|[A-Z_]+\|>|\[e~\[|\]~[!b]"
)


def test_the_templates_kept_here_are_what_is_fetched():
    for name, own in {"Qwen-Qwen3-0.6B": "qwen3", "Qwen3.5-4B": "qwen3_5", "GLM-4.6": "glm4_6"}.items():
        assert (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") == text_of(own)


@pytest.mark.parametrize("name", KNOWN)
def test_known_families_extend_a_row_by_what_they_write_and_fork_where_they_forget(name):
    family = KNOWN[name]((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    stop = family.stop(True)
    delta = family.delta([tool("42")], stop)
    assert delta is not None
    for past in PASTS:
        before = family.ids([*past, LAST["tool"]], prompt=False)
        full = family.ids([*past, LAST["tool"], tool("42")], prompt=True)
        assert full[: len(before)] == before
        assert tuple(full[-len(delta) :]) == delta and full[-len(delta) - 1] == stop
    assert (family.delta([user("next")], family.stop(False)) is None) == family.forgets
    if KNOWN[name] is of_llama:
        own = FAMILIES["llama3_format"]
        for new in ([tool("42")], [tool("42"), tool("43")], [user("next")]):
            assert family.delta(new, stop) == own.delta(new, stop)


@cache
def every():
    """Of each template its name and whether a tool's answer and a user's next turn are accepted."""
    return {
        path.stem: (spoken(path, "tool"), spoken(path, "user")) for path in sorted(FOLDER.glob("*.jinja"))
    }


def spoken(path, kind):
    """None if the template refuses to render the stubs; else whether the delta was accepted, and then right."""

    def render(messages, prompt):
        return compiled(path.read_text(encoding="utf-8")).render(
            messages=messages, tools=None, add_generation_prompt=prompt, bos_token="", eos_token="</s>"
        )

    stubs, new = (CALL_STUBS, [tool("42")]) if kind == "tool" else (ANSWER_STUBS, [user("next")])
    try:
        pairs = [(render(stub, False), render([*stub, *new], True)) for stub in stubs]
        marked = call("", reasoning="r", cell="MARK") if kind == "tool" else answer("MARK", reasoning="r")
        closing = render([user("x"), marked], False).rpartition("MARK")[2]
    except (TemplateError, ValueError, TypeError):
        return None
    written = [closing, *(text for pair in pairs for text in pair)]
    letters = Letters(
        tuple(sorted({token for text in written for token in CONTROL.findall(text)})) or ("\0",)
    )
    ends = [*CONTROL.finditer(closing)][-1:] or [*CONTROL.finditer(pairs[0][1][len(pairs[0][0]) :])][:1]
    if not ends:
        return False
    (stop,) = letters.encode(ends[0][0])
    delta = agreed_delta(
        [(letters.encode(before), letters.encode(full)) for before, full in pairs],
        stop_ids={stop},
        last_token=stop,
        separator=letters.encode(closing.rpartition(ends[0][0])[2] if ends[0][0] in closing else ""),
    )
    for past in PASTS if delta is not None else ():
        try:
            full = letters.encode(render([*past, LAST[kind], *new], True))
        except (TemplateError, ValueError, TypeError):
            continue
        assert delta is not None and tuple(full[-len(delta) :]) == delta, path.stem
        assert full[-len(delta) - 1] == stop, path.stem
    return delta is not None


def test_whatever_is_accepted_is_what_the_template_writes_in_every_conversation():
    found = every()
    assert len(found) >= 60
    assert sum(accepted is not None for accepted, _ in found.values()) >= 55
    assert sum(bool(accepted) for accepted, _ in found.values()) >= 40


def test_templates_that_drop_reasoning_fork_at_a_new_user_turn():
    """Those that were seen to keep a tool step and drop its reasoning later."""
    for name in (
        "Qwen-Qwen3-0.6B",
        "Qwen3.5-4B",
        "GLM-4.6",
        "GLM-4.7-Flash",
        "MiniMax-M2",
        "StepFun3.5-Flash",
    ):
        assert every()[name] == (True, False), name
