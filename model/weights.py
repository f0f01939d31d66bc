"""The weights table: Hugging Face name -> parameter, the part of a tensor that a rank stores, and its packing.

A weight's shape is that of the module that holds it, built on the meta device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from model.config import Qwen3Config
from model.dtypes import FP8

# the one weight that no checkpoint has: int32 (1,), a rank's number
RANK = "rank"


@dataclass(frozen=True)
class ShardSpec:
    """The part of a tensor that a rank stores: `axis` None is all of it; the axis is split by heads or evenly."""

    axis: int | None = None
    by: str = "even"


REPLICATED, ROWS, COLUMNS = ShardSpec(), ShardSpec(0), ShardSpec(1)
QUERY_ROWS, KV_ROWS, QUERY_COLUMNS = ShardSpec(0, "query"), ShardSpec(0, "kv"), ShardSpec(1, "query")


@dataclass(frozen=True)
class Weight:
    """A parameter: its name in the module and in a bundle, Hugging Face's name and the shard of each tensor that it is
    made of, `pack` (shards and head dim -> parameter) if it is packed, and its dtype, by default the build's.

    With the dtype FP8 its parts are quantized; `scale`: it is the scales of such parts.
    """

    name: str
    parts: tuple[tuple[str, ShardSpec], ...]
    pack: Callable[..., Tensor] | None = None
    dtype: str = ""
    scale: bool = False


# packed parameter -> the projections that it replaces, and how, given their weights and the head dim
Packed = dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]]


class Packing(NamedTuple):
    """The packed parameters of each half of a layer, how a head is packed, and whether projections are FP8."""

    attention: Packed = {}  # noqa: RUF012 (nobody writes to it)
    mlp: Packed = {}  # noqa: RUF012
    head: Callable[..., Tensor] | None = None
    fp8: bool = False


# a layer's weights, in the order of a graph's parameters: the name in the module and in a checkpoint -> its shard
LayerWeights = Mapping[str, ShardSpec]
DECODER_LAYER: LayerWeights = {
    "input_layernorm": REPLICATED,
    "self_attn.q_proj": QUERY_ROWS, "self_attn.k_proj": KV_ROWS, "self_attn.v_proj": KV_ROWS,
    "self_attn.o_proj": QUERY_COLUMNS, "self_attn.q_norm": REPLICATED, "self_attn.k_norm": REPLICATED,
    "post_attention_layernorm": REPLICATED,
    "mlp.gate_proj": ROWS, "mlp.up_proj": ROWS, "mlp.down_proj": COLUMNS,
}  # fmt: skip


def decoder_weights(config: Qwen3Config, packing: Packing) -> list[Weight]:
    """Every weight of a Qwen3. A tied head is a second shard of the embedding."""
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    rows = [
        Weight("embed_tokens.weight", (("model.embed_tokens.weight", ROWS),)),
        Weight("norm.weight", (("model.norm.weight", REPLICATED),)),
        head_weight(head, packing),
    ]
    for i in range(config.num_hidden_layers):
        rows += layer_weights(f"layers.{i}", "model.", DECODER_LAYER, packing)
    return rows


def head_weight(name: str, packing: Packing) -> Weight:
    """The weight of a head that a checkpoint has by this name."""
    return Weight("lm_head.packed" if packing.head else "lm_head.weight", ((name, ROWS),), packing.head)


def layer_weights(layer: str, prefix: str, rows: LayerWeights, packing: Packing) -> list[Weight]:
    """The weights of a layer, whose names have a prefix in a checkpoint; packed ones come last."""
    packed, shards = list[Weight](), dict(rows)
    tables = (("self_attn", packing.attention), ("mlp", packing.mlp))
    for half, name, parts, pack in ((half, name, *row) for half, table in tables for name, row in table.items()):
        taken = tuple((f"{prefix}{layer}.{half}.{p}.weight", shards.pop(f"{half}.{p}")) for p in parts)
        packed.append(Weight(f"{layer}.{half}.{name}", taken, pack))
    plain = [Weight(f"{layer}.{n}.weight", ((f"{prefix}{layer}.{n}.weight", shard),)) for n, shard in shards.items()]
    return [weight for row in plain + packed for weight in (_in_fp8(row) if packing.fp8 else (row,))]


def _in_fp8(weight: Weight) -> tuple[Weight, ...]:
    """The FP8 numbers of projections and their scales; a norm as it is."""
    if not all(name.endswith("_proj.weight") for name, _ in weight.parts):
        return (weight,)
    # a scale is of an output channel: a cut of the inputs leaves it as it is
    parts = tuple((name, REPLICATED if shard.axis == 1 else shard) for name, shard in weight.parts)
    scale = Weight(f"{weight.name}_scale", parts, weight.pack, "float32", scale=True)
    return replace(weight, dtype=FP8.name), scale


def pack_projections(module: nn.Module, plain: nn.Module, table: Packed, head_dim: int = 0) -> None:
    """Give a module the children of another one, with packed parameters of a table in the place of its projections."""
    for name, child in plain.named_children():
        module.add_module(name, child)
    for name, (parts, pack) in table.items():
        suffixes = ("", "_scale") if hasattr(module.get_submodule(parts[0]), "weight_scale") else ("",)
        for suffix in suffixes:
            weights = [module.get_parameter(f"{part}.weight{suffix}").data for part in parts]
            module.register_parameter(name + suffix, nn.Parameter(pack(*weights, head_dim)))
        for part in parts:
            delattr(module, part)


def scales_of(module: nn.Module, *names: str) -> tuple[Tensor, ...]:
    """The scales of packed parameters; none if they are not FP8."""
    return tuple(getattr(module, f"{n}_scale") for n in names if hasattr(module, f"{n}_scale"))


def shard_file(rank: int) -> str:
    """A bundle's file of one rank's weights."""
    return f"weights/tp{rank}_sharded_checkpoint.safetensors"
