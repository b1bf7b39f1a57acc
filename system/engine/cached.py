"""The same Qwen3 as `system/model.py`, decoding with a static KV cache.

At a million parameters the cost of a step is the number of torch calls, so projections are fused and
stored transposed, norm weights of queries and keys are folded into the rotary tables, keys are cached
transposed, and the slots being decoded are always 0..B-1 so that attention reads the cache in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from system.model import ModelConfig, rope_tables, weight_shapes
from system.weights import check_coverage


class LayerWeights(NamedTuple):
    """One layer, fused and transposed: x @ weight."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """A whole policy, ready to decode."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    qk_norm: Tensor
    """Norm weights of queries and keys by layer, [layers, heads + kv heads, head_dim]."""
    qk_norm_turned: Tensor
    """The same, turned by half a head with the sign of the rotation: rotating is two multiplications."""
    norm: Tensor
    head: Tensor


def fuse(config: ModelConfig, state: Mapping[str, Tensor], *, device: torch.device | str) -> Weights:
    """Arrange named float32 weights for decoding; the state must cover the model exactly and be finite.

    Raises:
        ValueError: missing or unexpected names, wrong shapes, or values that are not finite.
    """
    check_coverage(state, weight_shapes(config), source="state", dtype=torch.float32)
    for name, value in state.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"weights must be finite, got NaN or infinity in {name}")
    named = {name: value.to(device) for name, value in state.items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layers, qk_norm = [], []
    for i in range(config.num_hidden_layers):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = torch.cat([named[f"{at}{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([named[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")])
        layers.append(
            LayerWeights(
                input_norm=named[f"model.layers.{i}.input_layernorm.weight"].clone(),
                qkv=qkv.t().contiguous(),
                out=named[f"{at}o_proj.weight"].t().contiguous(),
                post_norm=named[f"model.layers.{i}.post_attention_layernorm.weight"].clone(),
                gate_up=gate_up.t().contiguous(),
                down=named[f"{mlp}down_proj.weight"].t().contiguous(),
            )
        )
        norms = [
            named[f"{at}q_norm.weight"].expand(heads, -1),
            named[f"{at}k_norm.weight"].expand(kv_heads, -1),
        ]
        qk_norm.append(torch.cat(norms))
    stacked = torch.stack(qk_norm)
    first, second = stacked.chunk(2, dim=-1)
    embedding = named["model.embed_tokens.weight"].clone()
    head = embedding if config.tie_word_embeddings else named["lm_head.weight"]
    return Weights(
        embedding=embedding,
        layers=tuple(layers),
        qk_norm=stacked,
        qk_norm_turned=torch.cat((-second, first), dim=-1),
        norm=named["model.norm.weight"].clone(),
        head=head[: config.token_count].t().contiguous(),
    )


class CachedModel:
    """A policy with `slots` sequences of KV cache of `max_context` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        *,
        max_context: int,
        slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.max_context, self.slots = config, max_context, slots
        self.device = torch.device(device)
        self.weights = fuse(config, state, device=self.device)
        # how far keys of one dimension lie apart; at a power of two they share cache lines (1.8 times slower)
        self._stride = -(-max_context // 64) * 64 + 16
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads)
        self.keys = torch.zeros(*shape, config.head_dim, self._stride, device=self.device)
        self.values = torch.zeros(*shape, max_context, config.head_dim, device=self.device)
        self.cosine, self.sine = rope_tables(config, max_context, device=self.device)
        self._range = torch.arange(max_context, device=self.device)
        self._slot = torch.arange(slots, device=self.device)
        kv_size = config.num_key_value_heads * config.head_dim
        self._key_offset = torch.arange(kv_size, device=self.device) * self._stride
        self._value_offset = torch.arange(config.num_key_value_heads, device=self.device) * max_context
        self._zero = torch.zeros((), device=self.device)
        self._never = torch.full((), float("-inf"), device=self.device)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take other weights; the cache stays as it is. On refusal the old weights stay."""
        self.weights = fuse(self.config, state, device=self.device)

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots, of which this many first tokens are in use."""
        if length_b == 0:
            self.copy(a, b, length_a)
        elif length_a == 0:
            self.copy(b, a, length_b)
        else:
            n = max(length_a, length_b)
            for cache in (self.keys[..., :n], self.values[:, :, :, :n]):
                kept = cache[:, a].clone()
                cache[:, a] = cache[:, b]
                cache[:, b] = kept

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot into another."""
        if length:
            self.keys[:, target, ..., :length] = self.keys[:, source, ..., :length]
            self.values[:, target, :, :length] = self.values[:, source, :, :length]

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Add tokens to several slots in one pass and return the logits after the last token of each.

        Args:
            rows: new tokens of each slot, at least one.
            slots: where they go.
            starts: how many tokens of the slot are already cached and kept.
        """
        lengths = [len(row) for row in rows]
        flat = torch.tensor([token for row in rows for token in row], device=self.device)
        spans = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        position = torch.tensor([p for span in spans for p in span], device=self.device)
        cosine, sine = self._rotation(position)
        masks = [self._causal(start, length) if start else None for start, length in zip(starts, lengths)]
        x = F.embedding(flat, self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            qkv = self._project(layer, x, cosine[:, i], sine[:, i])
            mixed = [
                self._attend(i, part, slot, start, mask)
                for part, slot, start, mask in zip(qkv.split(lengths), slots, starts, masks, strict=True)
            ]
            x = self._finish(layer, x, torch.cat(mixed))
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        return self._logits(x[last])

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Add one token to each of the slots 0..B-1 and return the logits after it, [B, token_count].

        Args:
            tokens: the token of each slot.
            positions: number of tokens already cached in each slot.
        """
        heads, kv_heads, size = self._heads()
        batch, length = len(tokens), max(positions) + 1
        position = torch.tensor(positions, device=self.device)
        cosine, sine = self._rotation(position)
        row = self._slot[:batch, None]
        key_at = (row * (kv_heads * size * self._stride) + position[:, None] + self._key_offset).view(-1)
        value_at = (row * (kv_heads * self.max_context) + position[:, None] + self._value_offset).view(-1)
        mask = torch.where(self._range[:length] <= position[:, None, None, None], self._zero, self._never)
        mask = mask.expand(-1, kv_heads, -1, -1).reshape(batch * kv_heads, 1, length)
        group = heads // kv_heads
        x = F.embedding(torch.tensor(tokens, device=self.device), self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            qkv = self._project(layer, x, cosine[:, i], sine[:, i])
            keys, values = self.keys[i], self.values[i]
            keys.view(-1).index_copy_(0, key_at, qkv[:, heads : heads + kv_heads].reshape(-1))
            values.view(-1, size).index_copy_(0, value_at, qkv[:, heads + kv_heads :].reshape(-1, size))
            q = qkv[:, :heads].reshape(batch * kv_heads, group, size)
            k = keys[:batch].view(batch * kv_heads, size, self._stride)[:, :, :length]
            v = values[:batch].view(batch * kv_heads, self.max_context, size)[:, :length]
            score = torch.baddbmm(mask, q, k, alpha=size**-0.5)
            mixed = torch.bmm(score.softmax(-1), v).view(batch, heads * size)
            x = self._finish(layer, x, mixed)
        return self._logits(x)

    def _heads(self) -> tuple[int, int, int]:
        config = self.config
        return config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def _rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables with the norm weights in them, [T, layers, heads + kv heads, head_dim]."""
        cosine, sine = self.cosine[position][:, None, None], self.sine[position][:, None, None]
        return cosine * self.weights.qk_norm, sine * self.weights.qk_norm_turned

    def _causal(self, start: int, length: int) -> Tensor:
        """Additive mask [length, start + length] of new tokens over everything cached."""
        seen = self._range[: start + length] <= self._range[start : start + length, None]
        return torch.where(seen, self._zero, self._never)

    def _project(self, layer: LayerWeights, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Queries, keys (both normed and rotated) and values, [T, heads + 2 kv heads, head_dim]."""
        heads, kv_heads, size = self._heads()
        eps = self.config.rms_norm_eps
        x = F.rms_norm(x, (x.shape[-1],), layer.input_norm, eps)
        qkv = torch.mm(x, layer.qkv).view(-1, heads + 2 * kv_heads, size)
        qk = qkv[:, : heads + kv_heads]
        normed = F.rms_norm(qk, (size,), None, eps)
        torch.addcmul(normed * cosine, normed.roll(size // 2, -1), sine, out=qk)
        return qkv

    def _attend(self, i: int, qkv: Tensor, slot: int, start: int, mask: Tensor | None) -> Tensor:
        """Store one row's new keys and values and attend over its whole slot; [n, heads * head_dim]."""
        heads, kv_heads, size = self._heads()
        group, n, end = heads // kv_heads, qkv.shape[0], start + qkv.shape[0]
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        self.keys[i, slot, :, :, start:end] = rearrange(k, "n h d -> h d n")
        self.values[i, slot, :, start:end] = rearrange(v, "n h d -> h n d")
        q = rearrange(q, "n (h g) d -> h g n d", g=group)
        if mask is None:
            k = rearrange(k, "n h d -> h 1 n d").expand(-1, group, -1, -1)
            v = rearrange(v, "n h d -> h 1 n d").expand(-1, group, -1, -1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            keys, values = self.keys[i, slot, :, :, :end], self.values[i, slot, :, :end]
            score = torch.bmm(q.reshape(kv_heads, group * n, size), keys).view(kv_heads, group, n, end)
            score = torch.add(mask, score, alpha=size**-0.5).softmax(-1)
            mixed = torch.bmm(score.view(kv_heads, group * n, end), values).view(kv_heads, group, n, size)
        return rearrange(mixed, "h g n d -> n (h g d)")

    def _finish(self, layer: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, feed-forward part, both residuals."""
        x = torch.addmm(x, mixed, layer.out)
        normed = F.rms_norm(x, (x.shape[-1],), layer.post_norm, self.config.rms_norm_eps)
        gate, up = torch.mm(normed, layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (x.shape[-1],), self.weights.norm, self.config.rms_norm_eps)
        return torch.mm(normed, self.weights.head)
