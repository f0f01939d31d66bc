"""model.pt for NxDI: its host gets our ids, its builder gets its required arguments, and only a recipe builds it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from compile.build import build
from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from compile.neuron.flags import DEFAULT_FLAGS, LNC
from compile.nxd.files import neuron_config
from compile.nxd.module import DECODE, FUSED, PREFILL, NxdiStep, StaticOps, nxdi_graphs
from compile.spec import BuildSpec
from model.attention import append
from model.cache import AttentionMetadata, Cache
from model.ops import EAGER, Ops, iota
from tests.compile import fake_sdk
from tests.compile.nxdi_host import Host, Served, Tensors
from tests.compile.tiny import refused, spec, write_noisy_pair
from tests.eager_graphs import EagerGraphs, eager_graphs
from tests.model.family import untraced
from trnspec.bundle.opening import corrupt_files, read_bundle
from trnspec.bundle.plan import BundlePlan, make_plan
from trnspec.bundle.spec import BundleSpec
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request

SIZES: dict[str, Any] = {"batch": 3, "max_len": 256, "k": 2, "chunks": (128,)}
STATIC = StaticOps(lambda x: x)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noisy_pair(tmp_path_factory.mktemp("pair"))


class ModelPt:
    """The modules that ModelBuilder would trace, with weights, routed by the list of input shapes as NxDI does."""

    def __init__(self, plan: BundlePlan, weights: dict[str, torch.Tensor]) -> None:
        self.modules, self.state = {}, weights
        for graph in (g for graphs in nxdi_graphs(plan).values() for g in graphs):
            rows, batch = (graph.key.rows, 1) if graph.key.is_prefill else (1, plan.spec.batch)
            self.modules[batch, rows, graph.key.bucket] = NxdiStep(plan, graph, STATIC)

    def __call__(self, given: Tensors) -> list[np.ndarray]:
        module = self.modules[(*given[0].shape, given[1].shape[1])]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.data.copy_(self.state.get(name, parameter))
        with torch.no_grad():
            results = module(*map(torch.from_numpy, given))
        self.state |= {names[id(p)]: results[at].clone() for p, at in module.aliases().items()}
        return [r.numpy() for r in results[: len(results) - len(module.aliases())]]


def _sequences() -> list[Served]:
    """Of several lengths; two sampled, one past the first bucket, one to the end of the cache."""
    return [
        Served((5, 9, 2, 7), 9, end=41), Served((8, 1), 21, (0, 1.0, 0.9)), Served((6, 2, 1, 1, 9) * 25, 7),
        Served((3, 3, 4), 12, (9, 0.8, 1.2)), Served((4,), 30, end=41), Served((7, 7) * 122, 40), Served((1, 2), 5),
    ]  # fmt: skip


def _ours(graphs: EagerGraphs, spec_: BundleSpec, served: list[Served]) -> list[list[int]]:
    """The ids of our step, with the noise of the lines that the sequences had."""
    counts, requests = Counter[int](), list[Request]()
    for s in served:
        counts[s.line] += 1
        top_k, top_p, temperature = s.params
        params = Params(temperature, int(top_k), top_p, seed=s.line + (counts[s.line] << 32))
        requests.append(Request(s.prompt, Params() if top_k == 1 else params, s.new_tokens, (s.end,)))
    engine = Engine(graphs, engine_config(SimpleNamespace(spec=spec_)))  # type: ignore[arg-type]
    return [result.ids for result in engine.run(requests)]


@pytest.mark.parametrize(("k", "arrive"), [(2, 3), (2, 2), (0, 3)])
def test_nxdi_s_host_gets_the_ids_of_our_step(base: Path, k: int, arrive: int) -> None:
    built = spec(base, "pair", **(SIZES | {"k": k}))
    graphs = eager_graphs(built.bundle, built.checkpoints)
    model = ModelPt(make_plan(built.bundle), dict(graphs.pair.state_dict()))
    served, host = _sequences(), Host(model, k, built.bundle.batch, built.bundle.buckets)
    host.serve(served, arrive)
    assert {1, arrive} < set(host.batches), "full and partial batches"
    assert set(host.counts) == set(range(1, k + 2)), "steps that emit any number of ids"
    for number, (s, expected) in enumerate(zip(served, _ours(graphs, built.bundle, served), strict=True)):
        # NxDI's host ends a sequence whose next step would not fit; our engine emits what fits
        assert s.ids == (expected[: len(s.ids)] if number == 5 else expected)
    assert len({s.line for s in served}) == 3


@pytest.mark.parametrize("first", [[0, 126], [127, 254], [255, -2], [256, 700]])
def test_append_writes_the_same_bits_on_every_route_and_nothing_outside(first: list[int]) -> None:
    """Rows before and after a sequence's blocks are in the last block: a scatter outside may end a device's run."""
    pool, new = torch.randn(6, 1, 128, 2), torch.randn(2, 1, 3, 2)
    meta = AttentionMetadata(torch.tensor(first).int()[:, None] + iota(3, pool), torch.tensor([[1, 3], [2, 0]]).int())
    given: list[tuple[torch.Tensor, ...]] = []

    class Recorded(Ops):
        def append(self, *arguments: torch.Tensor) -> torch.Tensor:
            given.append(arguments)
            return EAGER.append(*arguments)

    append(Recorded(), new, new, Cache(pool, pool), meta)
    expected = EAGER.append(*given[0])
    assert torch.equal(STATIC.append(*given[0]), expected)
    traced = jax.jit(lambda *arrays: interop.call_torch(TracedOps(1).append, *arrays))
    assert np.array_equal(traced(*(jnp.asarray(t.numpy()) for t in given[0])), expected.numpy())
    _, _, blocks, offsets = given[0]
    assert bool((((blocks == 5) | (blocks > 0) & (blocks < 4)) & (offsets >= 0) & (offsets < 128)).all())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("k", [2, 0])
def test_modelbuilder_traces_model_pt(base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    fake_sdk.install(monkeypatch)
    changes = SIZES | {"k": k, "tp": 2, "compiler_flags": {"step": "-O3 --lnc 2"}}
    bundle = read_bundle(untraced(spec(base, f"full{k}", **changes, toolchain="model.pt")))
    builder, step = fake_sdk.ModelBuilder.built[-1], FUSED if k else DECODE
    assert corrupt_files(bundle) == []
    compiled = bundle.manifest.compiler
    assert (compiled.toolchain, compiled.neff, compiled.lnc) == ("full", "model.pt", LNC)
    assert {"model.pt", "neuron_config.json"} < bundle.files.keys()
    assert not any(name.startswith("neff/") for name in bundle.files)
    torch.jit.load(str(bundle.path / "model.pt"))
    assert (builder.tp, builder.lnc) == (2, LNC)
    flags = {PREFILL: DEFAULT_FLAGS["prefill"], step: "-O3 --lnc 2"}
    assert {tag: e["flags"] for tag, e in builder.added.items()} == flags
    assert {tag: e["priority"] for tag, e in builder.added.items()} == {PREFILL: None, step: 0}
    # ids, mask, positions, slots, sampling parameters, and two that are not ours
    shapes = [[list(t.shape) for t in inputs] for inputs in builder.added[step]["inputs"]]
    assert shapes == [[[3, 1], [3, s], [3, 1], [3], [3, 3], [3], [3]] for s in (128, 256)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [({}, "this machine has no NxD with a ModelBuilder"), ({"k": "1,3"}, "NxDI runs one k, not 1, 3"),
     ({"kernels": "nki"}, "its graphs have no NKI kernels; use --kernels reference"),
     ({"blocks": 4}, "blocks is 4, fewer than the slots have"),
     ({"drafter": "ngram", "draft": BuildSpec.draft}, "NxDI fuses a plain draft model, not ngram")],
)  # fmt: skip
def test_what_nxdi_cannot_run_is_refused_before_anything_is_built(base: Path, changes: Any, why: str) -> None:
    refused(lambda: build(spec(base, "refused", **changes, toolchain="model.pt")), f"gets no model.pt: {why}")
    assert not (base / "refused").exists()


def test_neuron_config_has_what_nxdi_s_loader_decides_by() -> None:
    """Loaded by the classes of NxDI 0.6 and 0.9, this file had the values of the file that NxDI wrote for these
    options: every field but paths, and for 0.6 the switch of a sampling kernel."""
    written = json.loads(neuron_config(BuildSpec(k="6", tp=32, batch=4, max_len=1024).bundle))
    draft = written["fused_spec_config"]["draft_config"]
    required = ("hidden_size", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "hidden_act")
    assert all(value[name] for name in required for value in (written, draft))
    assert "pad_token_id" in written
    assert written["neuron_config"] == {
        "batch_size": 4, "ctx_batch_size": 1, "enable_bucketing": True, "enable_fused_speculation": True,
        "is_continuous_batching": True, "logical_nc_config": 2, "save_sharded_checkpoint": True, "seq_len": 1024,
        "on_device_sampling_config": {"dynamic": True, "global_topk": 256}, "speculation_length": 7,
        "torch_dtype": "bfloat16", "tp_degree": 32,
    }  # fmt: skip
    target_only = {"enable_fused_speculation": False, "speculation_length": 0}
    assert draft["neuron_config"] == written["neuron_config"] | target_only
    assert "draft_model_cls" not in written["fused_spec_config"], "0.6 has no such argument"
