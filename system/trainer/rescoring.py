"""The same tokens scored again under any version of a policy's weights: what the causes of a mismatch predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from safetensors.torch import load_file
from torch import Tensor

from core.logprob import TokenLogprob, token_logprob
from core.shard import WHOLE
from system.model import Layer, ModelConfig, Qwen3, weight_shapes
from system.trainer.step import StepRow
from system.weights import check_coverage

LOGITS_AT_ONCE = 1 << 24
LOADED = 4
"""Versions whose weights are held in memory."""


class Segment(NamedTuple):
    """Tokens start to end of a row, whose keys and values are of one version."""

    start: int
    end: int
    version: int


class Support(NamedTuple):
    """What a filter leaves: the likeliest tokens up to a mass of top_p, at most top_k of them; 0 for all."""

    top_p: float
    top_k: int


class Rescorer:
    """Logprob and entropy of the tokens in the loss mask of recorded rows; 0 elsewhere.

    Example: `Rescorer(config, {0: "w/0.safetensors", 1: "w/1.safetensors"}, temperature=1.0).score(rows, version=1)`.

    Args:
        config: of the policy.
        weights: file of each version.
        temperature: of sampling.
        dtype: of the arithmetic.
        device: of the weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[int, str | Path],
        *,
        temperature: float,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.config, self.weights, self.temperature = config, dict(weights), temperature
        self.dtype, self.device = dtype, device
        self._model = lru_cache(LOADED)(self._load)

    def score(self, rows: Sequence[StepRow], *, version: int) -> list[TokenLogprob]:
        """Under the weights of one version, as a trainer sees the rows."""
        return self.score_at(rows, [self.temperature], version=version)[0]

    @torch.inference_mode()
    def score_at(
        self, rows: Sequence[StepRow], temperatures: Sequence[float], *, version: int
    ) -> list[list[TokenLogprob]]:
        """The same at other temperatures; one list of rows for each."""
        return self._each(rows, version, temperatures, self._logprob)

    @torch.inference_mode()
    def score_within(
        self, rows: Sequence[StepRow], supports: Sequence[Support], *, version: int
    ) -> list[list[TokenLogprob]]:
        """The same renormalised over the tokens that a filter leaves; minus infinity for one that it does not."""
        return self._each(rows, version, supports, self._logprob_within)

    @torch.inference_mode()
    def score_as_sampled(self, rows: Sequence[StepRow], *, latest: int) -> list[TokenLogprob]:
        """As an engine does that keeps, when weights change, the keys and values that older ones have left.

        A token's own are of the version that was there when it was read: that which sampled the next token.

        Args:
            latest: a row that ends without a sampled token is read by it.
        """
        return [self._segmented(row, segments(row.policy_version, latest=latest)) for row in rows]

    def score_by_own_version(self, rows: Sequence[StepRow], *, latest: int) -> list[TokenLogprob]:
        """Every token under the weights that sampled it, with nothing kept of older ones."""
        own = [[latest if v < 0 else v for v in row.policy_version] for row in rows]
        told = [TokenLogprob(torch.zeros(len(some)), torch.zeros(len(some))) for some in own]
        for version in sorted({v for some in own for v in some}):
            here = [i for i, some in enumerate(own) if version in some]
            for i, scored in zip(here, self.score([rows[i] for i in here], version=version), strict=True):
                mine = torch.tensor(own[i]) == version
                pairs = zip(scored, told[i], strict=True)
                told[i] = TokenLogprob(*(torch.where(mine, new.float(), old) for new, old in pairs))
        return told

    def _each(
        self,
        rows: Sequence[StepRow],
        version: int,
        settings: Sequence[Any],
        logprob: Callable[..., TokenLogprob],
    ) -> list[list[TokenLogprob]]:
        """Rows packed into one forward pass, scored in each of some ways; 0 at tokens that are not in the mask."""
        model, lengths = self._model(version), [len(row.token_ids) for row in rows]
        token_ids = torch.tensor([i for row in rows for i in row.token_ids], device=self.device)
        at = (
            torch.tensor([on for row in rows for on in row.loss_mask], device=self.device).nonzero().flatten()
        )
        hidden = model(token_ids, lengths)[at - 1]
        told = []
        for setting in settings:
            scored = logprob(hidden, model.head, token_ids[at], setting)
            whole = (x.new_zeros(len(token_ids)).index_copy(0, at, x).cpu().split(lengths) for x in scored)
            told.append([TokenLogprob(*both) for both in zip(*whole, strict=True)])
        return told

    def _logprob(self, hidden: Tensor, head: Tensor, label: Tensor, temperature: float) -> TokenLogprob:
        chunk = max(1, LOGITS_AT_ONCE // head.shape[0])
        return token_logprob(hidden, head, label, temperature=temperature, chunk=chunk, shard=WHOLE)

    def _logprob_within(self, hidden: Tensor, head: Tensor, label: Tensor, support: Support) -> TokenLogprob:
        chunk = max(1, LOGITS_AT_ONCE // head.shape[0])
        pairs = zip(hidden.split(chunk), label.split(chunk), strict=True)
        parts = [_within(h @ head.T, one, support, self.temperature) for h, one in pairs]
        return TokenLogprob(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _segmented(self, row: StepRow, parts: Sequence[Segment]) -> TokenLogprob:
        token_ids = torch.tensor(row.token_ids, device=self.device)
        label, start = token_ids.roll(-1), 0
        mask = torch.tensor(row.loss_mask)
        told: list[TokenLogprob] = []
        for hidden, head in self._hidden(token_ids, parts):
            told.append(self._logprob(hidden, head, label[start : start + len(hidden)], self.temperature))
            start += len(hidden)
        whole = (torch.cat(parts).roll(1).cpu() for parts in zip(*told, strict=True))
        return TokenLogprob(*(torch.where(mask, x, 0.0) for x in whole))

    def _hidden(self, token_ids: Tensor, parts: Sequence[Segment]) -> list[tuple[Tensor, Tensor]]:
        """Last hidden states of each segment, read by its own weights on what the others have left; and its head."""
        keys: list[list[Tensor]] = [[] for _ in range(self.config.num_hidden_layers)]
        values: list[list[Tensor]] = [[] for _ in range(self.config.num_hidden_layers)]
        told = []
        for start, end, version in parts:
            model = self._model(version)
            x = model.model.embed_tokens(token_ids[start:end])
            cosine, sine = (table[start:end, None] for table in model.rotation(end, x))
            for i, layer in enumerate(cast(list[Layer], model.model.layers)):
                q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cosine, sine)
                keys[i].append(k)
                values[i].append(v)
                mixed = _attend(q, torch.cat(keys[i]), torch.cat(values[i]), start)
                x = x + layer.self_attn.o_proj(mixed)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            told.append((model.model.norm(x), model.head))
        return told

    def _load(self, version: int) -> Qwen3:
        if version not in self.weights:
            held = f"{min(self.weights)} to {max(self.weights)}" if self.weights else "none"
            raise ValueError(f"weights of version {version} must be kept to score again, got {held}")
        source = str(self.weights[version])
        state = load_file(source)
        if self.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        check_coverage(state, weight_shapes(self.config), source=source)
        return Qwen3.from_state(self.config, state, dtype=self.dtype, device=self.device)


def _within(logits: Tensor, label: Tensor, support: Support, temperature: float) -> TokenLogprob:
    logprob = (logits.float() / temperature).log_softmax(-1)
    ordered, place = logprob.sort(-1, descending=True)
    kept = torch.arange(logits.shape[-1], device=logits.device) < (support.top_k or logits.shape[-1])
    kept = kept & (ordered.exp().cumsum(-1) - ordered.exp() < support.top_p)
    kept = torch.zeros_like(kept).scatter(-1, place, kept)
    inside = logprob.masked_fill(~kept, -torch.inf)
    inside = inside - inside.logsumexp(-1, keepdim=True)
    entropy = -torch.where(kept, inside.exp() * inside, 0.0).sum(-1)
    return TokenLogprob(inside.gather(-1, label[:, None]).squeeze(-1), entropy)


def segments(policy_version: Sequence[int], *, latest: int) -> list[Segment]:
    """Which version each token of a row was read by: that of the next sampled token, `latest` where none follows.

    Example: segments([-1, -1, 3, 4, -1], latest=5) == [(0, 2, 3), (2, 3, 4), (3, 5, 5)]
    """
    reader, by_position = latest, []
    for version in reversed(policy_version):
        by_position.append(reader)
        reader = version if version >= 0 else reader
    by_position.reverse()
    found, start = [], 0
    for version, same in groupby(by_position):
        end = start + len(list(same))
        found.append(Segment(start, end, version))
        start = end
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of tokens from `start` on over all keys up to each; [n, heads * head_dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (repeat(x, "t h d -> (h g) t d", g=group) for x in (k, v))
    seen = (
        torch.arange(len(k[0]), device=q.device) <= torch.arange(start, len(k[0]), device=q.device)[:, None]
    )
    mixed = F.scaled_dot_product_attention(rearrange(q, "t h d -> h t d"), k, v, attn_mask=seen)
    return rearrange(mixed, "h t d -> t (h d)")
