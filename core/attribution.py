"""Why the trainer's logprobs differ from the sampler's: the share of each cause in the gap of one step.

Three kinds of evidence, in this order. A rescoring of the same tokens under another hypothesis that closes the gap
is proof. Else the shape of the differences speaks: along entropy and logprob for a temperature, never positive for
a filter. Else their places do: with old tokens, from a weight change on, from inside a turn on, at the head of rows
or turns, late, or everywhere. What rounding explains is never given to a cause.

Decisions are about the whole step: gather the facts of all ranks first. Memory is 2^(given rescorings) * T.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cause import (
    CAUSES,
    PRECISION,
    TEMPERATURE,
    UNKNOWN,
    Alternative,
    Evidence,
    TokenFact,
    check_facts,
    check_positive,
    check_share,
)
from .footprint import layout
from .locate import Place, Search, filter_fits, places, token
from .rescore import Rescored, rescored
from .shapes import PerToken


class Attribution(NamedTuple):
    """The gap of a step, explained.

    Args:
        share: per cause; NaN where no token is usable, all `precision` where there is no gap.
        cause: [T], index into CAUSES of what explains the token, UNKNOWN where nothing does or outside the mask.
        temperature_ratio: engine's temperature over the trainer's, to first order; 1 where none was fitted.
        residual: [T], the difference that rescoring left; 0 outside the mask.
    """

    share: Evidence
    cause: PerToken
    temperature_ratio: Tensor
    residual: PerToken


def attribution(
    fact: TokenFact,
    alternative: Alternative,
    *,
    trainer_version: int,
    logit_noise: float,
    sigmas: float,
    boundary: int,
    min_mass: float,
    growth: float,
    min_share: float,
) -> Attribution:
    """The causes of the gap between trainer and sampler, with the share of each.

    A logit that is off by e moves a logprob by about (1 - p) e, so a token is a hit where
    |difference| > sigmas * logit_noise * (1 - p).

    Args:
        trainer_version: of the weights that gave `fact.logprob`.
        logit_noise: standard deviation of a logit between two healthy implementations, from `rounding_noise` or
            measured on equal weights.
        sigmas: rounding explains that many of them.
        boundary: first tokens of a turn that count as its boundary.
        min_mass: least probability that a filter keeps.
        growth: late tokens differ that many times as much as early ones where position is the cause.
        min_share: what a rescoring must close to be believed.

    Raises:
        ValueError: on shapes, dtypes, or a threshold out of its range.
    """
    check_facts(fact, alternative)
    check_positive(logit_noise=logit_noise, sigmas=sigmas, boundary=boundary, growth=growth)
    check_share(min_mass=min_mass, min_share=min_share)
    order = fact.position.argsort(stable=True)
    order = order[fact.row_id[order].argsort(stable=True)]
    fact = TokenFact(*(field[order] for field in fact))
    read = token(fact, logit_noise)
    marks = layout(read.usable, *fact[4:], trainer_version=trainer_version, boundary=boundary)
    given = {k: a[order] for k, a in enumerate(alternative, TEMPERATURE) if a is not None}
    search = Search(read, marks, sigmas, math.log(min_mass), growth, frozenset(given))
    found = _rescore(search, given, min_share)
    place = places(search, found)
    share, cause = _shares(search, found, place, [TEMPERATURE, *given])
    back = torch.zeros_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return Attribution(Evidence(*share.unbind()), cause[back], 1 + found.slope, found.residual[back])


def rounding_noise(*, largest_logit: float, significand_bits: int) -> float:
    """Standard deviation of one rounding of a logit: its spacing over sqrt(12).

        spacing = 2^(floor(log2 |logit|) + 1 - bits);   bits: bfloat16 8, float16 11, float32 24

    bfloat16 at 10 is spaced by 1/16, hence 0.018. A whole bfloat16 model is two or three times as noisy as
    one rounding of its logits; with equal weights on both sides that is measured, not guessed.
    """
    check_positive(largest_logit=largest_logit, significand_bits=significand_bits)
    return 2.0 ** (math.floor(math.log2(largest_logit)) + 1 - significand_bits) / math.sqrt(12)


def _rescore(search: Search, given: dict[int, PerToken], min_share: float) -> Rescored:
    """Rescorings against the differences; no temperature is fitted where one was rescored or a filter explains."""
    token = search.token
    shift = [
        torch.where(token.usable & a.isfinite(), a.detach() - token.logprob, 0.0) for a in given.values()
    ]
    table = torch.stack(shift) if shift else token.difference.new_zeros(0, len(token.difference))
    fit = ~filter_fits(search, token.difference, token.noise) & (TEMPERATURE not in given)
    return rescored(token.difference, table.to(token.noise.dtype), token.direction, fit, min_share=min_share)


def _shares(search: Search, found: Rescored, place: Place, names: list[int]) -> tuple[Tensor, PerToken]:
    """Shares of sum |difference| by cause, and the cause of every token."""
    usable, size = search.token.usable, found.residual.abs()
    allowed = torch.where(place.cause == UNKNOWN, search.sigmas * place.noise, place.noise).minimum(size)
    excess = torch.where(usable, size - allowed, 0.0)
    whole = search.token.difference.abs().sum()
    causes = torch.arange(len(CAUSES), device=size.device)
    # A temperature explains what its rescoring or its line closes; the curve that a line leaves is nobody's share.
    named = (causes[:, None] == place.cause) & (causes != TEMPERATURE)[:, None]
    part = torch.where(named, excess, 0.0).sum(1)
    part = part + torch.where(causes == PRECISION, torch.where(usable, allowed, 0.0).sum(), 0.0)
    share = part / torch.where(whole > 0, whole, 1.0)
    name = torch.tensor(names, device=size.device)
    share = share.index_add(0, name, found.share)
    share = torch.where(whole > 0, share, (causes == PRECISION).to(share.dtype))
    share = torch.where(usable.any(), share, torch.nan)
    moved, which = found.shift.abs().max(0)
    explained = torch.where(moved > place.noise, name[which], PRECISION)
    quiet = (place.cause == UNKNOWN) & usable & (size <= search.sigmas * place.noise)
    return share, torch.where(quiet, explained, place.cause)
