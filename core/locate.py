"""Where the differences of a step stand out from rounding, and of which cause that is the mark."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cause import (
    BOUNDARY,
    CACHE,
    FILTERED,
    LEAK,
    POSITION,
    RETOKENISED,
    STALE,
    TEMPERATURE,
    UNKNOWN,
    WEIGHTS,
    TokenFact,
)
from .footprint import (
    AGED,
    CACHED,
    FREE,
    HIT,
    LATE,
    LEAKED,
    OPENING,
    RULE_COST,
    Footprint,
    Layout,
    explain,
    scored,
)
from .rescore import Rescored
from .shapes import PerToken
from .surrogate import detached_log_ratio

ONE_SIDED, OTHER_SIDE = HIT + 1, -9
"""What a filter earns for a hit that it can make, and for one that it cannot: more than 1 in 13 refute it."""
NORMAL_MEDIAN = 0.6745
"""Of |x| for a standard normal x."""
CURVATURE = 1 / 8
"""Share of a fitted shift that its straight line may miss, in standard deviations of what is left."""


class Token(NamedTuple):
    """Facts that can be read, 0 where they cannot; the caller has sorted them by row and position.

    Args:
        difference: logprob - rollout_logprob.
        direction: its derivative by the log of the engine's temperature.
        noise: standard deviation of the difference that rounding leaves.
    """

    usable: PerToken
    logprob: PerToken
    difference: PerToken
    direction: PerToken
    noise: PerToken


class Search(NamedTuple):
    """What every step of the search needs; `given` are the causes that a rescoring has decided."""

    token: Token
    marks: Layout
    sigmas: float
    log_mass: float
    growth: float
    given: frozenset[int]


class Place(NamedTuple):
    """Cause by place or shape of every token, UNKNOWN where none, and the noise that it stands out from."""

    cause: PerToken
    noise: PerToken


def token(fact: TokenFact, logit_noise: float) -> Token:
    """What the search reads of the facts: zeros where nothing may be read, and the rounding to expect."""
    known = fact.loss_mask & fact.entropy.isfinite() & fact.logprob.isfinite()
    # What an engine writes for no logprob at all, such as -9999, has no ratio, as in the losses.
    difference, usable = detached_log_ratio(fact.logprob, fact.rollout_logprob, known)
    logprob, rollout, entropy = (
        torch.where(usable, x, 0.0).detach().to(difference.dtype)
        for x in (fact.logprob, fact.rollout_logprob, fact.entropy)
    )
    # A kernel may report a logprob a hair above 0.
    wrong = -torch.expm1(torch.minimum(logprob, rollout).clamp(max=0.0))
    noise = logit_noise * wrong + torch.finfo(torch.float32).eps
    return Token(usable, logprob, difference, torch.where(usable, rollout + entropy, 0.0), noise)


def filter_fits(search: Search, difference: PerToken, noise: PerToken) -> Tensor:
    """Whether a filter accounts for the hits better than a cause that may move them anywhere.

    A filter moves a logprob between log(min_mass) and 0, never up. Where its logprobs were rescored it is
    decided already.
    """
    usable = search.token.usable
    hit = difference.abs() > search.sigmas * noise
    possible = (difference < 0) & (difference > search.log_mass)
    paid = torch.where(hit, torch.where(possible, ONE_SIDED, OTHER_SIDE), scored(hit, usable))
    score = torch.where(usable, paid, 0).sum()
    fits = (score > scored(hit, usable).sum()) & (score > RULE_COST)
    return fits & (FILTERED not in search.given)


def places(search: Search, found: Rescored) -> Place:
    """First whether the gap is everywhere; then, against the level it has everywhere, where it stands out."""
    noise = search.token.noise + CURVATURE * found.shift[0].abs()
    cause, left, level = _everywhere(search, found, noise)
    local = _explain(search, left, level * noise)
    for run, name in ((LEAKED, LEAK), (CACHED, CACHE), (FREE, RETOKENISED)):
        cause = torch.where(local.run == run, name, cause)
    for rule, name in ((LATE, POSITION), (OPENING, BOUNDARY), (AGED, STALE)):
        cause = torch.where(local.rule[rule] & search.marks.rule[rule], name, cause)
    return Place(cause, noise)


def _everywhere(search: Search, found: Rescored, noise: PerToken) -> tuple[PerToken, PerToken, Tensor]:
    """The cause of a gap that covers all tokens, UNKNOWN if none; what it leaves; its typical size in noises."""
    usable, left = search.token.usable, found.residual
    paid = scored(left.abs() > search.sigmas * noise, usable).sum() - RULE_COST
    flat = paid > _explain(search, left, noise).score
    filtered = flat & filter_fits(search, left, noise)
    left = torch.where(filtered, left - left.clamp(search.log_mass, 0.0), left)
    ratio = left.abs() / noise
    late = search.marks.rule[LATE]
    grows = _median(ratio, late) > search.growth * _median(ratio, usable & ~late)
    kind = torch.where(grows, POSITION, WEIGHTS)
    # What a straight line leaves everywhere is the curve it was laid to.
    kind = torch.where(found.slope != 0, TEMPERATURE, kind)
    kind = torch.where(flat, torch.where(filtered, FILTERED, kind), UNKNOWN)
    typical = (_median(ratio, usable) / NORMAL_MEDIAN).clamp(min=1.0)
    return torch.where(usable, kind, UNKNOWN), left, torch.where(flat, typical, 1.0)


def _explain(search: Search, left: PerToken, noise: PerToken) -> Footprint:
    hit = left.abs() > search.sigmas * noise
    runs = (LEAK not in search.given, CACHE not in search.given, RETOKENISED not in search.given)
    return explain(hit, search.marks, stale_version=STALE not in search.given, runs=runs)


def _median(value: PerToken, counted: PerToken) -> Tensor:
    """NaN, which is larger than nothing, where no token counts."""
    return torch.where(counted, value, torch.nan).nanmedian()
