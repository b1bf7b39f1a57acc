"""A Qwen3 decoder in plain torch, over flat packed rows.

Weight names are Hugging Face's, so that a policy folder written here opens in transformers and vLLM, and the
other way round. The engine decodes the same weights with a KV cache in `system/engine/cached.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Qwen3 decoder, under the names of Hugging Face's config.json.

    Example: ModelConfig(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=512, token_count=512, max_position_embeddings=1024,
    rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    token_count: int
    """Ids from here to vocab_size pad the embedding: never sampled, and left out of every softmax."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads={self.num_key_value_heads}, "
                f"got {self.num_attention_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if not 0 < self.token_count <= self.vocab_size:
            raise ValueError(
                f"token_count must be in 1..vocab_size={self.vocab_size}, got {self.token_count}"
            )


def config_from_huggingface(record: Mapping[str, Any], *, token_count: int | None = None) -> ModelConfig:
    """Read the contents of a config.json; refuse what this model does not compute.

    Args:
        record: the parsed config.json of a Qwen3ForCausalLM.
        token_count: number of ids the tokenizer really has; vocab_size if left out.
    """
    rope = record.get("rope_parameters") or record.get("rope_scaling") or {}
    fixed = {
        "model_type": (record.get("model_type", "qwen3"), "qwen3"),
        "hidden_act": (record.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(record.get("attention_bias", False)), False),
        "use_sliding_window": (bool(record.get("use_sliding_window", False)), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for name, (value, only) in fixed.items():
        if value != only:
            raise ValueError(f"{name} must be {only}, got {value}")
    theta = rope.get("rope_theta", record.get("rope_theta"))
    if theta is None:
        raise ValueError("rope_theta must be in config.json, top level or under rope_parameters, got neither")
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "vocab_size max_position_embeddings rms_norm_eps"
    ).split()
    for name in names:
        if name not in record:
            raise ValueError(f"config.json must have {name}, got only {sorted(record)}")
    return ModelConfig(
        **{name: record[name] for name in names},
        token_count=record["vocab_size"] if token_count is None else token_count,
        rope_theta=float(theta),
        tie_word_embeddings=bool(record.get("tie_word_embeddings", False)),
    )


def huggingface_config(config: ModelConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that transformers and vLLM read, for weights stored as `dtype`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def rope_tables(config: ModelConfig, length: int, *, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosine and sine by position, [length, head_dim], in float32 as transformers has them.

    Computed on CPU whatever the device: a GPU rounds float32 cosines otherwise.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
    frequency = 1.0 / (config.rope_theta ** (exponent / config.head_dim))
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(device), angle.sin().to(device)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [..., head_dim]; cosine and sine broadcast against x."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where the rows of a flat [T] batch lie; computed once for all layers."""

    lengths: tuple[int, ...]
    position: Tensor
    """Index of each token inside its row, [T]."""
    row: Tensor
    """Row of each token, [T]."""


def rows_of(lengths: Sequence[int], *, device: torch.device | str) -> Rows:
    """Positions and row ids of rows that lie one after the other."""
    if not all(length > 0 for length in lengths):
        raise ValueError(f"row_lengths must be positive, got {list(lengths)}")
    position = torch.cat([torch.arange(length) for length in lengths])
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths)))
    return Rows(lengths=tuple(lengths), position=position.to(device), row=row.to(device))


def attention_by_row(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Causal attention inside each row of a flat batch, one call a row (the fast way on CPU).

    Query heads that share a key head become the head axis, key heads the batch axis: nothing is copied.
    """
    group = q.shape[1] // k.shape[1]
    out = []
    for q_row, k_row, v_row in zip(*(x.split(rows.lengths) for x in (q, k, v)), strict=True):
        q_row = rearrange(q_row, "t (h g) d -> h g t d", g=group)
        k_row = rearrange(k_row, "t h d -> h 1 t d").expand(-1, group, -1, -1)
        v_row = rearrange(v_row, "t h d -> h 1 t d").expand(-1, group, -1, -1)
        mixed = F.scaled_dot_product_attention(q_row, k_row, v_row, is_causal=True)
        out.append(rearrange(mixed, "h g t d -> t (h g) d"))
    return torch.cat(out)


def attention_padded(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """The same in one call over right-padded rows: causal, so no query sees padding and no mask is needed."""
    group, count, longest = q.shape[1] // k.shape[1], len(rows.lengths), max(rows.lengths)
    where = rows.row * longest + rows.position

    def pad(x: Tensor) -> Tensor:
        flat = x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, where, x)
        return rearrange(flat, "(b t) h d -> b h t d", b=count)

    k, v = (repeat(x, "t h d -> t (h g) d", g=group) for x in (k, v))
    mixed = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True)
    return rearrange(mixed, "b h t d -> (b t) h d")[where]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis; torch sums in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim = size
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def qkv(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, both normed and rotated, and values, [T, heads, head_dim] each."""
        q, k, v = (
            rearrange(projection(x), "t (h d) -> t h d", d=self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), cosine, sine), rotate(self.k_norm(k), cosine, sine), v

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, rows: Rows) -> Tensor:
        q, k, v = self.qkv(x, cosine, sine)
        attention = attention_by_row if x.device.type == "cpu" else attention_padded
        return self.o_proj(rearrange(attention(q, k, v, rows), "t h d -> t (h d)"))


class MLP(nn.Module):
    """The gated feed-forward part (SwiGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, rows: Rows) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and the last norm: what Hugging Face keeps under `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Not drawn: torch's normal_ imports its compiler, which costs every process a second or more.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3(nn.Module):
    """Qwen3ForCausalLM over flat packed rows.

    Made by `Qwen3.from_state`, which gives it its weights; built directly its embedding holds no values yet.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_state(
        cls,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Qwen3:
        """A model with exactly these weights; a missing or unexpected name raises."""
        with torch.device("meta"):
            model = cls(config)
        copied = {
            name: value.detach().to(device=device, dtype=dtype, copy=True) for name, value in state.items()
        }
        model.load_state_dict(copied, strict=True, assign=True)
        return model.requires_grad_(True)

    @property
    def head(self) -> Tensor:
        """The output matrix, [token_count, hidden_size]."""
        weight = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return weight[: self.config.token_count]

    def forward(self, token_ids: Tensor, row_lengths: Sequence[int]) -> Tensor:
        """Last hidden states [T, hidden_size] of rows that lie one after the other in token_ids [T]."""
        if sum(row_lengths) != token_ids.shape[0]:
            raise ValueError(
                f"row_lengths must add up to {token_ids.shape[0]} tokens, got {sum(row_lengths)}"
            )
        x = self.model.embed_tokens(token_ids)
        rows = rows_of(row_lengths, device=x.device)
        cosine, sine = self.rotation(max(row_lengths), x)
        cosine, sine = cosine[rows.position][:, None], sine[rows.position][:, None]
        for layer in self.model.layers:
            x = layer(x, cosine, sine, rows)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., token_count] of hidden states; at least float32."""
        return F.linear(hidden, self.head).to(torch.promote_types(hidden.dtype, torch.float32))

    def rotation(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of at least so many positions, in the dtype of `like`."""
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != like.device:
            span = max(length, min(self.config.max_position_embeddings, 4096))
            self._rope = rope_tables(self.config, span, device=like.device)
        cosine, sine = self._rope
        return cosine.to(like.dtype), sine.to(like.dtype)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a policy, in the order of a state dict."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in Qwen3(config).state_dict().items()}


def random_state(config: ModelConfig, *, seed: int, scale: float = 0.02) -> dict[str, Tensor]:
    """Fresh float32 weights: norms one, the rest normal; projections back to the stream scaled by depth."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config).items():
        if len(shape) == 1:
            state[name] = torch.ones(shape)
            continue
        back = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = scale / (2 * config.num_hidden_layers) ** 0.5 if back else scale
        state[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    return state


def parameter_count(state: Mapping[str, Tensor] | Iterable[Tensor]) -> int:
    """Number of weights."""
    values = state.values() if isinstance(state, Mapping) else state
    return sum(value.numel() for value in values)
