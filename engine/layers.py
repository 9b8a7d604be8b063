"""One layer's parameters, and where they lie in a checkpoint."""

import torch
from torch import Tensor

from engine.modelconfig import ModelConfig
from engine.rope import plane_order
from engine.weights import Loader
from kernels import Backend, Layer, Linear


def load_layer(config: ModelConfig, loader: Loader, backend: Backend, number: int) -> Layer:
    """Read one layer. Raises ModelError for a tensor that is missing or has another shape."""
    reader = _LayerReader(config, loader, backend, f"model.layers.{number}.")
    kind, hidden, inner = config.layer_kinds[number], config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    order = None if kind.rope is None else plane_order(kind.rope, config.head_dim)
    assert order is None or not config.qk_norm, "the weights of head norms would have to be in this order too"
    parts = [("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows)]
    qkv = [("self_attn.qkv_proj", q_rows + 2 * kv_rows)] if config.fused else parts
    gate_up = [("mlp.gate_up_proj", 2 * inner)] if config.fused else [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
    # With norms on both sides the one before the MLP has a name of its own; else it has the name of the one after
    # attention, whose place it took in the first of these models.
    before_mlp = "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"
    return Layer(
        window=kind.window,
        rope=None if kind.rope is None else config.ropes.index(kind.rope),
        input_norm=reader.norm("input_layernorm", hidden, config.pre_norm),
        qkv=reader.linear(qkv, hidden, biased=config.qkv_bias, order=order),
        q_norm=reader.norm("self_attn.q_norm", q_rows if config.joint_qk_norm else config.head_dim, config.qk_norm),
        k_norm=reader.norm("self_attn.k_norm", kv_rows if config.joint_qk_norm else config.head_dim, config.qk_norm),
        output=reader.linear([("self_attn.o_proj", hidden)], q_rows, biased=config.output_bias),
        post_attention_norm=reader.norm("post_attention_layernorm", hidden, config.post_norm),
        mlp_norm=reader.norm(before_mlp, hidden, config.pre_norm),
        gate_up=reader.linear(gate_up, hidden, biased=config.mlp_bias),
        down=reader.linear([("mlp.down_proj", hidden)], inner, biased=config.mlp_bias),
        post_mlp_norm=reader.norm("post_feedforward_layernorm", hidden, config.post_norm),
    )


class _LayerReader:
    """Reads norms and products of one layer by the names that they have within it."""

    def __init__(self, config: ModelConfig, loader: Loader, backend: Backend, prefix: str) -> None:
        self._config, self._loader, self._backend, self._prefix = config, loader, backend, prefix

    def norm(self, name: str, width: int, exists: bool) -> Tensor | None:
        if not exists:
            return None
        weight = self._loader.tensor(f"{self._prefix}{name}.weight", width)
        # 1 + weight is kept in float32: near 1, bfloat16 has but 7 bits for what is learnt.
        return weight.float() + 1 if self._config.unit_offset else weight

    def linear(
        self, parts: list[tuple[str, int]], columns: int, *, biased: bool, order: list[int] | None = None
    ) -> Linear:
        """The product of the stacked parts; the elements of each query and key head in `order`."""
        weight = self._stacked(parts, "weight", columns)
        bias = self._stacked(parts, "bias") if biased else None
        if order is not None:
            rows = self._head_rows(order, weight.device)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return self._backend.prepare_linear(weight, bias)

    def _stacked(self, parts: list[tuple[str, int]], suffix: str, *columns: int) -> Tensor:
        return self._loader.stacked([(f"{self._prefix}{name}.{suffix}", rows) for name, rows in parts], *columns)

    def _head_rows(self, order: list[int], device: torch.device) -> Tensor:
        config = self._config
        rows = torch.arange((config.heads + 2 * config.kv_heads) * config.head_dim, device=device)
        rotated = rows.view(-1, config.head_dim)[: config.heads + config.kv_heads]
        rotated.copy_(rotated[:, order])
        return rows
