"""Rows scored again: as the trainer sees them, under each token's own version, and on what older weights left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.aggregate import token_mean_weight
from core.loss import importance_weighted_policy_gradient
from system.engine.cached import CachedModel
from system.model import Qwen3
from system.policy import load_policy, save_weights
from system.trainer.rescoring import Rescorer, Segment, segments
from system.trainer.step import OptimizerSettings, StepRow
from system.trainer.torch_trainer import TorchTrainer

CLERK = Path(__file__).resolve().parent.parent / "policies" / "clerk"


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Three versions of the policy that differ enough to be told apart."""
    folder = tmp_path_factory.mktemp("versions")
    config, state = load_policy(CLERK)
    generator = torch.Generator().manual_seed(0)
    files, states = {}, {}
    for version in range(3):
        states[version] = {
            name: value + 0.02 * version * value.std() * torch.randn(value.shape, generator=generator)
            if value.ndim > 1
            else value
            for name, value in state.items()
        }
        files[version] = folder / f"{version}.safetensors"
        save_weights(files[version], states[version])
    return config, files, states


def row(policy_version: list[int], seed: int = 1) -> StepRow:
    count = len(policy_version)
    ids = torch.randint(0, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return StepRow(
        row_id="r",
        trial_id="t",
        group_id=0,
        token_ids=ids,
        loss_mask=[v >= 0 and t > 0 for t, v in enumerate(policy_version)],
        rollout_logprob=[0.0] * count,
        policy_version=policy_version,
        advantage=1.0,
    )


MIXED = [-1] * 6 + [0] * 4 + [1] * 3 + [-1] * 5 + [1] * 2 + [2] * 4


def test_a_token_is_read_by_the_weights_that_sample_the_next():
    assert segments([-1, -1, 3, 4, -1], latest=5) == [Segment(0, 2, 3), Segment(2, 3, 4), Segment(3, 5, 5)]
    assert segments([-1, 2, -1, -1, 2], latest=2) == [Segment(0, 5, 2)]
    parts = segments(MIXED, latest=2)
    assert [p.start for p in parts[1:]] == [p.end for p in parts[:-1]] and parts[-1].end == len(MIXED)


def test_one_version_is_what_the_trainer_computes(versions):
    config, files, states = versions
    rows = [row(MIXED), row([-1, 1, 1, -1, 0, 0, 2], seed=2)]
    trainer = TorchTrainer(
        Qwen3.from_state(config, states[1]),
        weight_function=token_mean_weight,
        loss_function=importance_weighted_policy_gradient,
        optimizer=OptimizerSettings(
            learning_rate=1e-3, beta1=0.9, beta2=0.98, epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0
        ),
        token_budget=64,
        temperature=0.7,
    )
    told = Rescorer(config, files, temperature=0.7).score(rows, version=1)
    for ours, theirs, one in zip(told, trainer.logprob(rows), rows, strict=True):
        mask = torch.tensor(one.loss_mask)
        torch.testing.assert_close(ours.logprob[mask], torch.tensor(theirs)[mask], rtol=0, atol=2e-5)


def test_as_sampled_is_what_an_engine_computes_that_keeps_old_keys_and_values(versions):
    """Decoded one token at a time; the weights change in between and the cache stays."""
    config, files, states = versions
    one = row(MIXED)
    engine = CachedModel(config, states[0], max_context=64, slots=1)
    loaded, cached, expected = 0, 0, {}
    for t, version in enumerate(one.policy_version):
        if version < 0:
            continue
        if version != loaded:
            engine.load(states[version])
            loaded = version
        logits = engine.prefill([one.token_ids[cached:t]], [0], [cached])[0]
        expected[t] = torch.log_softmax(logits / 0.9, -1)[one.token_ids[t]].item()
        cached = t
    rescorer = Rescorer(config, files, temperature=0.9)
    told = rescorer.score_as_sampled([one], latest=2)[0].logprob
    fresh = rescorer.score_by_own_version([one], latest=2)[0].logprob
    places = list(expected)
    torch.testing.assert_close(told[places], torch.tensor([*expected.values()]), rtol=0, atol=5e-5)
    late = [t for t in places if t > 10]
    assert (fresh[late] - told[late]).abs().max() > 1e-3, "old keys and values matter"


def test_by_own_version_takes_each_token_from_its_own_weights(versions):
    config, files, _ = versions
    rescorer = Rescorer(config, files, temperature=1.0)
    one = row(MIXED)
    own = rescorer.score_by_own_version([one], latest=2)[0]
    for version in range(3):
        alone = rescorer.score([one], version=version)[0]
        at = [t for t, v in enumerate(one.policy_version) if v == version]
        torch.testing.assert_close(own.logprob[at], alone.logprob[at], rtol=0, atol=0)
        torch.testing.assert_close(own.entropy[at], alone.entropy[at], rtol=0, atol=0)


def test_a_version_that_was_not_kept_is_named(versions):
    config, files, _ = versions
    with pytest.raises(ValueError, match="weights of version 7 must be kept to score again, got 0 to 2"):
        Rescorer(config, files, temperature=1.0).score([row(MIXED)], version=7)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        Rescorer(config, files, temperature=0.0)
