"""The shapes of a model's weights on one rank, by arithmetic on a model's configuration: for manifests of strangers.

`model/bundle/weights.py` says the same with torch, for those who cut and load. Names are the bundle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Shapes = Mapping[str, list[int]]
# of half a layer: the weights as they are, and those of them that are packed, as (features, inputs)
Half = tuple[dict[str, list[int]], dict[str, list[int]]]


def differences(
    kind: str, shapes: Shapes, prefix: str, config: dict[str, Any], ranks: int, head_ranks: int = 0
) -> Iterator[str]:
    """A clause for each weight of a model that is missing or has not the shape that the configuration asks for.

    `head_ranks` split the head, `ranks` if 0.
    """
    whole = _OF_HEADS.get(kind, _outside)(config, ranks, head_ranks or ranks)
    for name, shape in whole.items():
        if shapes.get(prefix + name) != shape:
            yield _clause(prefix + name, shapes, shape)
    if kind == "eagle3":
        yield from _of_halves(shapes, f"{prefix}layers.0.", _halves(config, ranks)[1:])
    elif kind not in _OF_HEADS:
        yield from _of_layers(shapes, prefix, config, ranks)


def _outside(config: dict[str, Any], ranks: int, head_ranks: int) -> dict[str, list[int]]:
    """The weights of a decoder that are in no layer."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    return {
        "embed_tokens.weight": [vocabulary, hidden // ranks],
        "norm.weight": [hidden],
        "lm_head.weight": [vocabulary // head_ranks, hidden],
    }


def _of_layers(shapes: Shapes, prefix: str, config: dict[str, Any], ranks: int) -> Iterator[str]:
    norms, halves = _norms(config), _halves(config, ranks)
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        for name, shape in norms.items():
            if shapes.get(at + name) != shape:
                yield _clause(at + name, shapes, shape)
        yield from _of_halves(shapes, at, halves)


def _of_halves(shapes: Shapes, at: str, halves: list[Half]) -> Iterator[str]:
    for plain, packed in halves:
        is_packed = at + next(iter(packed)) in shapes
        for name, shape in (packed if is_packed else plain).items():
            there = shapes.get(at + name)
            if not (_holds(there, *shape) if is_packed else there == shape):
                yield _clause(at + name, shapes, shape)


def _clause(name: str, shapes: Shapes, wanted: list[int]) -> str:
    return f"{name} has shape {shapes.get(name)}, the model's sizes ask for {wanted}"


def _holds(there: list[int] | None, features: int, inputs: int) -> bool:
    """Whether a packed weight (blocks, in, columns) has room for all features of all inputs, and no more."""
    return there is not None and len(there) == 3 and there[1] == inputs and math.prod(there) == features * inputs


def _eagle3(config: dict[str, Any], ranks: int, head_ranks: int) -> dict[str, list[int]]:
    """The weights of an EAGLE-3 head but its MLP's; projections take an embedding and a feature beside each other."""
    hidden, own = config["hidden_size"], config["draft_vocab_size"]
    attention, _ = _halves(config, ranks)[0]
    joined = {name: [rows, 2 * hidden] for name, (rows, _) in attention.items() if "qkv_proj" in name}
    norms = {f"{name}.weight": [hidden] for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    layer = norms | attention | joined
    return _outside(config | {"vocab_size": own}, ranks, head_ranks) | {
        "embed_tokens.weight": [config["vocab_size"], hidden // ranks],
        "fc.weight": [hidden // ranks, len(config["taps"]) * config["target_hidden_size"]],
        **({"d2t": [own]} if own < config["vocab_size"] else {}),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
    }


def _norms(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    return {
        "input_layernorm.weight": [hidden],
        "self_attn.q_layernorm.weight": [dim],
        "self_attn.k_layernorm.weight": [dim],
        "post_attention_layernorm.weight": [hidden],
    }


def _halves(config: dict[str, Any], ranks: int) -> list[Half]:
    """Attention and MLP."""
    hidden, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"] // ranks
    kv_heads = config["num_key_value_heads"]
    # NxD's placement: kv heads are split or copied, query heads follow theirs and are padded
    copies, kv = max(1, ranks // kv_heads), max(1, kv_heads // ranks) * dim
    q = kv * -(-(config["num_attention_heads"] // kv_heads) // copies)
    return [
        (
            {
                f"self_attn.qkv_proj.{name}_proj.weight": [rows, hidden]
                for name, rows in (("q", q), ("k", kv), ("v", kv))
            }
            | {"self_attn.o_proj.o_proj.weight": [hidden, q]},
            {"self_attn.qkv_packed": [q + 2 * kv, hidden], "self_attn.out_packed": [hidden, q]},
        ),
        (
            {f"mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
            | {"mlp.down_proj.weight": [hidden, inner]},
            {"mlp.gate_up_packed": [2 * inner, hidden], "mlp.down_packed": [hidden, inner]},
        ),
    ]


def _medusa(config: dict[str, Any], ranks: int, head_ranks: int) -> dict[str, list[int]]:
    """Medusa heads: every matrix is cut by rows."""
    hidden, heads = config["hidden_size"], range(config["heads"])
    shapes = {
        f"blocks.{h}.layers.{n}.weight": [hidden // ranks, hidden] for h in heads for n in range(config["layers"])
    }
    projections = heads[:1] if config["shared_head"] else heads
    return shapes | {f"lm_heads.{h}.weight": [config["vocab_size"] // head_ranks, hidden] for h in projections}


# by the kind of a drafter whose model is no decoder: name -> shape of every weight on one of so many ranks, of the
# model and of its head
_OF_HEADS: dict[str, Callable[[dict[str, Any], int, int], dict[str, list[int]]]] = {
    "eagle3": _eagle3,
    "medusa": _medusa,
}
