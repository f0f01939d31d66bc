"""The plan: every graph, shape, byte and collective of a build, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compile.spec import BuildSpec, PartModel
from model.bundle.manifest import DECODE, FUSED, PREFILL, GraphSpec, TensorSpec
from model.bundle.weights import RANK, bundle_names, local_shapes
from model.cache import cache_shapes
from model.config import Qwen3Config
from model.nki.backing import backing_of
from model.nki.filter_floor import ALL_GATHERS
from model.parallel import Parallel

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
    models = {m.role: m for m in spec.models}
    of_target, of_draft = spec.parallel()
    target_weights = _weights(models["target"], spec)
    draft_weights = _weights(models["draft"], spec) if spec.k else ()
    draft_state = _state("draft_model", draft, of_draft, spec) if spec.k else ()
    target_state = _state("target_model", target, of_target, spec)
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


def _weights(model: PartModel, spec: BuildSpec) -> tuple[TensorSpec, ...]:
    shapes, prefix = local_shapes(model.config, model.ranks, spec.packing(model)), f"{model.role}_model"
    number = TensorSpec(f"{prefix}.{RANK}", (1,), "int32")
    return (*(TensorSpec(f"{prefix}.{name}", shape, _DTYPE[spec.dtype]) for name, shape in shapes.items()), number)


def parameter_names(spec: BuildSpec, drafting: bool) -> dict[str, str]:
    """Parameter of a pair -> its name in the bundle."""
    names: dict[str, str] = {}
    for model in spec.models[: 1 + drafting]:
        names |= bundle_names(f"{model.role}_model", model.config, spec.packing(model))
    return {ours: spec.stored_name(name) for ours, name in names.items()}


def _state(prefix: str, config: Qwen3Config, parallel: Parallel, spec: BuildSpec) -> tuple[TensorSpec, ...]:
    shapes = cache_shapes(config, parallel, spec.batch, spec.max_len, backing_of(spec.kernels).layout)
    return tuple(
        TensorSpec(f"{prefix}.kv.{layer}.{which}", shape, _DTYPE[spec.dtype])
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
    """Collectives of one execution, the target's inside of all ranks and the draft's inside of its groups.

    Conditional ones run if a row filters: kernels that draw from shards search for its floor.
    """
    of_target, of_draft = spec.parallel()
    passes = 1 if prompt_passes else draft_passes
    # the last draft pass, and a prompt's, only write the cache: no head
    drafted = max(0, passes - 1)
    target = _collectives_of(spec.target_config, of_target, 1, 1)
    draft = _collectives_of(spec.draft_config, of_draft, passes, drafted)
    draws = (of_target.tp > 1) + drafted * (of_draft.tp > 1)
    searched = {"conditional all-gather": ALL_GATHERS * draws} if backing_of(spec.kernels).sharded and draws else {}
    return {op: target[op] + draft[op] for op in target} | searched


def _collectives_of(config: Qwen3Config, parallel: Parallel, passes: int, heads: int) -> dict[str, int]:
    """Two all-reduces a layer, one gather an embedding and a draw; two more a layer where slices are merged."""
    if parallel.tp == 1:
        return {"all-reduce": 0, "all-gather": 0}
    merging = 2 if parallel.slices(config) > 1 else 0
    layers = passes * config.num_hidden_layers
    return {"all-reduce": 2 * layers, "all-gather": passes + heads + merging * layers}
