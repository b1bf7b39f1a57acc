"""The embedded policy's own byte-level BPE tokenizer, written as the files of a Hugging Face folder."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, OPEN, CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# A capitalised word never takes its surroundings along, so that a name has the same ids wherever it stands;
# what lies between words is one piece, so that JSON costs few tokens.
PIECES = r"[0-9]|[A-Z][a-z]+| ?[a-z_]+|[^A-Za-z0-9]+|[A-Z]"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE with single digits; control tokens and tool tags come first.

    Raises:
        ValueError: vocab_size leaves no room beside the 256 bytes and the control tokens.
    """
    if not vocab_size > 256 + 3 + len(TAGS):
        raise ValueError(f"vocab_size must be above {256 + 3 + len(TAGS)}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control: list[str | AddedToken] = [
        AddedToken(t, special=True, normalized=False) for t in (PAD, OPEN, CLOSE)
    ]
    tags: list[str | AddedToken] = [AddedToken(t, special=False, normalized=False) for t in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=control + tags,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": CLOSE,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    generation = {
        "eos_token_id": tokenizer.token_to_id(CLOSE),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": True,
        "temperature": 1.0,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    template = Path(__file__).parent / "harness" / "chatml.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text())
