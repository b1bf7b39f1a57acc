"""A cluster's rates from its machines and its model: bytes read a decode step, operations a trained token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.capacity import kv_bytes_per_token, kv_tokens

from .cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """GPUs and a model on them. `experiments/plan_cluster.py` has two.

    An engine is `tensor_parallel` GPUs. A decode step reads the weights once and the keys and values of every request
    in its batch; what it computes is small beside that. A trained token costs `6 * active_parameters` operations,
    and a third more where activations are computed again; attention adds `6 * square_width` for each pair of tokens.

    Args:
        gpus_per_node: of either kind of node.
        gpu_bytes: memory of a GPU.
        gpu_bandwidth: bytes a second that a GPU reads.
        gpu_flops: operations a second, dense bfloat16.
        kv_utilization: share of a GPU's memory that an engine may take.
        other_bytes: of it, what is neither weights nor context.
        decode_efficiency: share of the bandwidth that decoding reaches.
        train_efficiency: share of the operations that training reaches, its recomputation counted as useless.
        tensor_parallel: GPUs of an engine.
        weight_bytes: of the whole model as it is served.
        active_parameters: that a token passes.
        attention_layers, kv_heads, head_dim, kv_value_bytes: of the layers whose memory grows with the context.
        square_width: heads times head size, summed over those layers.
        prefill_tokens_per_s: of an engine.
        node_hour: price of a node for an hour.
    """

    gpus_per_node: int = 8
    gpu_bytes: float
    gpu_bandwidth: float
    gpu_flops: float
    kv_utilization: float
    other_bytes: float
    decode_efficiency: float
    train_efficiency: float
    tensor_parallel: int
    weight_bytes: float
    active_parameters: float
    attention_layers: int
    kv_heads: int
    head_dim: int
    kv_value_bytes: int
    square_width: int
    prefill_tokens_per_s: float
    node_hour: float

    @property
    def token_bytes(self) -> int:
        """Of a token of context on one GPU."""
        return kv_bytes_per_token(
            attention_layers=self.attention_layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bytes_per_value=self.kv_value_bytes,
            tensor_parallel=self.tensor_parallel,
        )

    @property
    def engine_tokens(self) -> int:
        """Tokens of context that an engine holds."""
        return kv_tokens(
            gpu_bytes=self.gpu_bytes,
            utilization=self.kv_utilization,
            weight_bytes=self.weight_bytes / self.tensor_parallel,
            other_bytes=self.other_bytes,
            token_bytes=self.token_bytes,
        )

    def engines(self, nodes: int) -> int:
        """Replicas on so many nodes."""
        return nodes * self.gpus_per_node // self.tensor_parallel

    def cluster(
        self, *, inference_nodes: int, training_nodes: int, sync_s: float, start_s: float, verify_s: float
    ) -> Cluster:
        """The rates of so many nodes."""
        bandwidth = self.gpu_bandwidth * self.decode_efficiency
        flops = training_nodes * self.gpus_per_node * self.gpu_flops * self.train_efficiency
        return Cluster(
            engines=self.engines(inference_nodes),
            decode_s=self.weight_bytes / self.tensor_parallel / bandwidth,
            decode_context_s=self.token_bytes / bandwidth,
            prefill_s=1 / self.prefill_tokens_per_s,
            kv_tokens=self.engine_tokens,
            train_token_s=6 * self.active_parameters / flops,
            train_square_s=6 * self.square_width / flops if flops else math.inf,
            sync_s=sync_s,
            start_s=start_s,
            verify_s=verify_s,
        )
