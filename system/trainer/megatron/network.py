"""A Megatron-Core GPT of a policy's shape, on this rank's part of the layers, heads, experts and vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from system.trainer.megatron.attention import Norm, PackedAttention, add_residual
from system.trainer.megatron.shape import Shape
from system.trainer.parallel import Parallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def join(parallel: Parallel) -> None:
    """Make Megatron's groups of ranks; torch.distributed is already there."""
    parallel.data(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(parallel.timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def check_sizes(shape: Shape, parallel: Parallel) -> None:
    """Refuse sizes that do not divide the model.

    Raises:
        ValueError: one line naming the size and what it must divide.
    """
    base = shape.base
    divided = [
        ("tensor", parallel.tensor, "num_attention_heads", base.num_attention_heads),
        ("pipeline", parallel.pipeline, "num_hidden_layers", base.num_hidden_layers),
    ]
    if shape.experts:
        divided.append(("expert", parallel.expert, "num_experts", shape.experts))
    else:
        divided.append(("tensor", parallel.tensor, "intermediate_size", base.intermediate_size))
    for size_name, size, name, whole in divided:
        if whole % size:
            raise ValueError(f"{size_name} must divide {name}={whole}, got {size}")
    many, few = sorted((base.num_key_value_heads, parallel.tensor), reverse=True)
    if many % few:
        raise ValueError(
            f"tensor must divide num_key_value_heads={base.num_key_value_heads} or be a multiple of it, "
            f"got {parallel.tensor}"
        )
    if parallel.expert > 1 and not shape.experts:
        raise ValueError(f"expert must be 1 for a model without experts, got {parallel.expert}")
    if shape.experts and parallel.tensor > 1 and not parallel.sequence:
        raise ValueError("sequence must be True for experts with tensor above 1, got False")
    if base.token_count <= padded_vocabulary(shape, parallel) // parallel.tensor * (parallel.tensor - 1):
        raise ValueError(f"tensor must leave each rank a token of {base.token_count}, got {parallel.tensor}")


def padded_vocabulary(shape: Shape, parallel: Parallel) -> int:
    """Rows of the embedding over all ranks, a multiple of `tensor`."""
    return -(-shape.base.vocab_size // parallel.tensor) * parallel.tensor


def transformer_config(shape: Shape, parallel: Parallel, *, on_gpu: bool) -> TransformerConfig:
    """Megatron's own settings; whatever it would scale by counts of tokens or micro-batches is off."""
    base, dtype = shape.base, DTYPES[parallel.dtype]
    experts = (
        {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.active_experts,
            "moe_ffn_hidden_size": shape.expert_size,
            "moe_router_pre_softmax": not shape.renormalise,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
        if shape.experts
        else {}
    )
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=base.num_hidden_layers,
        hidden_size=base.hidden_size,
        ffn_hidden_size=base.intermediate_size,
        num_attention_heads=base.num_attention_heads,
        num_query_groups=base.num_key_value_heads,
        kv_channels=base.head_dim,
        layernorm_epsilon=base.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.sequence,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the other kind wants equal lengths
        calculate_per_token_loss=True,  # a loss is taken as it is, gradients are added up
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # every weight is given
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        batch_p2p_comm=on_gpu,
        transformer_impl="local",
        **experts,
        **(again if parallel.recompute else {}),
    )


def block_spec(shape: Shape, config: TransformerConfig) -> TransformerBlockSubmodules:
    """This stage's layers."""
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=PackedAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=IdentityOp,  # pyright: ignore[reportArgumentType]
                    linear_proj=RowParallelLinear,
                    q_layernorm=Norm,
                    k_layernorm=Norm,
                ),
            ),
            self_attn_bda=add_residual,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=Norm,
            mlp=get_mlp_module_spec(use_te=False, num_experts=shape.experts or None),
            mlp_bda=add_residual,  # pyright: ignore[reportArgumentType]
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)


def decoder(shape: Shape, parallel: Parallel, *, on_gpu: bool) -> GPTModel:
    """The model of this rank; its weights hold no values yet."""
    check_sizes(shape, parallel)
    config = transformer_config(shape, parallel, on_gpu=on_gpu)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(shape, config),  # pyright: ignore[reportArgumentType]
        vocab_size=padded_vocabulary(shape, parallel),
        max_sequence_length=shape.base.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.base.tie_word_embeddings,
        position_embedding_type="none",  # the attention rotates, with the places that come with its segments
    )
    return model.cuda(torch.cuda.current_device()) if on_gpu else model


def build(shape: Shape, parallel: Parallel, *, on_gpu: bool) -> DistributedDataParallel:
    """The same in Megatron's data-parallel wrapper, which keeps float32 gradients."""
    model = decoder(shape, parallel, on_gpu=on_gpu)
    model.config.finalize_model_grads_func = add_up_gradients
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=False,
    )
    return DistributedDataParallel(model.config, settings, model)


def add_up_gradients(model: list, num_tokens: object, **groups: object) -> None:
    """Over all ranks, and divided by nothing: the weights of the loss are those of the whole step."""
    finalize_model_grads(model, None, **groups)  # pyright: ignore[reportArgumentType]
