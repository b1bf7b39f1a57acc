"""Runs in vLLM's environment: a small mixture of experts with a tied head, updated with and without each repair.

    python tests/vllm/repairs.py FOLDER

Prints one JSON line: the mean gap of logprobs to transformers' before an update, after one without a repair, after one
with all. The engine is in this process, so that a single start is enough.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
os.environ |= {"VLLM_PLUGINS": "none", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, RequestOutput, SamplingParams

from system.engine.vllm import inside, receiving

VOCABULARY, ROWS, LENGTH = 96, 6, 12


def made(folder: Path, seed: int) -> Qwen3MoeForCausalLM:
    """A model of random weights, and its folder."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # pyright: ignore[reportCallIssue] (declared, but a decorator hides it)
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        initializer_range=0.15,
        max_position_embeddings=256,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def places(told: RequestOutput) -> list[Any]:
    """The logprobs at each token of a prompt but the first."""
    assert told.prompt_logprobs is not None
    return list(told.prompt_logprobs)[1:]


def gap(llm: LLM, model: Qwen3MoeForCausalLM) -> float:
    """Mean gap of the logprobs of some rows of tokens, under the engine and under transformers."""
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    told = llm.generate([{"prompt_token_ids": row.tolist()} for row in rows], asked, use_tqdm=False)
    with torch.no_grad():
        expected = model(rows).logits.log_softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None])[..., 0]
    found = [
        [place[token].logprob for place, token in zip(places(one), row.tolist()[1:])]
        for one, row in zip(told, rows)
    ]
    return (expected - torch.tensor(found)).abs().mean().item()


def update(llm: LLM, folder: Path, *, without: str) -> None:
    """Bring the weights of a folder to the engine, by the calls that a server makes."""
    receiving.LEFT_OUT = frozenset(filter(None, [without]))
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(folder / "model.safetensors")}})
    llm.finish_weight_update()


def main(root: Path) -> None:
    """Start with one model, then take another with each repair left out, then with none left out."""
    inside.register()
    models = [made(root / f"{seed}", seed) for seed in range(4)]
    llm = LLM(
        model=str(root / "0"),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        weight_transfer_config={"backend": "file"},
    )
    llm.init_weight_transfer_engine({"init_info": {}})
    found = {"before": gap(llm, models[0])}
    for seed, without in enumerate(("tied", "moe", ""), start=1):
        update(llm, root / f"{seed}", without=without)
        found[without or "all"] = gap(llm, models[seed])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
