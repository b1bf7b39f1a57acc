"""Breaks core on purpose, one line at a time, and asks whether a law goes red.

Run by hand: `python tests/mutants.py [part of a file name]`. Each mutant is a copy of core and tests with one text
replaced; the laws of that file must fail on it. A mutant that survives names a law that is too weak.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MUTANTS = [
    # file, old text, new text, laws that must notice
    ("ledger.py", "return bool(self.policy_version)", "return True", "ledger"),
    ("ledger.py", "or (0.0,) * len(span)", "or (float('nan'),) * len(span)", "ledger"),
    ("ledger.py", "or (NOT_SAMPLED,) * len(span)", "or (0,) * len(span)", "ledger"),
    ("ledger.py", "self.rollout_logprob[start:end], ", "self.rollout_logprob, ", "ledger"),
    ("ledger.py", "min(max(at - start, 0), len(span))", "len(span) if at > start else 0", "ledger"),
    ("ledger.py", "self._value == other._value", "self.token_ids == other.token_ids", "ledger"),
    ("ledger.py", "if ids and min(ids) < 0:", "if False:", "ledger"),
    ("tito.py", "if row.finish_reason not in (\"\", \"abort\"):", "if False:", "tito"),
    ("tito.py", "_grown(row, sampled(token_ids, logprob, policy_version), finish_reason)", "_grown(row, given(token_ids), finish_reason)", "tito"),
    ("tito.py", "_grown(row, given(token_ids), \"stop\")", "_grown(row, sampled(token_ids, [0.0] * len(token_ids), [0] * len(token_ids)), \"stop\")", "tito"),
    ("tito.py", "return full[len(prefix) - len(gap) :]", "return full[len(prefix) :]", "tito"),
    ("tito.py", "return full[len(prefix) + 1 :]", "return full[len(prefix) :]", "tito"),
    ("tito.py", "or full[: len(prefix)] != prefix", "", "tito"),
    ("tito.py", "if last_token not in stop_ids or", "if", "tito"),
    ("tito.py", "if len(found) == 1 else None", "if found else None", "tito"),
    ("tito.py", "if row.finish_reason != \"stop\":", "if False:", "tito"),
    ("tito.py", "last.finish_reason == \"stop\" and ", "", "tito"),
    ("tito.py", "for earlier in rows[:index]", "for earlier in rows[index - 1 : index]", "tito"),
    ("tito.py", "prompt = tuple(given(span.token_ids) for span in past)", "prompt = past", "tito"),
    ("tito.py", "ours = zip(row.token_ids, row.rollout_logprob, row.policy_version)", "ours = zip(row.token_ids, other.rollout_logprob, other.policy_version)", "tito"),
    ("tito.py", "(*row.spans, span) if len(span) else row.spans", "(given(row.token_ids), span)", "tito"),
    ("tito.py", "Ledger(spans=head, finish_reason=\"length\")", "Ledger(spans=head, finish_reason=row.finish_reason)", "tito"),
    ("tito.py", "and runs and runs[-1][1] == start", "and runs", "tito"),
    ("tito.py", "if not math.isfinite(value):", "if math.isnan(value):", "tito"),
    ("mask.py", "(row_id.roll(-1) == row_id) & ", "", "mask"),
    ("mask.py", " & (position < len(row_id) - 1)", "", "mask"),
    ("mask.py", "value.roll(-1), torch", "value, torch", "mask"),
    ("mask.py", "policy_version >= 0", "policy_version > 0", "mask"),
    ("mask.py", "(index >= 0) & ", "", "mask"),
    ("mask.py", "loss_mask & table", "loss_mask | table", "mask"),
    ("mask.py", "index = row_index.long()", "index = row_index", "mask"),
    ("advantage.py", "counted = valid & reward.isfinite()", "counted = valid", "advantage"),
    ("advantage.py", "counted & (group.size >= 2) & (group.spread > tolerance)", "(group.size >= 2) & (group.spread > tolerance)", "advantage"),
    ("advantage.py", "(group.spread > tolerance)\n\n", "(group.spread >= tolerance)\n\n", "advantage"),
    ("advantage.py", "group.deviation(lost=1)", "group.deviation(lost=0)", "advantage"),
    ("advantage.py", "batch, _ = _group(reward, valid, torch.zeros_like(group_id), tolerance)", "batch = group", "advantage"),
    ("advantage.py", "* group.size / (group.size - 1).clamp(min=1)", "", "advantage"),
    ("advantage.py", "has_signal & (group.mean > rounding)", "has_signal & (group.mean > 0)", "advantage"),
    ("advantage.py", "has_signal & (group.mean > rounding)", "has_signal", "advantage"),
    ("advantage.py", "(group.size >= 2) & ~(group", "~(group", "advantage"),
    ("advantage.py", "loss_mask & (group.size == 1), group.mean", "group.size == 1, group.mean", "advantage"),
    ("advantage.py", "group.deviation(lost=0) + epsilon", "group.deviation(lost=1) + epsilon", "advantage"),
    ("advantage.py", "known = (rollout_index >= 0) & ", "known = ", "advantage"),
    ("advantage.py", "rollouts)], torch.nan)", "rollouts)], 0.0)", "advantage"),
    ("surrogate.py", "score = torch.where(trained, token.logprob, 0.0)", "score = token.logprob * trained", "loss"),
    ("surrogate.py", " & ~log_ratio.exp().isinf()", "", "loss"),
    ("surrogate.py", " & ~log_ratio.isinf()", "", "loss"),
    ("surrogate.py", " & ~log_ratio.isinf()", "", "loss_old"),
    ("surrogate.py", "usable = sampled & ~log_ratio.isinf() & ~log_ratio.exp().isinf()", "usable = sampled & log_ratio.isfinite() & ~log_ratio.exp().isinf()", "loss"),
    ("surrogate.py", "    check_float(**others)\n", "", "arguments"),
    ("surrogate.py", "sampled = loss_mask & anchor.isfinite()", "sampled = loss_mask", "loss"),
    ("surrogate.py", "logprob.detach().to(dtype) - anchor", "logprob.to(dtype) - anchor", "loss"),
    ("loss.py", "too_high = (token.advantage > 0) & (moved > delta_high)", "too_high = moved > delta_high", "loss"),
    ("loss.py", "too_low = (token.advantage < 0) & (-moved > delta_low)", "too_low = (token.advantage < 0) & (-moved > delta_high)", "loss"),
    ("loss.py", "(log_pi > log_mu) & ", "", "loss"),
    ("loss.py", "log_mu.exp() * (log_mu - log_pi)", "log_pi.exp() * (log_pi - log_mu)", "loss"),
    ("loss.py", ".clamp(max=ceiling), token", ", token", "loss"),
    ("loss.py", "(token.ratio <= min_ratio)", "(token.ratio < min_ratio)", "loss"),
    ("loss.py", "(token.ratio >= max_ratio)", "(token.ratio > max_ratio)", "loss"),
    ("loss.py", "weight = token.ratio.clamp(min_ratio, max_ratio)", "weight = token.ratio.clamp(1 - min_ratio, 1 + max_ratio)", "loss"),
    ("surrogate.py", "slope = -torch.where", "slope = torch.where", "loss"),
    ("surrogate.py", "torch.promote_types(logprob.dtype, torch.float32)", "logprob.dtype", "loss"),
    ("surrogate.py", "unusable=token.loss_mask & ~token.usable", "unusable=~token.usable", "loss"),
    ("surrogate.py", "& ~token.advantage.isnan()", "", "surrogate"),
    ("loss_old.py", "(advantage > 0) & (ratio > 1 + epsilon_high)", "(advantage > 0) & (ratio >= 1 + epsilon_high)", "loss_old"),
    ("loss_old.py", "(advantage < 0) & (ratio < 1 - epsilon_low)", "ratio < 1 - epsilon_low", "loss_old"),
    ("loss_old.py", "token.ratio > dual_clip", "token.ratio >= dual_clip", "loss_old"),
    ("loss_old.py", "_, known = detached_log_ratio(logprob, rollout_logprob, known)\n", "\n", "loss_old"),
    ("loss_old.py", "per_segment(token.usable, row)", "per_segment(token.loss_mask, row)", "loss_old"),
    ("loss_old.py", "x.sigmoid() * (-x).sigmoid()", "x.sigmoid() * (1 - x.sigmoid())", "loss_old"),
    ("importance.py", "ratio >= min_weight) & (ratio <= max_weight)", "ratio > min_weight) & (ratio < max_weight)", "importance"),
    ("importance.py", "total / count.clamp(min=1)", "total", "importance"),
    ("importance.py", "loss_mask & old_logprob.isfinite()", "loss_mask", "importance"),
    ("importance.py", "torch.where(trained, importance_weight.detach(), 1.0)", "importance_weight.detach()", "importance"),
    ("kl.py", "log_weight.exp() * d.detach()", "log_weight.exp()", "kl"),
    ("kl.py", "value.isinf() | slope.isinf()", "value.isinf()", "kl"),
    ("kl.py", "value.isinf() | slope.isinf()", "slope.isinf()", "kl"),
    ("kl.py", " & ~logprob.isinf()", "", "kl"),
    ("kl.py", "torch.expm1(-log_ratio.detach()).isinf()", "torch.zeros_like(log_ratio, dtype=torch.bool)", "kl"),
    ("centering.py", "- share * p", "- p", "centering"),
    ("centering.py", "clamp(min=_SMALLEST_TAIL)", "clamp(min=0)", "centering"),
    ("centering.py", "torch.where(coefficient == 0, 0.0, log_p)", "log_p", "centering"),
    ("centering.py", "torch.finfo(dtype).min", "-torch.inf", "centering"),
    ("aggregate.py", "_live(loss_mask, row).sum() * per_segment(loss_mask, row), loss_mask", "_live(torch.ones_like(loss_mask), row).sum() * per_segment(loss_mask, row), loss_mask", "aggregate"),
    ("aggregate.py", "_live(loss_mask, group).sum() * per_segment", "_live(loss_mask, dense(row_id)).sum() * per_segment", "aggregate"),
    ("aggregate.py", "return segment_sum(loss_mask, place) > 0", "return segment_sum(torch.ones_like(loss_mask), place) > 0", "aggregate"),
    ("aggregate.py", "segment_sum(_live(loss_mask, row), group_of_row)", "segment_sum(loss_mask, group)", "aggregate"),
    ("aggregate.py", "segment_sum(_live(loss_mask, row), group_of_row)", "segment_sum(_live(loss_mask, row), row)", "aggregate"),
    ("aggregate.py", "torch.where(loss_mask, group, 0)", "group", "aggregate"),
    ("aggregate.py", "strays = loss_mask & ", "strays = ", "aggregate"),
    ("aggregate.py", " and strays.any():", " and False:", "aggregate"),
    ("aggregate.py", "torch.where(loss_mask, live.reciprocal(), 0.0)", "live.reciprocal()", "aggregate"),
    ("aggregate.py", "loss_mask.sum(), loss_mask", "torch.tensor(len(loss_mask)), loss_mask", "aggregate"),
    ("aggregate.py", ".to(torch.promote_types(dtype, torch.float32))", ".to(dtype)", "aggregate"),
    ("segment.py", "ids.argsort(stable=True)", "torch.arange(len(ids))", "segment"),
    ("segment.py", "changed.cumsum(0)", "(~changed).cumsum(0)", "segment"),
    ("segment.py", "if floats else torch.int64", "if floats else value.dtype", "segment"),
    ("segment.py", "order = value.argsort()", "order = torch.arange(len(value))", "segment"),
    ("segment.py", ".clamp(lowest, highest)", "", "segment"),
    ("segment.py", "(self.size - lost)", "(self.size)", "segment"),
    ("segment.py", "unit = centred / torch.where(spread == 0, 1.0, spread)", "unit, spread = centred, torch.ones_like(spread)", "segment"),
    ("vote.py", "same_reward & same_group", "same_reward", "vote"),
    ("vote.py", "vote = present & agreed", "vote = agreed", "vote"),
    ("vote.py", "torch.where(valid & reward.isfinite(), reward", "torch.where(valid, reward", "vote"),
    ("vote.py", " and not same.all():", " and False:", "vote"),
    ("length.py", "passed.clamp(min=1)", "passed", "length"),
    ("length.py", "per_segment(solved & counted, place)", "per_segment(solved, place)", "length"),
    ("length.py", "valid & reward.isfinite()", "valid", "length"),
    ("length.py", ".clamp(-1.0, 0.0)", ".clamp(-1.0, 1.0)", "length"),
    ("staleness.py", "(max_staleness + version + 1)", "(max_staleness + version)", "staleness"),
    ("staleness.py", "- accepted - running\n", "- accepted\n", "staleness"),
    ("staleness.py", "return age <= max_staleness", "return age < max_staleness", "staleness"),
    ("staleness.py", "oldest = min(", "oldest = max(", "staleness"),
    ("staleness.py", "if v >= 0), default", "), default", "staleness"),
    ("pack.py", "if lengths[index] <= free", "if lengths[index] <= free + 1", "pack"),
    ("pack.py", "key=lambda i: (-lengths[i], i)", "key=lambda i: i", "pack"),
    ("pack.py", "return -count % ranks", "return ranks - count % ranks", "pack"),
    ("pack.py", "if len(hands[r]) < places", "", "pack"),
    ("pack.py", "length * length for", "length for", "pack"),
    ("pack.py", "load[rank] += costs[index]", "load[rank] += 0", "pack"),
    ("budget.py", "min(cap, window - used)", "min(cap, window)", "budget"),
    ("budget.py", "not already_nudged and ", "", "budget"),
    ("budget.py", "limit * 2 // 3", "limit // 2", "budget"),
    ("budget.py", "len(text) - tail", "-tail", "budget"),
    ("outcome.py", "system_errors / trials > max_rate", "system_errors > max_rate * trials", "outcome"),
    ("budget.py", "left / window <= ratio", "left <= ratio * window", "budget"),
    ("student.py", "if degrees > _MANY:", "if False:", "student"),
    ("student.py", "(square + 3)", "square", "student"),
    ("mask.py", "limits.min <= fill <= limits.max", "limits.min <= fill", "mask"),
    ("outcome.py", "if size - lost < min_valid:", "if False:", "outcome"),
    ("outcome.py", "owner in found and found[owner] != value", "found.get(owner) and found[owner] != value", "outcome"),
    ("estimate.py", "math.comb(trials - passed, k)", "math.comb(passed, k)", "estimate"),
    ("comparison.py", "total = square[0] + square[1] - square[2]", "total = square[2]", "comparison"),
    ("comparison.py", "so_far = max(so_far, ", "so_far = max(0.0, ", "comparison"),
    ("logprob.py", "gradient.T, hidden[part], fresh=start == 0", "gradient.T, hidden[part], fresh=True", "logprob"),
    ("logprob.py", "weight = grads[0][part] / ctx.temperature", "weight = grads[0][part]", "logprob"),
    ("mismatch.py", "torch.expm1(d) - d", "torch.expm1(-d) + d", "mismatch"),
    ("mismatch.py", "torch.where(usable, term, 0.0).sum()", "term.sum()", "mismatch"),
    ("mismatch.py", "gap.absolute < bound", "gap.absolute <= bound", "mismatch"),
    ("mismatch.py", "torch.where(present, index, -1)", "index", "mismatch"),
    ("mismatch.py", "loss_mask & logprob.isfinite()", "loss_mask", "mismatch"),
    ("drift.py", "len(points) - len(stretches) - 1", "len(points) - 2", "drift"),
    ("drift.py", "key=lambda x: weights[x]", "key=lambda x: 0", "drift"),
    ("drift.py", "slope > min_slope and p_value < level", "p_value < level", "drift"),
    ("rescore.py", "min_share * whole * used.sum(1)", "0 * used.sum(1)", "rescore"),
    ("rescore.py", "direction.abs().gather(1, order)", "torch.ones_like(ordered)", "rescore"),
    ("footprint.py", "lift = row * far", "lift = row * 0", "footprint"),
    ("footprint.py", "policy_version > policy_version[earlier]", "policy_version != policy_version[earlier]", "footprint"),
    ("footprint.py", "MIXED_COST * marks.mixed_count * cached", "MIXED_COST * cached", "footprint"),
    ("locate.py", "possible = (difference < 0) & ", "possible = ", "attribution"),
    ("locate.py", "_explain(search, left, level * noise)", "_explain(search, left, noise)", "attribution"),
    ("attribution.py", "cause[back]", "cause", "attribution"),
    ("attribution.py", " & (causes != TEMPERATURE)[:, None]", "", "attribution"),
    ("locate.py", "known = fact.loss_mask & fact.entropy.isfinite() & ", "known = fact.loss_mask & ", "attribution"),
    ("schedule/admission.py", "_room(settings, state) - len(state.running)", "1 + _room(settings, state) - len(state.running)", "schedule"),
    ("schedule/admission.py", "settings.max_running if state.max_running is None else state.max_running", "settings.max_running", "schedule"),
    ("schedule/admission.py", "caught_up = state.applied >= state.caught_up_at", "caught_up = True", "schedule"),
    ("schedule/admission.py", "+ len(state.training) + ready", "+ ready", "schedule"),
    ("schedule/admission.py", "version=state.applied,", "version=state.trained,", "schedule"),
    ("schedule/admission.py", "return max(0, min(by_staleness, needed))", "return by_staleness", "schedule"),
    ("schedule/admission.py", "if state.ending or state.applied is None", "if state.applied is None", "schedule"),
    ("schedule/admission.py", "(g.purpose == \"train\", g.group_id, i)", "(False, g.group_id, i)", "schedule"),
    ("schedule/order.py", "next_version - settings.max_staleness)", "next_version - settings.max_staleness - 1)", "schedule"),
    ("schedule/order.py", "state.trained + len(state.redo) + bool(state.training)", "state.trained + len(state.redo)", "schedule"),
    ("schedule/order.py", "return _late(settings, state, left) <= _late_allowed(settings)", "return True", "schedule"),
    ("schedule/order.py", "if g.ready and g.newest < min_version", "if False", "schedule"),
    ("schedule/order.py", "g.ready and g.newest < min_version", "g.ready and g.oldest < min_version", "schedule"),
    ("schedule/order.py", "0 if settings.late_group == \"train\" else max(0, state.trained - settings.max_staleness)", "0", "schedule"),
    ("schedule/order.py", "key=lambda g: g.ready)", "key=lambda g: -g.ready)", "schedule"),
    ("schedule/order.py", "state.trained < settings.in_order_steps", "False", "schedule"),
    ("schedule/order.py", "or state.saving or state.syncing", "or state.syncing", "schedule"),
    ("schedule/order.py", "if settings.save_every else ()", "if False else ()", "schedule"),
    ("schedule/report.py", "kept = (*state.saved, version)[-2:]", "kept = (version,)", "schedule"),
    ("schedule/report.py", "redo=(*again, *state.redo)", "redo=again", "schedule"),
    ("schedule/report.py", "groups=train,", "groups=state.groups,", "schedule"),
    ("schedule/report.py", "requeued=(*tasks, *state.requeued)", "requeued=state.requeued", "schedule"),
    ("schedule/report.py", "or g.ready}", "}", "schedule"),
    ("staleness.py", "version >= min_version", "version > min_version", "staleness"),
    ("schedule/reducer.py", "train, drop_stale, fill", "train, fill", "schedule"),
    ("schedule/reducer.py", "in (drop_stale, end", "in (end", "schedule"),
    ("schedule/order.py", "in_time += in_time < (", "in_time += in_time <= (", "schedule"),
    ("schedule/order.py", "math.inf if settings.max_late is None else settings.max_late", "math.inf", "schedule"),
    ("schedule/order.py", "math.inf if settings.max_late is None else settings.max_late", "0", "schedule"),
    ("schedule/order.py", "(deadline - state.trained) * settings.batch_groups", "(deadline - state.trained + 1) * settings.batch_groups", "schedule"),
    ("schedule/admission.py", "min(wanted, capacity)", "capacity", "schedule"),
    ("schedule/admission.py", "requeued=state.requeued[count:]", "requeued=state.requeued", "schedule"),
    ("schedule/report.py", "errors / window <= settings.max_error_share", "errors <= settings.max_error_share * window", "schedule"),
    ("schedule/report.py", "len(state.recent) < window or ", "", "schedule"),
    ("schedule/report.py", "event.kind == \"cancelled\" or event.blameless", "event.blameless", "schedule"),
    ("schedule/report.py", "event.kind == \"cancelled\" or event.blameless", "event.kind == \"cancelled\"", "schedule"),
    ("schedule/report.py", "sample.errors + (not event.blameless)", "sample.errors + 1", "schedule"),
    ("schedule/report.py", "recent=() if state.ending else state.recent", "recent=state.recent", "schedule"),
    ("schedule/report.py", "recent=() if state.ending else state.recent", "recent=()", "schedule"),
    ("schedule/order.py", "key=lambda g: (g.born, g.group_id)", "key=lambda g: -g.group_id", "schedule"),
    ("schedule/report.py", "errors <= settings.max_retries", "True", "schedule"),
    ("schedule/report.py", "state.zero_variance < settings.max_zero_variance", "True", "schedule"),
    ("schedule/report.py", "version=oldest, newest", "version=sample.version, newest", "schedule"),
    ("schedule/report.py", "if event.trial_id not in state.running:", "if False:", "schedule"),
    ("schedule/evaluation.py", "kept = {k: g for k, g in state.groups.items() if g.purpose == \"train\"}", "kept = state.groups", "schedule"),
    ("schedule/reducer.py", "or state.evaluating is not None or state.ending", "or state.ending", "schedule"),
    ("schedule/reducer.py", "or state.running or", "or", "schedule"),
]  # fmt: skip


def survives(file: str, old: str, new: str, laws: str) -> bool:
    """Whether the laws stay green although core is broken."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for folder in ("core", "tests"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
        shutil.copy(ROOT / "setup.cfg", copy)
        target = copy / "core" / file
        text = target.read_text()
        if old not in text:
            raise ValueError(f"{file} must contain the text to break, got none of {old!r}")
        target.write_text(text.replace(old, new))
        run = [sys.executable, "-m", "pytest", "-x", "-q", f"tests/property/test_{laws}.py"]
        environment = {**os.environ, "CI": "1", "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        return subprocess.run(run, cwd=copy, env=environment, capture_output=True).returncode == 0


def main(part: str) -> int:
    """Print one line a mutant; the number of survivors."""
    if not any(part in file for file, *_ in MUTANTS):
        raise SystemExit(f"part must occur in the name of a file of core, got {part!r}")
    survivors = 0
    for file, old, new, laws in MUTANTS:
        if part in file:
            alive = survives(file, old, new, laws)
            survivors += alive
            print("SURVIVES" if alive else "caught  ", file.ljust(22), old.split("\n")[0][:70], flush=True)
    print(f"{survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1] if len(sys.argv) > 1 else "")))
