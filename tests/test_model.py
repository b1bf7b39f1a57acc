"""Our Qwen3 against transformers' in float64, packed and cached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from system.engine.cached import CachedModel
from system.model import ModelConfig, Qwen3, config_from_huggingface, huggingface_config, random_state
from system.policy import load_policy, save_policy

CONFIG = ModelConfig(
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    token_count=64,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_tokenizer(folder: Path, token_count: int) -> None:
    """The two files a policy folder needs beside config and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {f"t{i}": i for i in range(token_count)}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []}})
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def large_norms(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a size that makes attention sharp and every norm weight matter."""
    generator = torch.Generator().manual_seed(seed)
    state = random_state(config, seed=seed, scale=0.3)
    for name, value in state.items():
        if value.dim() == 1:
            state[name] = torch.rand(value.shape, generator=generator) + 0.5
    return state


def transformers_logits(folder: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    from transformers.models.qwen3 import modeling_qwen3

    def wide_norm(self, hidden_states):  # theirs narrows to float32, which hides differences below 1e-7
        x = hidden_states
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    narrow = modeling_qwen3.Qwen3RMSNorm.forward
    modeling_qwen3.Qwen3RMSNorm.forward = wide_norm
    try:
        model = (
            modeling_qwen3.Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
            .double()
            .eval()
        )
        with torch.no_grad():
            return [model(torch.tensor([row])).logits[0] for row in rows]
    finally:
        modeling_qwen3.Qwen3RMSNorm.forward = narrow


def some_rows(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_packed_rows_equal_transformers_on_the_saved_folder(tmp_path: Path, tied: bool):
    config = ModelConfig(**{**{n: getattr(CONFIG, n) for n in CONFIG.__slots__}, "tie_word_embeddings": tied})
    write_tokenizer(tmp_path, config.token_count)
    save_policy(tmp_path, config, large_norms(config, 0))
    loaded, state = load_policy(tmp_path)
    assert loaded == config
    rows = some_rows([1, 9, 33, 2, 17])
    model = Qwen3.from_state(loaded, state, dtype=torch.float64)
    with torch.no_grad():
        hidden = model(torch.tensor(sum(rows, [])), [len(row) for row in rows])
        ours = model.logits(hidden).split([len(row) for row in rows])
    for got, expected in zip(ours, transformers_logits(tmp_path, rows), strict=True):
        assert (got - expected).abs().max() < 1e-10


def test_padded_attention_equals_attention_by_row_with_gradients():
    from system.model import attention_by_row, attention_padded, rows_of

    rows = rows_of([3, 1, 8], device="cpu")
    results = []
    for attention in (attention_by_row, attention_padded):
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(12, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(q, k, v, rows)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_model_on_a_gpu_equals_the_model_on_cpu():
    rows, grads = some_rows([1, 9, 33, 2, 17]), []
    for device in ("cpu", "cuda"):
        model = Qwen3.from_state(CONFIG, large_norms(CONFIG, 0), dtype=torch.float64, device=device)
        hidden = model(torch.tensor(sum(rows, []), device=device), [len(row) for row in rows])
        model.logits(hidden).log_softmax(-1)[:, 3].sum().backward()
        grads.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]))
    assert (grads[0] - grads[1]).norm() < 1e-10 * grads[0].norm()


def test_bfloat16_on_disk_is_what_transformers_reads(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    write_tokenizer(tmp_path, CONFIG.token_count)
    save_policy(tmp_path, CONFIG, large_norms(CONFIG, 1))
    _, state = load_policy(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == torch.bfloat16
    named = {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    assert named.keys() == state.keys()
    for name, value in named.items():
        assert torch.equal(value.float(), state[name]), name


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_cached_decoding_equals_the_full_forward(device: str):
    state = large_norms(CONFIG, 2)
    model = Qwen3.from_state(CONFIG, state, device=device)
    cached = CachedModel(CONFIG, state, max_context=64, slots=5, device=device)
    rows = some_rows([40, 23, 31])
    starts = [12, 1, 20]
    with torch.no_grad():
        hidden = model(torch.tensor(sum(rows, []), device=device), [40, 23, 31])
        full = model.logits(hidden).log_softmax(-1).split([40, 23, 31])
    largest, total, count = 0.0, 0.0, 0

    def compare(logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
        nonlocal largest, total, count
        gap = (logits.log_softmax(-1) - torch.stack(expected)).abs()
        largest, total, count = max(largest, gap.max().item()), total + gap.mean().item(), count + 1

    # a first part, then an observation delta on top of it, then one token at a time
    cached.prefill(
        [row[: start - 1] or row[:1] for row, start in zip(rows, starts, strict=True)], [0, 1, 2], [0, 0, 0]
    )
    logits = cached.prefill([rows[0][11:15], rows[1][1:4], rows[2][19:21]], [0, 1, 2], [11, 1, 19])
    compare(logits, [full[0][14], full[1][3], full[2][20]])
    at = [15, 4, 21]
    for _ in range(10):
        logits = cached.decode([row[i] for row, i in zip(rows, at, strict=True)], at)
        compare(logits, [out[i] for out, i in zip(full, at, strict=True)])
        at = [i + 1 for i in at]
    assert total / count < 1e-5
    assert largest < 1e-4


def test_swapped_slots_keep_their_rows():
    state = large_norms(CONFIG, 3)
    cached = CachedModel(CONFIG, state, max_context=64, slots=4)
    rows = some_rows([20, 9, 14])
    for slot, row in enumerate(rows):
        cached.prefill([row], [slot], [0])
    before = cached.decode([1, 2, 3], [20, 9, 14])
    cached.swap(0, 2, 21, 15)
    after = cached.decode([3, 2, 1], [14, 9, 20])
    assert torch.allclose(before, after.flip(0), atol=1e-5)


def test_padding_of_the_vocabulary_is_outside_the_softmax():
    config = ModelConfig(**{**{n: getattr(CONFIG, n) for n in CONFIG.__slots__}, "token_count": 50})
    model = Qwen3.from_state(config, large_norms(config, 0))
    assert model.logits(model(torch.tensor([1, 2, 3]), [3])).shape == (3, 50)


def test_load_policy_names_the_missing_file(tmp_path: Path):
    write_tokenizer(tmp_path, CONFIG.token_count)
    save_policy(tmp_path, CONFIG, random_state(CONFIG, seed=0))
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"policy folder must have {name}, got "):
            load_policy(tmp_path)
        (tmp_path / name).write_bytes(kept)


def test_config_refuses_what_the_model_does_not_compute():
    record = huggingface_config(CONFIG, dtype=torch.float32)
    assert config_from_huggingface(record) == CONFIG
    for name, value in {"attention_bias": True, "hidden_act": "gelu", "model_type": "qwen2"}.items():
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            config_from_huggingface({**record, name: value})


def test_weights_are_covered_both_ways(tmp_path: Path):
    state = random_state(CONFIG, seed=0)
    norm = state.pop("model.norm.weight")
    state["model.norm.wieght"] = norm
    with pytest.raises(ValueError, match="missing: model.norm.weight; unexpected: model.norm.wieght"):
        save_policy(tmp_path, CONFIG, state)
