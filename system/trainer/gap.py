"""The gap between trainer and engine on recorded rows, by step and by cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.attribution import Attribution, attribution
from core.cause import CAUSES, Alternative, TokenFact, found
from core.logprob import TokenLogprob
from core.mismatch import mismatch, mismatch_sums
from system.trainer.rescoring import Rescorer, Support
from system.trainer.step import StepRow

SUPPORTS = (
    *(Support(top_p, 0) for top_p in (0.8, 0.9, 0.95, 0.98, 0.99)),
    *(Support(1.0, top_k) for top_k in (10, 20, 50, 100)),
)
"""Filters that engines are often left with."""


class Knobs(NamedTuple):
    """What `core.attribution` must be told; its meanings are there.

    Args:
        logit_noise: of the engine's and the trainer's arithmetic together.
        min_gap: the causes of a smaller mean are not named.
    """

    logit_noise: float
    min_gap: float = 1e-5
    sigmas: float = 4.0
    boundary: int = 2
    min_mass: float = 0.5
    growth: float = 1.5
    min_share: float = 0.1


class Gap(NamedTuple):
    """What the rows of one step say.

    Args:
        step: version that they were trained from.
        tokens: that were trained.
        unusable: of them, those without a logprob that can be compared.
        seen: mean |trainer - engine| as the loss has it: age of the tokens included.
        engine: the same with every token under the weights that sampled it: what the implementations differ by.
        exact: the same on the keys and values that older weights had left: what arithmetic differs by.
        k3: mean exp(d) - 1 - d of `seen`, an estimate of the divergence of rollout policy and trainer.
        share: of `seen`, by cause.
        found: the causes that explain enough of it to be named.
    """

    step: int
    tokens: int
    unusable: int
    seen: float
    engine: float
    exact: float
    k3: float
    share: dict[str, float]
    found: list[str]


def gap_of(
    rows: Sequence[StepRow],
    rescorer: Rescorer,
    *,
    version: int,
    knobs: Knobs,
    read: Mapping[str, Sequence[int]] | None = None,
) -> Gap:
    """The gap of a step's rows, trained from `version`.

    Args:
        read: ids that the engine read and sampled by request, where it keeps a log: prompt and completion.

    Raises:
        ValueError: there is no row with a trained token, or the weights of a version are not kept.
    """
    rows = [row for row in rows if any(row.loss_mask)]
    if not rows:
        raise ValueError(f"step {version} must hold a trained token, got none")
    seen = rescorer.score(rows, version=version)
    own = rescorer.score_by_own_version(rows, latest=version)
    kept = rescorer.score_as_sampled(rows, latest=version)
    fact = facts(rows, seen)
    alternative = Alternative(
        temperature=_at_another_temperature(rows, rescorer, version, fact),
        filtered_support=_nearest(fact, rescorer.score_within(rows, SUPPORTS, version=version))[1],
        retokenised=_as_read(rows, rescorer, version, read) if read else None,
        stale_version=_flat(own, "logprob"),
        # A hypothesis is the trainer's logprob with what it alone would change.
        stale_cache=fact.logprob + _flat(kept, "logprob") - _flat(own, "logprob"),
        leaked_state=None,
    )
    rules = {name: value for name, value in knobs._asdict().items() if name != "min_gap"}
    told = attribution(fact, alternative, trainer_version=version, **rules)
    sums = mismatch_sums(fact.logprob, fact.rollout_logprob, fact.loss_mask)
    means = mismatch(sums)
    named = found(told.share, min_share=knobs.min_share) & (means.absolute >= knobs.min_gap)
    return Gap(
        step=version,
        tokens=int(fact.loss_mask.sum()),
        unusable=int(sums.unusable_count),
        seen=means.absolute.item(),
        engine=_mean(own, fact),
        exact=_mean(kept, fact),
        k3=means.k3.item(),
        share=_shares(told),
        found=[CAUSES[k] for k in named.nonzero().flatten().tolist()],
    )


def _at_another_temperature(
    rows: Sequence[StepRow], rescorer: Rescorer, version: int, fact: TokenFact
) -> Tensor:
    """The temperature that leaves least: sought in steps of 5 %, then of 0.5 %."""
    best = rescorer.temperature
    for step, reach in ((1.05, 14), (1.005, 10)):
        tried = [best * step**k for k in range(-reach, reach + 1)]
        index, logprob = _nearest(fact, rescorer.score_at(rows, tried, version=version))
        best = tried[index]
    return logprob


def _nearest(fact: TokenFact, scored: Sequence[Sequence[TokenLogprob]]) -> tuple[int, Tensor]:
    """Of some rescorings the one that leaves least of the gap; a token that it forbids keeps the trainer's."""
    candidates = [_flat(one, "logprob") for one in scored]
    candidates = [torch.where(x.isfinite(), x, fact.logprob) for x in candidates]
    left = [mismatch_sums(x, fact.rollout_logprob, fact.loss_mask).absolute.item() for x in candidates]
    index = left.index(min(left))
    return index, candidates[index]


def _as_read(
    rows: Sequence[StepRow], rescorer: Rescorer, version: int, read: Mapping[str, Sequence[int]]
) -> Tensor:
    """With the ids that the engine had, where the last request of a row covers as many as the row."""
    told = []
    for row in rows:
        ids = read.get(row.requests[-1][0]) if row.requests else None
        end = row.requests[-1][2] if row.requests else 0
        known = ids is not None and len(ids) == end
        told.append(
            replace(row, token_ids=[*ids, *row.token_ids[end:]]) if ids is not None and known else row
        )
    return _flat(rescorer.score(told, version=version), "logprob")


def facts(rows: Sequence[StepRow], scored: Sequence[TokenLogprob]) -> TokenFact:
    """What is known of every token, rows one after the other."""
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    return TokenFact(
        logprob=_flat(scored, "logprob"),
        rollout_logprob=torch.tensor([x for row in rows for x in row.rollout_logprob], dtype=torch.float32),
        loss_mask=torch.tensor([x for row in rows for x in row.loss_mask], dtype=torch.bool),
        entropy=_flat(scored, "entropy"),
        row_id=torch.arange(len(rows)).repeat_interleave(lengths),
        position=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        token_in_turn=torch.tensor([x for row in rows for x in _places_in_turns(row)]),
        policy_version=torch.tensor([x for row in rows for x in row.policy_version]),
    )


def rows_by_step(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[StepRow]]:
    """The rows of each step from the lines of trainer_input.jsonl.

    A step that was taken twice, because a run was killed after the first time, counts as it was the second time.

    Raises:
        ValueError: a line is not a row.
    """
    steps: dict[int, dict[str, StepRow]] = {}
    last = -1
    for number, line in enumerate(lines, start=1):
        try:
            version = line["version"]
            if version != last:
                steps[version], last = {}, version
            steps[version][line["row_id"]] = StepRow(
                row_id=line["row_id"],
                trial_id=line["trial_id"],
                group_id=line["group_id"],
                token_ids=line["token_ids"],
                loss_mask=[bool(on) for on in line["loss_mask"]],
                rollout_logprob=line["rollout_logprob"],
                policy_version=line["policy_version"],
                advantage=line["advantage"],
                requests=tuple((name, start, end) for name, start, end in line["requests"]),
            )
        except (KeyError, TypeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"line {number} must be a row of a step, got {told}") from None
    return {version: list(rows.values()) for version, rows in sorted(steps.items())}


def _places_in_turns(row: StepRow) -> list[int]:
    places = [0] * len(row.token_ids)
    for _, start, end in row.requests:
        places[start:end] = range(end - start)
    return places


def _flat(scored: Sequence[TokenLogprob], name: str) -> Tensor:
    return torch.cat([getattr(one, name) for one in scored]).float()


def _mean(scored: Sequence[TokenLogprob], fact: TokenFact) -> float:
    sums = mismatch_sums(_flat(scored, "logprob"), fact.rollout_logprob, fact.loss_mask)
    return mismatch(sums).absolute.item()


def _shares(told: Attribution) -> dict[str, float]:
    return {name: share for name, share in zip(CAUSES, torch.stack(list(told.share)).tolist(), strict=True)}
