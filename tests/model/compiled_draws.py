"""The sampler of either backing as XLA compiles it for a bundle: a graph of draws alone, from logits that come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from compile.graph.custom_call import launch_in_graph
from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from model.approx_filters import approximate
from model.filters import Filters
from model.graph_io import mask_words
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec
from model.logits_processors import unpacked
from model.nki import custom_calls
from model.nki.context import make_context
from model.parallel import VocabShard
from model.sampling import SamplingParams
from tests.model.sampler_oracle import Row
from trnspec.bundle import hlo
from trnspec.runtime import pjrt

Draws = Callable[[Sequence[Row]], list[int]]
_GRAPH = GraphSpec(GraphKey(Stage.STEP), (), (), (), ())


def drawing(
    backing: str,
    rows: int,
    vocabulary: int,
    *,
    filters: bool = True,
    masks: bool = True,
    tp: int = 1,
    rough: bool = False,
) -> Draws:
    """A function of `rows` rows to the ids that a compiled graph draws for them; a draft's draws if `rough`."""
    ctx, width = make_context(backing, tp, TracedOps(tp), launch_in_graph), vocabulary // tp

    def run(logits: Tensor, start: Tensor, numbers: Tensor, seeds: Tensor, positions: Tensor, words: Tensor) -> Tensor:
        temperature, *of_filters = numbers.unbind(-1)
        params, own = (
            SamplingParams(temperature, seeds, Filters(*of_filters) if filters else None),
            VocabShard(start, width),
        )
        if masks:
            allowed = unpacked(words[:, None])[:, 0].index_select(1, own.ids_V) > 0
            logits = torch.where(allowed, logits, float("-inf"))
        noise = ctx.gumbel_noise(seeds, positions[:, 0], own)
        return ctx.sample(logits, approximate(params) if rough else params, noise, own).token_ids()

    def traced(*arrays: jax.Array) -> Any:
        return interop.call_torch(run, *arrays)

    numbers, whole = np.float32, np.int32
    shapes = [((rows, width), numbers), ((1, 1), whole), ((rows, 4), numbers), ((rows, 2), whole), ((rows, 1), whole)]
    shapes.append(((rows, mask_words(vocabulary)), whole))
    with torch.no_grad():
        lowered = jax.jit(traced, keep_unused=True).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    module: Any = lowered.compiler_ir("hlo")
    devices = pjrt.devices_of("cpu", tp)
    custom_calls.register()
    compiled = pjrt.compile_hlo(
        hlo.canonical(module.as_serialized_hlo_module_proto()).SerializeToString(), devices, _GRAPH
    )
    sharding = NamedSharding(Mesh(np.array(devices), ("rank",)), PartitionSpec("rank"))

    def put(parts: list[np.ndarray]) -> Any:
        held = [jax.device_put(p, d) for p, d in zip(parts, devices, strict=True)]
        shape = (parts[0].shape[0] * tp, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, held)

    def draws(cases: Sequence[Row]) -> list[int]:
        logits = np.split(np.stack([row.logits for row in cases]), tp, 1)
        starts = [np.array([[rank * width]], np.int32) for rank in range(tp)]
        inputs = [_numbers(cases), _words([row.seed for row in cases]), _words([(row.position,) for row in cases])]
        inputs.append(np.stack([_mask(row) for row in cases]))
        arguments = [
            put([np.ascontiguousarray(part) for part in logits]),
            put(starts),
            *(put([i] * tp) for i in inputs),
        ]
        results = compiled.execute_sharded(arguments).disassemble_into_single_device_arrays()
        custom_calls.check(results)
        of_ranks = [np.asarray(part).tolist() for part in results[0]]
        assert all(ids == of_ranks[0] for ids in of_ranks), "every rank must come to the same ids"
        return list(of_ranks[0])

    return draws


def _numbers(cases: Sequence[Row]) -> np.ndarray:
    return np.array([(row.temperature, row.top_k, row.top_p, row.min_p) for row in cases], np.float32)


def _words(values: Sequence[tuple[int, ...]]) -> np.ndarray:
    return np.array(values, np.uint32).view(np.int32)


def _mask(row: Row) -> np.ndarray:
    allowed = np.ones(len(row.logits), bool) if row.allowed is None else row.allowed
    bits = np.pad(allowed, (0, -len(allowed) % 32)).reshape(-1, 32).astype(np.uint64)
    return (bits << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(np.int32)
