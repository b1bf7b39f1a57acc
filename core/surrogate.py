"""What all surrogates share: the result of every token, the token made safe to compute with, and the score form.

The score form is `value = slope * logprob` with a detached `slope = -coefficient * advantage`. Its gradient is
that of the ratio form `-ratio * advantage`, and a cap on the coefficient caps the gradient instead of cutting
it off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import check_bool, check_float, check_one_shape


class TokenLoss(NamedTuple):
    """What a surrogate says about every token, in the shape of `logprob`.

    Args:
        value: to be summed with the weights of `core.aggregate`; carries the gradient.
        slope: d value / d logprob, detached; 0 where nothing is trained. A backward pass that knows the weights
            needs nothing else.
        importance_ratio: exp(logprob - anchor), raw; 0 outside the mask and where unusable.
        out_of_region: the trust region took this token's gradient away.
        unusable: in the mask, but without a usable ratio.
    """

    value: Tensor
    slope: Tensor
    importance_ratio: Tensor
    out_of_region: Tensor
    unusable: Tensor


class AnchoredToken(NamedTuple):
    """Arguments of a surrogate, wide enough and harmless wherever they are not usable.

    Args:
        logprob: with its gradient, as it came.
        anchor: recorded logprob that the ratio is against; 0 where not usable.
        advantage: detached; 0 where not usable.
        ratio: exp(logprob - anchor), detached; 0 where not usable.
        usable: in the mask, with a finite anchor, a logprob that is not infinite and a ratio that does not overflow.
        loss_mask: as it came.
    """

    logprob: Tensor
    anchor: Tensor
    advantage: Tensor
    ratio: Tensor
    usable: Tensor
    loss_mask: Tensor


def anchored(logprob: Tensor, anchor: Tensor, advantage: Tensor, loss_mask: Tensor) -> AnchoredToken:
    """Recorded arguments made harmless outside the mask, all wide enough, and the detached ratio."""
    log_ratio, usable = detached_log_ratio(logprob, anchor, loss_mask)
    return AnchoredToken(
        logprob=logprob.to(log_ratio.dtype),
        anchor=torch.where(usable, anchor, 0.0).detach().to(log_ratio.dtype),
        advantage=torch.where(usable, advantage, 0.0).detach().to(log_ratio.dtype),
        ratio=torch.where(usable, log_ratio.exp(), 0.0),
        usable=usable,
        loss_mask=loss_mask,
    )


def detached_log_ratio(logprob: Tensor, anchor: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """logprob - anchor, and where it is usable; 0 elsewhere. A NaN logprob stays in it and is seen.

    An infinite one is not usable: no weights reach it by a gradient, and 0 times it would be NaN.
    """
    dtype = torch.promote_types(logprob.dtype, torch.float32)
    sampled = loss_mask & anchor.isfinite()
    log_ratio = logprob.detach().to(dtype) - anchor.detach().to(dtype)
    usable = sampled & ~log_ratio.isinf() & ~log_ratio.exp().isinf()
    return torch.where(usable, log_ratio, 0.0), usable


def score_form(token: AnchoredToken, coefficient: Tensor, *, out_of_region: Tensor) -> TokenLoss:
    """-coefficient * advantage * logprob, 0 out of the region; where nothing is trained the logprob is replaced."""
    # A NaN advantage has no side of the region to be on, and has to be seen.
    outside = out_of_region & token.usable & ~token.advantage.isnan()
    trained = token.usable & ~outside
    slope = -torch.where(trained, coefficient, 0.0) * token.advantage
    score = torch.where(trained, token.logprob, 0.0)
    return TokenLoss(
        value=slope * score,
        slope=slope,
        importance_ratio=token.ratio,
        out_of_region=outside,
        unusable=token.loss_mask & ~token.usable,
    )


def check_shapes(*, loss_mask: Tensor, **others: Tensor) -> None:
    """Refuse a mask that is not bool, others that are not floating point, and arguments not of one shape."""
    check_float(**others)
    check_bool(loss_mask=loss_mask)
    check_one_shape(**others, loss_mask=loss_mask)


def check_positive(**threshold: float) -> None:
    """Refuse a threshold that is zero, negative or NaN."""
    for name, value in threshold.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def check_bounds(**bound: float) -> None:
    """Refuse two bounds, given low first, that are negative, out of order or NaN."""
    (low_name, low), (high_name, high) = bound.items()
    if not 0 <= low < high:
        raise ValueError(f"{low_name} must be at least 0 and below {high_name}, got {low} and {high}")
