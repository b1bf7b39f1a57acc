"""The causes of a gap between trainer and sampler, what must be known to tell them apart, and how they rank."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import PerToken, check_bool, check_float, check_integer, check_one_axis, check_record


class TokenFact(NamedTuple):
    """What is known of every token of a step, [T], rows in any order.

    Args:
        logprob: of the trainer, at the sampling temperature it believes in; garbage outside the mask.
        rollout_logprob: as the engine reported it; garbage outside the mask.
        loss_mask: tokens to explain.
        entropy: of the trainer's distribution, as `core.logprob` gives it; garbage outside the mask.
        row_id: integer, one per row.
        position: integer, of the token in its row.
        token_in_turn: integer, 0 at the first sampled token of a turn; garbage outside the mask.
        policy_version: integer, of the weights that sampled the token; negative where nobody sampled.
    """

    logprob: PerToken
    rollout_logprob: PerToken
    loss_mask: PerToken
    entropy: PerToken
    row_id: PerToken
    position: PerToken
    token_in_turn: PerToken
    policy_version: PerToken


class Alternative(NamedTuple):
    """The trainer's logprob of the same tokens if a cause were at work; None where nobody rescored.

    A given one decides: if it does not close the gap, that cause is refuted and is not sought by place. A token
    without a finite logprob keeps the trainer's.

    Args:
        temperature: at the temperature suspected of the engine.
        filtered_support: renormalised inside the suspected top-p or top-k.
        retokenised: having read the token ids that the engine used.
        stale_version: under the weights of each token's own `policy_version`.
        stale_cache: on states that older weights left behind.
        leaked_state: on a state that another row left behind.
    """

    temperature: PerToken | None
    filtered_support: PerToken | None
    retokenised: PerToken | None
    stale_version: PerToken | None
    stale_cache: PerToken | None
    leaked_state: PerToken | None


class Evidence(NamedTuple):
    """The share of sum |logprob - rollout_logprob| that each cause explains, in [0, 1]; together at most 1.

    Args:
        precision: no more than rounding explains.
        temperature, filtered_support, retokenised, stale_version, stale_cache, leaked_state: as in `Alternative`.
        turn_boundary: at the first tokens of turns.
        position: growing with position.
        weights: everywhere, larger than rounding explains, with no shape: other weights than believed.
    """

    precision: Tensor
    temperature: Tensor
    filtered_support: Tensor
    retokenised: Tensor
    stale_version: Tensor
    stale_cache: Tensor
    leaked_state: Tensor
    turn_boundary: Tensor
    position: Tensor
    weights: Tensor


CAUSES = Evidence._fields
PRECISION, TEMPERATURE, FILTERED, RETOKENISED, STALE, CACHE, LEAK, BOUNDARY, POSITION, WEIGHTS = range(
    len(CAUSES)
)
UNKNOWN = -1


def found(evidence: Evidence, *, min_share: float) -> Tensor:
    """Which of CAUSES, apart from precision, explain at least `min_share` of the gap: bool; none in a healthy step."""
    check_share(min_share=min_share)
    _check_evidence(evidence)
    share = torch.stack(list(evidence))
    return (share >= min_share) & (torch.arange(len(share), device=share.device) != PRECISION)


def ranked(evidence: Evidence) -> Tensor:
    """Indices into CAUSES, largest share first; equal shares in the order of CAUSES, NaN as 0."""
    _check_evidence(evidence)
    return torch.stack(list(evidence)).nan_to_num(0.0).argsort(descending=True, stable=True)


def _check_evidence(evidence: Evidence) -> None:
    check_record(Evidence, evidence=evidence)
    check_float(**evidence._asdict())


def check_facts(fact: TokenFact, alternative: Alternative) -> None:
    """Refuse facts of different shapes or kinds, and a step without a token."""
    check_record(TokenFact, fact=fact)
    check_record(Alternative, alternative=alternative)
    given = {name: a for name, a in alternative._asdict().items() if a is not None}
    check_float(logprob=fact.logprob, rollout_logprob=fact.rollout_logprob, entropy=fact.entropy, **given)
    check_one_axis("T", **fact._asdict(), **given)
    check_bool(loss_mask=fact.loss_mask)
    check_integer(**{name: fact._asdict()[name] for name in TokenFact._fields[4:]})
    if not len(fact.logprob):
        raise ValueError("a step must hold a token, got 0")


def check_positive(**thresholds: float) -> None:
    """Refuse a threshold that is not above 0 and below infinity."""
    for name, value in thresholds.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def check_share(**shares: float) -> None:
    """Refuse a share that is not strictly between 0 and 1."""
    for name, value in shares.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")
