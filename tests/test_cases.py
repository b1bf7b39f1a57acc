"""Bugs that other frameworks published, as small cases with the number we hold to be right.

Each test names the law; its docstring has the case's own number (G1, G2, ...) and a public report of the bug.
Cases whose numbers stand beside a law in tests/property are not repeated here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from strategies import step_of
from test_office import CHAT, LIST, ScriptedPolicy

from core import aggregate, loss, schedule
from core.advantage import (
    group_mean_advantage,
    group_standard_advantage,
    max_likelihood_advantage,
    zero_variance,
)
from core.counter import permutation
from core.estimate import pass_at_k
from core.logprob import token_logprob
from core.outcome import Outcome, has_valid_reward, reward_per_rollout
from core.schedule import (
    DropGroup,
    EvaluationEnded,
    Finished,
    Opened,
    Settings,
    StartTrial,
    StepTrained,
    SyncWeights,
    Train,
    TrialEnded,
    WeightsApplied,
    begin,
    react,
    task_at,
)
from core.shard import WHOLE
from core.tito import append_completion, append_observation, continue_rows, open_ledger
from system.engine import GenerateRequest, RestartRule, Router
from system.engine.batch import Batch
from system.engine.cached import CachedModel
from system.harness.chat import Chat
from system.harness.office import Call, Episode, Limits, OfficeAgent
from system.journal import Journal
from system.loop import Crew, Loop, step_rows
from system.model import ModelConfig, random_state
from system.trainer import StepMetrics
from system.trial import TrialError, phase, result
from system.verify import Verdict
from system.weights import check_coverage

F64 = torch.float64
GROUP_MEAN = partial(group_mean_advantage, tolerance=1e-6)


def numbers(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


# Loss and its weights


def test_every_partition_and_order_of_rows_has_one_denominator():
    """G1, verl 6957: the mean of the micro-batches' means would be 3.3333."""
    rows: list[list[float | None]] = [[1.0] * 4, [3.0] * 2, [5.0] * 2]
    partitions = [[[0, 1, 2]], [[0, 1], [2]], [[0, 2], [1]], [[1, 2], [0]], [[0], [1], [2]]]
    for order in itertools.permutations(range(3)):
        step = step_of([[rows[i]] for i in order], list(order), list(order))
        weight = aggregate.token_mean_weight(step.loss_mask, step.row_id, step.group_id, dtype=F64)
        for partition in partitions:
            scale = torch.ones((), dtype=F64, requires_grad=True)
            for part in partition:
                own = torch.isin(step.row_id, torch.tensor(part))
                (weight[own] * step.value[own] * scale).sum().backward()
            assert scale.grad is not None and float(scale.grad) == pytest.approx(2.5, rel=1e-12)


def test_ranks_add_up_to_the_loss_of_one_process():
    """G2, verl 5798: eight rows of loss 1 on four ranks; multiplied where it had to be divided it was 0.0625."""
    step = step_of([[[1.0]] for _ in range(8)], list(range(8)), list(range(8)))
    weight = aggregate.sequence_mean_weight(step.loss_mask, step.row_id, step.group_id, dtype=F64)
    by_rank = [float(part.sum()) for part in (weight * step.value).split(2)]
    assert len(by_rank) == 4 and sum(by_rank) == 1.0


def test_a_masked_nan_reaches_neither_the_mean_nor_the_gradient():
    """G5, SkyRL 1635: losses NaN, 1, 2 of which the first is masked; 0 * NaN would be NaN."""
    logprob = numbers([math.nan, -1.0, -2.0]).requires_grad_()
    mask = torch.tensor([False, True, True])
    advantage = numbers([math.nan, 1.0, 1.0])
    told = loss.importance_weighted_policy_gradient(logprob, logprob.detach(), advantage, mask)
    weight = aggregate.token_mean_weight(mask, torch.zeros(3).long(), torch.zeros(3).long(), dtype=F64)
    mean = (weight * told.value).sum()
    mean.backward()
    assert float(mean.detach()) == 1.5
    assert logprob.grad is not None and logprob.grad.tolist() == [0.0, -0.5, -0.5]


def test_trained_values_are_selected_by_mask_and_not_by_their_place():
    """G18, SkyRL 1367: response values that lie at the right end of a row."""
    logprob, mask = numbers([0.0, 0.0, -1.0, -2.0, -3.0]), torch.tensor([False, False, True, True, True])
    told = loss.importance_weighted_policy_gradient(logprob, logprob, torch.ones(5, dtype=F64), mask)
    assert told.value.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]


def test_both_sides_at_one_temperature_have_ratio_one():
    """G23, slime 557: logits 2 and 0; at another temperature than the sampler's the ratio would be 0.897."""
    hidden, head = numbers([1.0])[:, None], numbers([2.0, 0.0])[:, None]
    at = partial(token_logprob, hidden, head, torch.tensor([0]), chunk=1, shard=WHOLE)
    sampler = at(temperature=0.5).logprob
    one, mask = torch.ones(1, dtype=F64), torch.tensor([True])
    for temperature, ratio in ((0.5, 1.0), (1.0, math.exp(-0.126928011 + 0.018149928))):
        told = loss.importance_weighted_policy_gradient(
            at(temperature=temperature).logprob, sampler, one, mask
        )
        assert float(told.importance_ratio) == pytest.approx(ratio, rel=1e-6)


def test_the_logprob_is_that_of_the_sampled_token_and_not_of_the_likeliest():
    """G22, NeMo-RL 3297: token 17 has -4.2, token 13 has -0.7; 13 was sampled."""
    logprob = torch.full((20,), -20.0, dtype=F64)
    logprob[17], logprob[13] = -4.2, -0.7
    logprob[0] = math.log(1 - math.exp(-4.2) - math.exp(-0.7) - 17 * math.exp(-20))
    found = token_logprob(
        torch.ones(1, 1, dtype=F64),
        logprob[:, None],
        torch.tensor([13]),
        temperature=1.0,
        chunk=1,
        shard=WHOLE,
    )
    assert float(found.logprob) == pytest.approx(-0.7)
    with pytest.raises(ValueError, match="must be equally long, got 1, 0 and 1"):
        append_completion(open_ledger([1]), [13], [], [0], finish_reason="stop")


def test_a_token_without_gradient_keeps_its_place_in_the_denominator():
    """The first token of a row of four leaves the region: 37 / 11, where a new denominator would give 3.7."""
    step = step_of([[[1.0] * 2, [2.0] * 4, [5.0]], [[3.0], [7.0] * 3]], list(range(5)), [0, 1])
    weight = aggregate.token_mean_weight(step.loss_mask, step.row_id, step.group_id, dtype=F64)
    value = step.value.clone()
    value[2] = 0.0
    assert float((weight * value).sum()) == pytest.approx(3.36363636364)
    constant = aggregate.sequence_sum_weight(step.loss_mask, step.row_id, step.group_id, length=1, dtype=F64)
    assert float((constant * step.value).sum()) == pytest.approx(7.8)


DPPO = [(0.5, 0.7, 1), (0.5, 0.3, -1), (0.5, 0.3, 1), (0.5, 0.7, -1), (1e-4, 1e-2, 1), (0.99, 0.8, -1)]


def test_dppo_means_over_the_published_tokens():
    """arXiv:2602.04879, six tokens (mu, pi, A) at delta 0.15: token means of both forms, half of them masked."""
    mu, pi, advantage = (numbers(column) for column in zip(*DPPO))
    mask = torch.ones(6, dtype=torch.bool)
    told = loss.dppo_binary_tv(
        pi.log(), mu.log(), advantage, mask, delta_low=0.15, delta_high=0.15, max_ratio=math.inf
    )
    kept = torch.where(told.out_of_region, 0.0, told.importance_ratio)
    assert float(told.value.mean()) == pytest.approx(76.79000956, rel=1e-9)
    assert float(-(kept * advantage).mean()) == pytest.approx(-16.5333333333)
    assert float(told.out_of_region.double().mean()) == 0.5


@pytest.mark.parametrize(
    "mu, pi, advantage, divergence, tolerance",
    [
        (1e-4, 1e-2, 1.0, 0.00948881880148, 1e-9),
        (0.99, 0.80, -1.0, 0.181004960571, 1e-9),
        (math.exp(-1), math.exp(-0.1), 1.0, 0.86582, 1e-5),
        (math.exp(-1), math.exp(-0.95), 1.0, 0.00075, 1e-2),
    ],
)
def test_dppo_masks_exactly_beyond_the_binary_divergence(mu, pi, advantage, divergence, tolerance):
    args = (numbers([pi]).log(), numbers([mu]).log(), numbers([advantage]), torch.tensor([True]))
    for factor, masked in ((1 - tolerance, True), (1 + tolerance, False)):
        delta = divergence * factor
        told = loss.dppo_binary_kl(*args, delta_low=delta, delta_high=delta, max_ratio=math.inf)
        assert bool(told.out_of_region) is masked


def test_extremes_of_the_ratio_are_of_trained_tokens_alone():
    """SkyRL's least ratio was 0 whenever anything was masked: .5 and 10 are trained, the one between is not."""
    mask = torch.tensor([True, False, True])
    told = loss.cispo(
        numbers([0.5, 99.0, 10.0]).log() - 3, numbers([1.0] * 3).log() - 3, torch.ones(3, dtype=F64), mask,
        min_ratio=0.8, max_ratio=1.2,
    )  # fmt: skip
    trained = told.importance_ratio[mask]
    assert float(trained.min()) == pytest.approx(0.5) and float(trained.max()) == pytest.approx(10)


def test_cispo_ratios_before_and_after_the_clamp():
    """Three published tokens at bounds 0.8 and 1.2: mean ratio 1.2272, clamped 1.0667, largest 1.6487."""
    logprob, anchor = numbers([-1.69315, -1.0, -0.69741]), numbers([-1.30685, -1.5, -1.0])
    leaf = logprob.clone().requires_grad_()
    told = loss.cispo(
        leaf, anchor, -torch.ones(3, dtype=F64), torch.ones(3, dtype=torch.bool), min_ratio=0.8, max_ratio=1.2
    )
    told.value.sum().backward()
    assert leaf.grad is not None
    ratio = told.importance_ratio
    seen = (float(ratio.mean()), float(leaf.grad.mean()), float(ratio.max()))
    assert seen == pytest.approx((1.2272, 1.0667, 1.6487), abs=1e-4)


# Advantages


def test_a_group_with_one_valid_reward_is_flagged():
    """G7, NeMo-RL 4160: two rewards of three are not valid, so nothing of the group is trained."""
    reward, group = numbers([2, 4, 0]), torch.zeros(3).long()
    two = GROUP_MEAN(reward, torch.tensor([True, True, False]), group)
    one = GROUP_MEAN(reward, torch.tensor([True, False, False]), group)
    assert two.advantage.tolist() == [-1, 1, 0] and two.has_signal.tolist() == [True, True, False]
    assert one.advantage.tolist() == [0, 0, 0] and not one.has_signal.any()


def test_each_group_is_normalised_on_its_own():
    """G50, OpenRLHF 1250: [[1, 3], [10, 30]] per row; ours has n - 1, so 0.7071 where n gives 1."""
    told = group_standard_advantage(
        numbers([1, 3, 10, 30]), torch.ones(4).bool(), torch.tensor([0, 0, 1, 1]), tolerance=1e-6, epsilon=0.0
    )
    assert told.advantage.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2)


@pytest.mark.parametrize(
    "advantage, reward, expected",
    [
        (partial(group_standard_advantage, epsilon=1e-6), [1, 0, 0, 1], (0.866023903787, -0.866023903787)),
        (partial(group_standard_advantage, epsilon=1e-6), [1, 0, 0, 0], (1.49999700001, -0.499999000002)),
        (group_mean_advantage, [1, 0, 0, 1], (0.5, -0.5)),
        (max_likelihood_advantage, [1, 0, 0, 0], (3, -1)),
    ],
    ids=["standard, two of four", "standard, one of four", "mean", "max likelihood"],
)
def test_advantages_to_the_last_digit(advantage, reward, expected):
    """The value of a rollout that passed, then of one that failed."""
    told = advantage(numbers(reward), torch.ones(4).bool(), torch.zeros(4).long(), tolerance=1e-6).advantage
    passed = [float(a) for a, r in zip(told, reward, strict=True) if r]
    failed = [float(a) for a, r in zip(told, reward, strict=True) if not r]
    assert passed == pytest.approx([expected[0]] * len(passed), rel=1e-11)
    assert failed == pytest.approx([expected[1]] * len(failed), rel=1e-11)


def test_the_tolerance_is_what_keeps_judge_noise_from_a_full_advantage():
    """A spread of 1e-7 gives 1.25 under epsilon 1e-8 and still .0714 under 1e-6; with a tolerance, 0."""
    args = (numbers([0.7, 0.7 + 1e-7, 0.7, 0.7]), torch.ones(4).bool(), torch.zeros(4).long())
    for tolerance, epsilon, largest in ((0.0, 1e-8, 1.25), (0.0, 1e-6, 0.0714), (1e-6, 1e-8, 0.0)):
        told = group_standard_advantage(*args, tolerance=tolerance, epsilon=epsilon)
        assert float(told.advantage.max()) == pytest.approx(largest, abs=1e-4)


@pytest.mark.parametrize(
    "case, reward, valid, tolerance, signal, flat",
    [
        ("spread .6667 within .66670001", [0.0, 0.6667], [1, 1], 0.66670001, False, True),
        ("spread .6667 beyond .6666", [0.0, 0.6667], [1, 1], 0.6666, True, False),
        ("the valid ones are equal", [1, 1, 0, 5], [1, 1, 0, 0], 1e-6, False, True),
        ("one is valid", [1, 0, 0, 5], [1, 0, 0, 0], 1e-6, False, False),
        ("none is valid", [1, 0, 0, 5], [0, 0, 0, 0], 1e-6, False, False),
    ],
)
def test_a_group_without_a_difference_among_valid_rewards_is_not_trained(
    case, reward, valid, tolerance, signal, flat
):
    args = (numbers(reward), torch.tensor(valid).bool(), torch.zeros(len(reward)).long())
    assert bool(group_mean_advantage(*args, tolerance=tolerance).has_signal.any()) is signal, case
    assert bool(zero_variance(*args, tolerance=tolerance).any()) is flat, case


def trial_of(name: str, group: int, reward: float, rows: int, version: int = 0) -> dict[str, Any]:
    """What the loop keeps of a trial with so many rows, sampled at one version."""
    row = {
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "rollout_logprob": [0.0, -0.5, -0.5],
        "policy_version": [-1, version, version],
    }
    turns = [{"request_id": f"{name}/{i}", "row": i, "start": 1, "end": 3} for i in range(rows)]
    return {"trial_id": name, "group_id": group, "reward": reward, "rows": [row] * rows, "turns": turns}


@pytest.mark.parametrize(
    "case, rewards, groups, counts, expected",
    [
        (
            "G6, miles 2369: a row's vote would make the mean .6667",
            [1, 0, 1, 0],
            [0, 0, 0, 0],
            [2, 1, 2, 1],
            [0.5, 0.5, -0.5, 0.5, 0.5, -0.5],
        ),
        (
            "SkyRL 1492: rewards 2 and 0, one advantage for every row of a trajectory",
            [2, 0, 2, 0],
            [0, 0, 1, 1],
            [4, 1, 3, 2],
            [1, 1, 1, 1, -1, 1, 1, 1, -1, -1],
        ),
        ("G52, tinker 507: nothing to learn is an empty batch", [1, 1, 0, 0], [0, 0, 1, 1], [1, 2, 1, 1], []),
    ],
)
def test_every_row_has_its_trials_advantage_and_a_trial_votes_once(case, rewards, groups, counts, expected):
    results = [
        trial_of(f"t{i}", group, reward, rows)
        for i, (group, reward, rows) in enumerate(zip(groups, rewards, counts, strict=True))
    ]
    rows = step_rows(results, GROUP_MEAN)
    assert [row.advantage for row in rows] == expected, case
    assert all(row.requests == ((row.row_id.replace("#", "/"), 1, 3),) for row in rows)


def test_rows_of_one_rollout_are_one_trial_of_pass_at_k():
    """G55, miles 2579: four rollouts in seven rows, the one that passed in two of them."""
    owner, reward = [0, 0, 1, 2, 2, 2, 3], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    found = reward_per_rollout(owner, reward)
    assert pass_at_k(trials=len(found), passed=sum(r == 1 for r in found.values()), k=1) == 0.25


# Token streams


def test_a_stop_token_that_is_also_padding_is_trained_where_it_was_sampled():
    """G19, TRL 6357: 4 5 0 was sampled, the two zeros after it were not."""
    row = append_completion(open_ledger([9]), [4, 5, 0], [-0.5] * 3, [0] * 3, finish_reason="stop")
    row = append_observation(row, [0, 0])
    assert row.token_ids[1:] == (4, 5, 0, 0, 0) and row.loss_mask[1:] == (True, True, True, False, False)


def test_a_prompt_that_extends_a_row_merges_and_another_begins_a_row():
    """Prompts [10] and [10, 20, 30], responses [20] and [40, 41] are one row; a rewritten prompt is a second."""
    first = append_completion(open_ledger([10]), [20], [-0.5], [0], finish_reason="stop")
    (row,) = continue_rows((first,), [10, 20, 30])
    row = append_completion(row, [40, 41], [-0.3, -0.4], [0, 0], finish_reason="stop")
    assert row.token_ids == (10, 20, 30, 40, 41) and row.loss_mask[1:] == (True, False, True, True)
    assert row.rollout_logprob[1:] == (-0.5, 0.0, -0.3, -0.4)
    assert len(continue_rows((first,), [10, 21, 30])) == 2


GROUPING = """{% for m in messages %}{% if m['role'] == 'tool' %}
{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}[U{% endif %}
{{ m['content'] }}{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}U]{% endif %}
{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"""


def test_tool_messages_in_a_row_are_rendered_together(tmp_path):
    """G56, slime 2264: a template that wraps a run of tool messages sees the run, not one message at a time."""
    clerk = Path(__file__).resolve().parent.parent / "policies" / "clerk"
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).symlink_to(clerk / name)
    (tmp_path / "chat_template.jinja").write_text(GROUPING)
    chat = Chat(tmp_path)
    answers = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    delta = chat.observation(answers, chat.stop_ids[0])
    assert delta is not None
    text = chat.tokenizer.decode(list(delta), skip_special_tokens=False)
    assert text.count("[U") == text.count("U]") == 1 and text.replace("\n", "") == "[UabU]"


# The agent


def prompt_of(length: int) -> str:
    """An instruction whose whole prompt has so many tokens: a digit is a token."""
    empty = CHAT.render([{"role": "user", "content": ""}], [], add_generation_prompt=True)
    return "1" * (length - len(empty))


def act(policy: ScriptedPolicy, instruction: str, call: Call | None = None, **changed: Any) -> Episode:
    """An episode of the agent whose tool does nothing."""

    async def nothing(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        return "", False

    limits: dict[str, Any] = {
        "context": 400,
        "turn_tokens": 100,
        "turns": 5,
        "repairs": 0,
        "result_characters": 50,
        "nudge_ratio": 0.0,
        "temperature": 1.0,
        "deadline": time.monotonic() + 60,
    }
    agent = OfficeAgent(trial_id="t", seed=1, engine=policy, chat=CHAT, limits=Limits(**(limits | changed)))

    async def run() -> Episode:
        return await agent(instruction=instruction, tools=[], call=call or nothing)

    return anyio.run(run)


def test_every_request_says_every_sampling_parameter():
    """G24, NeMo-RL 3497: at temperature 0.7 nothing is left to a model's generation_config."""
    policy = ScriptedPolicy("x")
    act(policy, "Say x.", temperature=0.7)
    (request,) = policy.requests
    assert (request.temperature, request.seed, request.stop_token_ids) == (0.7, 1, CHAT.stop_ids)
    assert (request.top_p, request.top_k, request.min_p, request.repetition_penalty) == (1, -1, 0, 1)
    with pytest.raises(TypeError, match=f"missing {len(fields(GenerateRequest))} required keyword-only"):
        GenerateRequest()  # type: ignore[call-arg]


def test_a_prompt_beyond_the_window_is_truncated_and_asks_for_nothing():
    """G38, cookbook 506: window 256, prompt 273; the policy's own doing, so not a system error."""
    policy = ScriptedPolicy()
    episode = act(policy, prompt_of(273), context=256)
    assert episode.truncated == Outcome(kind="truncated", reason="context") and not policy.requests


def test_a_turn_asks_for_no_more_than_the_window_has_left():
    """G38: window 100, 90 used, 20 a turn."""
    policy = ScriptedPolicy("x")
    act(policy, prompt_of(90), context=100, turn_tokens=20)
    assert policy.requests[0].max_tokens == 10


def test_a_finished_episode_keeps_its_reward_at_the_very_end_of_the_window():
    """G38: the stop token is the last one for which there was room."""
    episode = act(ScriptedPolicy("123456789"), prompt_of(90), context=100)
    assert len(episode.rows[0]) == 100 and episode.truncated is None and episode.answer == "123456789"
    told = result(episode, Verdict(reward=1.0, passed=True, criteria=()))
    assert told["outcome"]["kind"] == "solved" and told["reward"] == 1.0


def test_a_tool_call_that_fails_on_the_way_is_not_made_again():
    """G66, verifiers 1739: it may have been carried out; the trial ends, and another attempt starts afresh."""
    made = []

    async def call(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        made.append(name)
        raise ConnectionError("the server is gone")

    policy = ScriptedPolicy(LIST, LIST)
    with pytest.raises(TrialError, match="agent: ConnectionError: the server is gone"), phase("agent", {}):
        act(policy, "List.", call)
    assert made == ["list_files"] and len(policy.requests) == 1


def test_an_error_of_the_grader_has_no_reward():
    """G60, verl 5635: a timeout while grading is a system error and not a zero."""
    with pytest.raises(TrialError) as raised, phase("verify", {}):
        raise TimeoutError("judge")
    outcome = Outcome(kind="system_error", phase=raised.value.phase, cause=raised.value.cause)
    assert outcome.phase == "verify" and outcome.cause == "TimeoutError: judge"
    assert not has_valid_reward(outcome, scored_truncations=("context",))


# Engine and weights


def test_weights_are_covered_both_ways():
    """G62, UniRL 166: the trainer has a, b, c, the engine a, b, d."""
    state = {name: torch.zeros(2) for name in "abc"}
    with pytest.raises(ValueError, match="must cover the model exactly, got missing: d; unexpected: c"):
        check_coverage(state, {name: (2,) for name in "abd"}, source="trainer")
    with pytest.raises(ValueError, match=r"shape: b \(2,\) not \(3,\); dtype: a torch.float32, b"):
        check_coverage(state, {"a": (2,), "b": (3,), "c": (2,)}, source="trainer", dtype=torch.bfloat16)
    check_coverage(state, {name: (2,) for name in "cba"}, source="trainer")


def test_failed_requests_leave_no_load_behind():
    """G67, verl 6544: three calls that are refused and three that are given up; nothing runs, nothing waits."""
    config = ModelConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, vocab_size=16, token_count=16, max_position_embeddings=32, rms_norm_eps=1e-6,
        rope_theta=1e4, tie_word_embeddings=True,
    )  # fmt: skip
    batch = Batch(CachedModel(config, random_state(config, seed=0), max_context=32, slots=2), version=0)

    def request(name: str, top_p: float) -> GenerateRequest:
        return GenerateRequest(
            request_id=name, session_id=name, token_ids=[1], max_tokens=20, stop_token_ids=[], seed=0,
            temperature=1.0, top_p=top_p, top_k=-1, min_p=0.0, repetition_penalty=1.0,
        )  # fmt: skip

    for i in range(3):
        with pytest.raises(ValueError, match="top_p must be 1"):
            batch.submit(request(f"refused{i}", 0.9), None)
        batch.submit(request(f"given up {i}", 1.0), None)
    batch.step()
    assert (batch.running, len(batch.waiting)) == (2, 1)
    for i in range(3):
        batch.release(f"given up {i}")
    assert (batch.running, len(batch.waiting)) == (0, 0) and batch.step() == []


# The schedule


def settings_of(**changed: Any) -> Settings:
    plain: dict[str, Any] = {
        "steps": 1,
        "batch_groups": 1,
        "group_size": 4,
        "max_staleness": 0,
        "max_running": 100,
        "max_retries": 0,
        "min_valid": 2,
        "tolerance": 1e-6,
        "max_zero_variance": 0,
        "max_lost": 10,
        "order": "oldest",
        "in_order_steps": 0,
        "late_group": "wait",
        "requeue_stale": False,
        "task_count": 6,
        "seed": 7,
        "save_every": 0,
        "evaluate_at": (),
        "evaluation_tasks": 2,
        "evaluation_samples": 1,
    }
    return Settings(**(plain | changed))


@dataclass
class History:
    """What a shell that answers everything in order saw."""

    actions: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    states: list[schedule.State] = field(default_factory=list)

    def said(self, *kinds: type) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kinds)]


def no_failure(start: StartTrial) -> bool:
    return False


def drive(
    settings: Settings, *, version: int = 0, fails: Callable[[StartTrial], bool] = no_failure
) -> History:
    """A whole run in which trials for which `fails` end as system errors; the others pass every second time."""
    told, state, applied = History(), begin(), version
    pending: deque[Any] = deque([Opened(version=version)])
    while pending:
        event = pending.popleft()
        if isinstance(event, StartTrial):
            bad = fails(event)
            event = TrialEnded(
                trial_id=event.trial_id,
                kind="system_error" if bad else "solved",
                valid=not bad,
                reward=None if bad else float(event.sample % 2),
                version_min=event.policy_version,
                version_max=applied,
            )
        if isinstance(event, WeightsApplied):
            applied = event.version
        state, actions = react(settings, state, event)
        told.events.append(event)
        told.states.append(state)
        for action in actions:
            told.actions.append(action)
            match action:
                case StartTrial():
                    pending.append(action)
                case Train():
                    pending.append(StepTrained(version=action.version + 1))
                case SyncWeights():
                    pending.append(WeightsApplied(version=action.version))
        assert len(told.events) < 10_000
    assert state.finished and not state.running
    return told


def test_a_worker_that_dies_is_replaced_and_its_place_is_free_again():
    """G57, SkyRL 1173: four trials side by side, one dies; the consumer is not left waiting."""
    told = drive(settings_of(max_running=4, max_retries=1), fails=lambda s: s.trial_id == "train-0-2-0")
    assert [s.trial_id for s in told.said(StartTrial)][4:] == ["train-0-2-1"]
    assert told.said(Train)[0].trial_ids == ("train-0-0-0", "train-0-1-0", "train-0-2-1", "train-0-3-0")


def test_one_system_error_in_a_hundred_trials_ends_nothing():
    """G58: counted once, trained never, and the other ninety-nine are trained."""
    told = drive(settings_of(batch_groups=25), fails=lambda s: s.trial_id == "train-9-3-0")
    assert len(told.said(StartTrial)) == 100
    assert sum(e.kind == "system_error" for e in told.events if isinstance(e, TrialEnded)) == 1
    assert len(told.said(Train)[0].trial_ids) == 99
    assert told.actions[-1] == Finished(reason="all steps trained")


@pytest.mark.parametrize(
    "policy, changed, starts, trained, dropped",
    [
        ("refill", {"max_retries": 1}, 5, 4, []),
        ("keep survivors", {"min_valid": 2}, 4, 3, []),
        ("drop", {"min_valid": 4}, 8, 4, ["lost"]),
    ],
)
def test_one_system_error_in_a_group_of_four_under_each_policy(policy, changed, starts, trained, dropped):
    """G59, prime-rl 2590."""
    told = drive(settings_of(**changed), fails=lambda s: s.trial_id == "train-0-1-0")
    assert len(told.said(StartTrial)) == starts, policy
    assert [len(t.trial_ids) for t in told.said(Train)] == [trained]
    assert [d.reason for d in told.said(DropGroup)] == dropped


def test_a_group_waits_for_its_siblings_before_its_survivors_are_trained():
    """G59: the fourth result; with one lost and two valid nothing is decided while one runs."""
    settings = settings_of()
    events: list[Any] = [Opened(version=0), WeightsApplied(version=0)]
    ends = [
        TrialEnded(
            trial_id=f"train-0-{i}-0", kind=kind, valid=kind == "solved",
            reward=float(i) if kind == "solved" else None, version_min=0, version_max=0,
        )
        for i, kind in enumerate(["solved", "system_error", "solved", "solved"])
    ]  # fmt: skip
    _, actions = schedule.replay(settings, [*events, *ends])
    assert actions[2:5] == [(), (), ()]
    assert actions[5] == (
        Train(
            version=0, group_ids=(0,), trial_ids=("train-0-0-0", "train-0-2-0", "train-0-3-0"), min_version=0
        ),
    )


def test_weights_reach_the_engine_before_the_first_trial_after_a_start_and_a_resume():
    """G63, slime 1695."""
    for version in (0, 2):
        told = drive(settings_of(steps=3), version=version)
        assert told.actions[0] == SyncWeights(version=version)
        assert told.said(StartTrial)[0].policy_version == version
        assert told.states[0].running == {} and told.events[1] == WeightsApplied(version=version)


def test_the_evaluation_of_the_last_version_is_done_before_the_end():
    """G64, prime-rl 2912: three steps, evaluation at 3; G65, prime-rl 3385: it ran on the version of its label."""
    told = drive(settings_of(steps=3, evaluate_at=(3,)))
    assert told.actions[-2:] == [EvaluationEnded(version=3), Finished(reason="all steps trained")]
    ran = [e for e in told.events if isinstance(e, TrialEnded) and e.trial_id.startswith("eval")]
    assert len(ran) == 2 and {(e.version_min, e.version_max) for e in ran} == {(3, 3)}
    asked = [a for a in told.actions if isinstance(a, SyncWeights) or getattr(a, "purpose", "") == "eval"]
    assert [type(a) for a in asked[-3:]] == [SyncWeights, StartTrial, StartTrial] and asked[-3].version == 3


def test_three_attempts_are_three_trials():
    """G68, OpenEnv 1072: the schedule alone tries again, so attempts do not multiply."""
    told = drive(
        settings_of(max_retries=2), fails=lambda s: (s.group_id, s.sample) == (0, 1) and s.purpose == "train"
    )
    attempts = [s.attempt for s in told.said(StartTrial) if (s.group_id, s.sample) == (0, 1)]
    assert attempts == [0, 1, 2]


def test_no_more_trials_are_starting_than_may_run():
    """G69, uni-agent 47: two places, five trials; what starts counts as running."""
    told = drive(settings_of(max_running=2, group_size=5))
    assert len(told.said(StartTrial)) == 5 and max(len(state.running) for state in told.states) == 2


def test_epoch_and_place_follow_from_the_step_after_a_resume():
    """G71, SkyRL 589: step 7 of three steps an epoch is batch 1 of epoch 2."""
    for seed in range(8):  # one seed alone could agree by chance
        settings = settings_of(steps=9, task_count=3, seed=seed)
        drawn = [s.task for s in drive(settings, version=7).said(StartTrial) if s.sample == 0]
        assert drawn == list(permutation(3, seed, 2)[1:]) == [task_at(settings, 7), task_at(settings, 8)]


def test_a_dropped_group_is_replaced_by_the_next_task_and_none_is_drawn_twice():
    """Six tasks: 0 and 1 are trained, 2 is dropped; 3, 4 and 5 come next."""
    settings = settings_of(
        batch_groups=2, group_size=2, steps=3, max_zero_variance=1, max_staleness=1, max_running=6
    )

    def end(group: int, *rewards: float) -> list[Any]:
        return [
            TrialEnded(
                trial_id=f"train-{group}-{i}-0", kind="solved", valid=True, reward=reward, version_min=0,
                version_max=0,
            )
            for i, reward in enumerate(rewards)
        ]  # fmt: skip

    events = [Opened(version=0), WeightsApplied(version=0), *end(2, 1, 1), *end(0, 0, 1), *end(1, 0, 1)]
    state, actions = schedule.replay(settings, [*events, StepTrained(version=1), WeightsApplied(version=1)])
    told = [action for step in actions for action in step]
    assert [t.group_ids for t in told if isinstance(t, Train)] == [(0, 1)] and state.trained == 1
    tasks = [s.task for s in told if isinstance(s, StartTrial) and s.sample == 0]
    assert tasks == [task_at(settings, i) for i in range(6)] and sorted(tasks) == list(range(6))


def test_a_step_is_counted_in_prompts_however_many_rows_they_have():
    """G9, SkyRL 1529: prompts a, b, c, d with 3, 2, 2 and 4 rows, two prompts a step."""
    told = drive(settings_of(steps=2, batch_groups=2, group_size=2))
    rows = {0: (2, 1), 1: (1, 1), 2: (1, 1), 3: (2, 2)}
    counts = []
    for train in told.said(Train):
        results = [
            trial_of(name, group, float(sample), rows[group][sample])
            for name in train.trial_ids
            for group, sample in [tuple(int(part) for part in name.split("-")[1:3])]
        ]
        counts.append(len(step_rows(results, GROUP_MEAN)))
    assert counts == [5, 6]


# The loop with a fleet, an engine and a trainer that note what is asked of them


Log = list[tuple[str, Any]]


@dataclass
class NotingFleet:
    """Trials end at the next look, in the order in which they began; of each group every second one passes."""

    log: Log
    fails: Callable[[str], bool]
    rewards: Sequence[float]
    ended: list[dict[str, Any]] = field(default_factory=list)

    def start(self, spec: dict[str, Any]) -> None:
        name = spec["trial_id"]
        self.log.append(("start", name))
        reward = self.rewards[int(name.split("-")[2]) % len(self.rewards)]
        version = [number for what, number in self.log if what == "weights"][-1]
        told = trial_of(name, 0, reward, 1, version)
        told["outcome"] = {"kind": "solved"}
        if self.fails(name):
            told = {
                "trial_id": name,
                "outcome": {"kind": "system_error", "phase": "process", "cause": "exit 3"},
            }
        self.ended.append(told)

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        found, self.ended = self.ended, []
        return found

    def cancel(self, trial_id: str) -> None:
        raise AssertionError(f"nothing has to be cancelled here, got {trial_id}")


@dataclass
class NotingTrainer:
    """A step is done at the next look."""

    log: Log
    version: int = 0
    done: bool = False

    @property
    def weights_path(self) -> str:
        return f"weights-{self.version}"

    def start_step(self, rows: Sequence[Any], *, version: int) -> None:
        self.log.append(("step", [row.trial_id for row in rows]))
        self.version, self.done = version + 1, True

    def poll(self, timeout_s: float) -> StepMetrics | None:
        if not self.done:
            return None
        self.done = False
        return StepMetrics(
            policy_version=self.version, loss=0.0, grad_norm=0.0, rows=0, trained_tokens=0, forward_tokens=0,
            masked_share=0.0, unusable=0, mismatch=0.0, entropy=0.0, seconds=0.0, cpu_s=0.0, weights_path="",
        )  # fmt: skip


class NotingEngine:
    """Lives for ever, and takes any weights at once."""

    address = "nowhere"

    def __init__(self, log: Log) -> None:
        self.log = log

    def fault(self, timeout_s: float) -> str:
        return ""

    def update_weights(self, version: int, weights: str, *, reset_kv: bool) -> None:
        assert weights == f"weights-{version}"
        self.log.append(("weights", version))

    def restart(self) -> None: ...
    def close(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


class NotingObserver:
    """Keeps whether the reward of each trial counted."""

    def __init__(self) -> None:
        self.valid: list[bool] = []

    def trial(self, action: StartTrial, result: dict[str, Any], *, valid: bool) -> None:
        self.valid.append(valid)

    def dropped(self, action: DropGroup) -> None: ...
    def step(self, action: Train, results: Any, metrics: StepMetrics, **of_time: Any) -> None: ...
    def evaluation(self, version: int, trials: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self) -> None: ...


def loop_of(
    folder: Path,
    settings: Settings,
    *,
    fails: Callable[[str], bool] = lambda name: False,
    rewards: Sequence[float] = (0.0, 1.0),
) -> tuple[str, Log, list[bool]]:
    """How the live loop ended, what it asked for, and which trials counted."""
    log: Log = []
    observer = NotingObserver()
    router = Router([NotingEngine(log)], hold=folder / "held", rule=RestartRule())
    crew: Any = {"fleet": NotingFleet(log, fails, rewards), "engine": router, "trainer": NotingTrainer(log)}
    journal = Journal(folder / "events.jsonl", tags={}, settings=settings)
    with closing(router), closing(journal):
        loop = Loop(
            settings, crew=Crew(**crew), name="run", spec=lambda action, name: {"trial_id": name},
            advantage=GROUP_MEAN, journal=journal, observer=observer,
        )  # fmt: skip
        reason = loop.run()
    assert not loop.started and not loop.results and not loop.pending
    return reason, log, observer.valid


def test_the_live_loop_goes_on_after_one_trial_in_a_hundred_failed(tmp_path):
    """G58, and G60 for what the failed one counts: nothing."""
    reason, log, valid = loop_of(
        tmp_path, settings_of(batch_groups=25), fails=lambda name: name == "run/train-9-3-0"
    )
    assert reason == "all steps trained"
    assert len(valid) == 100 and valid.count(False) == 1
    (step,) = [rows for what, rows in log if what == "step"]
    assert len(step) == 99 and "run/train-9-3-0#0" not in step


def test_the_live_loop_sends_weights_first_and_every_version_once(tmp_path):
    """G63, slime 1695; G73, rLLM 291: no step without its weights."""
    _, log, _ = loop_of(tmp_path, settings_of(steps=3))
    assert log[0] == ("weights", 0) and log[1][0] == "start"
    assert [version for what, version in log if what == "weights"] == [0, 1, 2, 3]
    assert [what for what, _ in log if what in ("step", "weights")] == ["weights", *["step", "weights"] * 3]


def test_a_step_without_a_difference_in_reward_is_empty_and_still_counts(tmp_path):
    """G52, prime-rl 1596: all trials failed, so the trainer gets no row, and the run comes to its end."""
    reason, log, valid = loop_of(tmp_path, settings_of(steps=2), rewards=(0.0,))
    assert reason == "all steps trained" and all(valid)
    assert [rows for what, rows in log if what == "step"] == [[], []]
