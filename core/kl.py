"""Per-token estimates of KL(pi || reference) from sampled tokens, as penalties to be minimised.

All estimate the same number, d = log pi - log pi_ref being the log ratio of the sampled token, but as losses
they pull differently: the derivative of an estimate is not an estimate of the derivative.

    estimate       value             d value / d logprob      expected gradient, tokens sampled from pi
    k1             d                 1                        0: it does nothing
    k2             d^2 / 2           d                        that of KL(pi || reference)
    k3             exp(-d) - 1 + d   1 - exp(-d)              that of KL(reference || pi)
    weighted k3    r k3              r d                      that of KL(pi || reference), sampled from mu

arXiv:2506.09477. This is the divergence of each token's distribution given its prefix: what a token does to the
prefixes after it is not in the gradient. Every function works token by token on any leading shape. Weigh the
result as the loss is weighed.

Where `loss_mask` is False nothing is read, and value and gradient are exactly 0. A token in the mask with a
recorded logprob that is not finite, an infinite `logprob`, or a ratio in its value that overflows (of the weighted
estimate, a value or a slope) is dropped: 0, never clamped to some largest penalty. `core.mismatch` counts logprobs
that are not finite. A NaN in `logprob` inside the mask comes out as NaN. Only `logprob` has a gradient. Arithmetic is
float32 at least, float64 where `logprob` is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .surrogate import check_shapes, detached_log_ratio


def k1(logprob: Tensor, reference_logprob: Tensor, loss_mask: Tensor) -> Tensor:
    """The log ratio d: unbiased, of either sign. For reports and rewards; as a loss it pulls at random.

    Args:
        logprob: log pi of the sampled token under the weights being trained.
        reference_logprob: log pi_ref of the same token under the frozen model.
        loss_mask: True where the policy sampled the token and it is trained; elsewhere the others may be
            garbage.

    Raises:
        ValueError: if shapes differ or the mask is not bool.
    """
    return _log_ratio(logprob, reference_logprob, loss_mask)


def k2(logprob: Tensor, reference_logprob: Tensor, loss_mask: Tensor) -> Tensor:
    """d^2 / 2: biased as a number, and the right gradient of KL(pi || reference). Arguments as `k1`."""
    return _log_ratio(logprob, reference_logprob, loss_mask).square() / 2


def k3(logprob: Tensor, reference_logprob: Tensor, loss_mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative as a number; as a loss it is KL the other way round.

    GRPO's penalty, arXiv:2402.03300, Eq. 4. Arguments as `k1`.
    """
    return _k3(_without_overflow(_log_ratio(logprob, reference_logprob, loss_mask)))


def weighted_k3(
    logprob: Tensor, rollout_logprob: Tensor, reference_logprob: Tensor, loss_mask: Tensor
) -> Tensor:
    """r k3 with r = pi / mu: unbiased in value and in gradient, whoever sampled the tokens.

    The gradient goes through the ratio: r k3 + r (1 - exp(-d)) = r d. arXiv:2512.02556. Arguments as `k1`, and

    Args:
        rollout_logprob: log mu of the sampled token as the engine reported it, never recomputed.
    """
    check_shapes(
        logprob=logprob,
        rollout_logprob=rollout_logprob,
        reference_logprob=reference_logprob,
        loss_mask=loss_mask,
    )
    log_weight, known = detached_log_ratio(logprob, rollout_logprob, loss_mask)
    d = _without_overflow(_log_ratio(logprob, reference_logprob, known))
    value, slope = log_weight.exp() * _k3(d.detach()), log_weight.exp() * d.detach()
    lost = value.isinf() | slope.isinf()
    # Through the product, autograd would find r d as the difference of two numbers that may be far larger.
    return torch.where(lost, 0.0, value) + torch.where(lost, 0.0, slope) * (d - d.detach())


def _log_ratio(logprob: Tensor, reference_logprob: Tensor, loss_mask: Tensor) -> Tensor:
    """log pi - log pi_ref with its gradient, 0 where it is not usable."""
    check_shapes(logprob=logprob, reference_logprob=reference_logprob, loss_mask=loss_mask)
    dtype = torch.promote_types(logprob.dtype, torch.float32)
    usable = loss_mask & reference_logprob.isfinite() & ~logprob.isinf()
    reference = torch.where(usable, reference_logprob, 0.0).detach().to(dtype)
    return torch.where(usable, logprob, 0.0) - reference


def _without_overflow(log_ratio: Tensor) -> Tensor:
    """0 where exp(-d) overflows: the argument, so that no infinity reaches the gradient."""
    return torch.where(torch.expm1(-log_ratio.detach()).isinf(), 0.0, log_ratio)


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(-log_ratio) + log_ratio
