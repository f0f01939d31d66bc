"""The plan: every graph, shape, byte and collective of a build, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compile.spec import BuildSpec
from model.artifact import DECODE, FUSED, PREFILL, GraphSpec, TensorSpec
from model.cache import cache_shapes
from model.config import Qwen3Config
from model.filter_floor import ALL_GATHERS
from model.nki_backing import BACKINGS
from model.parallel import Parallel
from model.weights import RANK, bundle_names, local_shapes

_DTYPE = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Plan:
    """What a build makes, before anything is made."""

    spec: BuildSpec
    graphs: tuple[GraphSpec, ...]
    target_weights: tuple[TensorSpec, ...]
    draft_weights: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]

    @property
    def weight_bytes(self) -> int:
        """Weights of both models on one rank."""
        return sum(t.bytes for t in self.target_weights + self.draft_weights)

    @property
    def cache_bytes(self) -> int:
        """Caches of both models on one rank."""
        return sum(t.bytes for t in self.state)


def make_plan(spec: BuildSpec) -> Plan:
    """The plan of a checked spec."""
    target, draft = spec.target_config, spec.draft_config
    dtype = _DTYPE[spec.dtype]
    target_weights = _weights("target_model", target, spec, dtype)
    draft_weights = _weights("draft_model", draft, spec, dtype) if spec.k else ()
    draft_state = _state("draft_model", draft, spec, dtype) if spec.k else ()
    target_state = _state("target_model", target, spec, dtype)
    target_weights = tuple(replace(t, name=spec.stored_name(t.name)) for t in target_weights)
    both = draft_weights + target_weights
    graphs = []
    for bucket in spec.buckets:
        step, prompt = _inputs(spec.batch, 1, bucket), _inputs(1, bucket, bucket)
        state = draft_state + target_state
        graphs += [
            GraphSpec(PREFILL, bucket, spec.k, both, prompt, state, _outputs(1, spec.k, spec.max_len),
                      _collectives(spec, prompt_passes=spec.k > 0)),
            GraphSpec(FUSED, bucket, spec.k, both, step, state, _outputs(spec.batch, spec.k, bucket),
                      _collectives(spec, draft_passes=spec.k + 1)),
            GraphSpec(DECODE, bucket, 0, target_weights, step, target_state, _outputs(spec.batch, 0, bucket),
                      _collectives(spec)),
        ]  # fmt: skip
    if not spec.k:
        graphs = [g for g in graphs if g.tag != FUSED]
    return Plan(spec, tuple(graphs), target_weights, draft_weights, draft_state + target_state)


def _weights(prefix: str, config: Qwen3Config, spec: BuildSpec, dtype: str) -> tuple[TensorSpec, ...]:
    shapes = local_shapes(config, spec.tp, spec.packing(config))
    number = TensorSpec(f"{prefix}.{RANK}", (1,), "int32")
    return (*(TensorSpec(f"{prefix}.{name}", shape, dtype) for name, shape in shapes.items()), number)


def parameter_names(spec: BuildSpec, drafting: bool) -> dict[str, str]:
    """Parameter of a pair -> its name in the bundle."""
    target, draft = spec.target_config, spec.draft_config
    names = bundle_names("target_model", target, spec.packing(target))
    names = {ours: spec.stored_name(name) for ours, name in names.items()}
    return names | bundle_names("draft_model", draft, spec.packing(draft)) if drafting else names


def _state(prefix: str, config: Qwen3Config, spec: BuildSpec, dtype: str) -> tuple[TensorSpec, ...]:
    shapes = cache_shapes(config, Parallel(spec.tp), spec.batch, spec.max_len, BACKINGS[spec.kernels].layout)
    return tuple(
        TensorSpec(f"{prefix}.kv.{layer}.{which}", shape, dtype)
        for layer in range(config.num_hidden_layers)
        for which, shape in zip("kv", shapes, strict=True)
    )


def _inputs(batch: int, count: int, bucket: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("input_ids", (batch, count), "int32"),
        TensorSpec("attention_mask", (batch, bucket), "int32"),
        TensorSpec("position_ids", (batch, count), "int32"),
        TensorSpec("seq_ids", (batch,), "int32"),
        TensorSpec("sampling_params", (batch, 3), "float32"),
        TensorSpec("min_p", (batch,), "float32"),
        TensorSpec("seeds", (batch, 2), "int32"),
        TensorSpec("k_limits", (batch,), "int32"),
    )


def _outputs(batch: int, k: int, mask: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("accepted_tokens", (batch, k + 1), "int32"),
        TensorSpec("next_input_ids", (batch, 1), "int32"),
        TensorSpec("next_attention_mask", (batch, mask), "int32"),
        TensorSpec("next_pos_ids", (batch, 1), "int32"),
    )


def _collectives(spec: BuildSpec, draft_passes: int = 0, prompt_passes: bool = False) -> dict[str, int]:
    """Collectives of one execution: two all-reduces a layer, one gather an embedding and a draw.

    Conditional ones run if a row filters: kernels that draw from shards search for its floor.
    """
    if spec.tp == 1:
        return {"all-reduce": 0, "all-gather": 0}
    draft_layers, target_layers = spec.draft_config.num_hidden_layers, spec.target_config.num_hidden_layers
    passes = 1 if prompt_passes else draft_passes
    # the last draft pass, and a prompt's, only write the cache: no head
    heads = 1 + max(0, passes - 1)
    searched = {"conditional all-gather": ALL_GATHERS * heads} if BACKINGS[spec.kernels].sharded else {}
    return {
        "all-reduce": 2 * (target_layers + passes * draft_layers),
        "all-gather": 1 + passes + heads,
    } | searched
