"""What does a long trajectory cost in tokenising, and is it exact?

One command: `python -m benchmarks.tito` (`--vocabulary qwen3` or `qwen3_5` with the extra test-templates). A scripted
policy talks to a scripted tool for 200 turns, up to 160,000 tokens. One way appends: what was sampled as ids, a tool's
answer as the delta that the template adds. The other renders and tokenises the whole conversation again at each turn.
Work is counted in characters given to a tokenizer, as a multiple of those of the new texts, each once. A turn is exact
if its prompt begins with every id that was seen and sampled before. One turn in twenty is spelt in ids that its text
would not be encoded to, as often as was seen in samples of a small model; from there on no second rendering is exact.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.tito import append_completion, append_observation, open_ledger
from system.harness.chat import Chat, Message, ToolCall, call_text

ROOT = Path(__file__).resolve().parent.parent
TARGET = 1.2
WORDS = "the fee of Norvik for March is 4821 EUR and 17 rows of sheet Costs were read from fees.xlsx".split()


class Counted:
    """A tokenizer that counts the characters it is given, and the seconds that it takes."""

    def __init__(self, own: Any) -> None:
        self.own, self.characters, self.seconds = own, 0, 0.0

    def encode(self, text: str, **options: Any) -> Any:
        begun = time.process_time()
        found = self.own.encode(text, **options)
        self.seconds += time.process_time() - begun
        self.characters += len(text)
        return found

    def decode(self, ids: list[int], **options: Any) -> str:
        return self.own.decode(ids, **options)


class Work:
    """What one way costs; counts while it is entered."""

    def __init__(self, *tokenizers: Counted) -> None:
        self.tokenizers = tokenizers
        self.characters, self.tokenising, self.total = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self._add(-1)

    def __exit__(self, *_: object) -> None:
        self._add(1)

    def _add(self, sign: int) -> None:
        self.characters += sign * sum(each.characters for each in self.tokenizers)
        self.tokenising += sign * sum(each.seconds for each in self.tokenizers)
        self.total += sign * time.process_time()


def opened(vocabulary: str) -> Chat:
    """The embedded policy's chat, or one with the vocabulary and template of a Qwen model."""
    if vocabulary == "clerk":
        return Chat(ROOT / "policies" / "clerk")
    templates = ROOT / "tests" / "templates"
    sys.path.insert(0, str(templates))
    from vocabulary import specification  # type: ignore[import-not-found]

    said = specification(vocabulary)
    ids = {entry["content"]: entry["id"] for entry in said["added_tokens"]}
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(json.dumps(said))
        (folder / "chat_template.jinja").write_text((templates / f"{vocabulary}.jinja").read_text())
        stops = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
        (folder / "generation_config.json").write_text(json.dumps(stops))
        return Chat(folder)


def words(rng: random.Random, chat: Chat, tokens: int) -> str:
    """Words that take about so many tokens."""
    each = len(chat.completion(" ".join(WORDS))) / len(WORDS)
    return " ".join(rng.choice(WORDS) for _ in range(max(1, round(tokens / each))))


def drifted(rng: random.Random, chat: Chat, ids: list[int]) -> list[int]:
    """The same text in other ids: one token of several characters is spelt in single ones."""
    texts = [chat.decode([i]) for i in ids]
    at = rng.choice(
        [t for t, text in enumerate(texts) if len(text) > 1 and text.isascii() and text[0] != "<"]
    )
    return [*ids[:at], *(i for letter in texts[at] for i in chat.completion(letter)[:-1]), *ids[at + 1 :]]


def main(vocabulary: str, turns: int, tokens: int, seed: int) -> None:
    chat, rng = opened(vocabulary), random.Random(seed)
    tokenizers = Counted(chat.tokenizer), Counted(chat.plain_tokenizer)
    appending, again = Work(*tokenizers), Work(*tokenizers)
    messages: list[Message] = [{"role": "user", "content": "Find the fees."}]
    row = open_ledger(chat.render(messages, None, add_generation_prompt=True))
    each = (tokens - len(row)) / turns / 2
    said = [
        chat.completion(call_text(ToolCall("run_code", {"code": words(rng, chat, round(each) - 20)})))
        for _ in range(turns)
    ]
    for turn in rng.sample(range(turns), turns // 20):
        said[turn] = drifted(rng, chat, said[turn])
    answers = [words(rng, chat, round(each) - 10) for _ in range(turns)]
    chat.tokenizer, chat.plain_tokenizer = tokenizers  # type: ignore[assignment]
    new_text, exact, moves = 0, [0, 0], []
    for turn, (ids, answer) in enumerate(zip(said, answers)):
        seen = (*row.token_ids, *ids)
        messages += [
            {"role": "assistant", "content": chat.decode(ids)},
            {"role": "tool", "content": answer},
        ]
        with appending:
            begun = time.perf_counter()
            row = append_completion(row, ids, [-0.5] * len(ids), [turn] * len(ids), finish_reason="stop")
            moves.append(time.perf_counter() - begun)
            delta = chat.observation(messages[-1:], row.last_token)
            assert delta is not None
            row = append_observation(row, delta)
        with again:
            prompt = chat.render(messages, None, add_generation_prompt=True)
        new_text += len(chat.decode(list(delta)))
        exact[0] += row.token_ids[: len(seen)] == seen
        exact[1] += tuple(prompt[: len(seen)]) == seen
    print(f"{vocabulary}: {turns} turns, {len(row):,} tokens, {sum(row.loss_mask):,} of them sampled")
    print(
        f"{'':16}{'characters':>14}{'per new one':>13}{'tokenising':>13}{'other work':>13}{'exact turns':>13}"
    )
    for name, work, right in zip(("appending", "rendering again"), (appending, again), exact):
        print(
            f"{name:16}{work.characters:>14,}{work.characters / new_text:>13.2f}{work.tokenising:>11.2f} s"
            f"{work.total - work.tokenising:>11.2f} s{right:>13}"
        )
    tenth = max(1, turns // 10)
    first, last = (sorted(part)[len(part) // 2] * 1e6 for part in (moves[:tenth], moves[-tenth:]))
    print(
        f"appending a completion to the ledger, median: {first:.0f} us in the first tenth, {last:.0f} us in the last"
    )
    met = appending.characters <= TARGET * new_text and exact[0] == turns
    print(f"target (at most {TARGET} per new character, every turn exact): {'met' if met else 'missed'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--vocabulary", choices=["clerk", "qwen3", "qwen3_5"], default="clerk")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=160_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.vocabulary, given.turns, given.tokens, given.seed)
