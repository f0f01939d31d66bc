"""The SDK's seam: what is found, what the compiler and ModelBuilder are called with, what a bundle then holds."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compile.build import build
from compile.doctor import main as doctor
from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from compile.neuron import config as neuron_config
from compile.neuron import sdk as toolchain
from compile.neuron.eager import EagerRanks
from compile.neuron.flags import DECODE, DEFAULT_FLAGS, FUSED, LNC, NXDI_FLAGS, PREFILL, flags_of, nxdi_tag
from compile.neuron.module import StaticOps
from compile.neuron.sdk import NXDI_TAGS, PROBES, Level
from compile.spec import BuildSpec, read_recipe
from model.errors import UserError
from model.graph_io import StepOutputs
from model.graph_key import GraphKey, Stage
from model.nki import simulated
from model.nki.backing import backing_of
from model.ops import EAGER
from model.weights import shard_file
from tests.compile import fake_sdk
from tests.compile.tiny import spec
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle import hlo
from trnspec.bundle.manifest import Compiler
from trnspec.bundle.opening import damage, read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime import pjrt
from trnspec.runtime.xla import XlaRunner

# the graphs of other tests too
SMALL = {"k": 1, "batch": 1}


def test_nothing_is_found_here_and_nkisim_is_not_the_sdk() -> None:
    assert "nki" in sys.modules
    found = toolchain.find()
    assert (found.level, found.look_alikes, found.versions) == (Level.NONE, (), {})
    with pytest.raises(UserError, match=r"needs neuronx-cc, which is not on this machine; install it from AWS"):
        toolchain.require(Level.COMPILER, "this")


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.package)
def test_an_empty_look_alike_is_named(probe: toolchain.Probe, compiler: Path, monkeypatch: Any) -> None:
    fake_sdk.install(monkeypatch)
    assert toolchain.find("nki").level is Level.FULL
    fake_sdk.install(monkeypatch, look_alike=probe.module.partition(".")[0])
    found = toolchain.find("nki")
    assert found.level is Level.COMPILER
    (sentence,) = found.look_alikes
    assert sentence.startswith(probe.package)
    with pytest.raises(UserError, match=r"empty look-alike from the public index: .* from AWS's package index"):
        toolchain.require(Level.FULL, "this", "nki")


def test_the_native_torch_neuronx_is_no_look_alike(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDK 2.32 and later: a package of this name that has modules, and none for torch_xla."""
    fake_sdk.install(monkeypatch)
    for name in ("torch_neuronx", "torch_neuronx.xla_impl", "torch_neuronx.xla_impl.trace"):
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "native/torch_neuronx").mkdir(parents=True)
    for name in ("__init__", "device"):
        (tmp_path / f"native/torch_neuronx/{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "native")
    found = toolchain.find()
    monkeypatch.delitem(sys.modules, "torch_neuronx")
    assert found.level is Level.COMPILER
    assert "as the native PyTorch of SDK 2.32 and later does" in found.why_no_model
    assert "look-alike" not in found.why_no_model
    assert "uninstall" not in found.why_no_model


def test_the_package_nki_is_asked_for_by_builds_with_kernels_alone(
    base: Path, compiler: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """SDK 2.26.1, the last with an engine that loads a pair, has no such package."""
    fake_sdk.install(monkeypatch)
    for name in ("nki", "nki.isa"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [])
    assert toolchain.find("reference").level is Level.FULL
    found = toolchain.find("nki")
    assert (found.level, found.why_no_model) == (Level.COMPILER, "nki not installed")
    monkeypatch.delitem(sys.modules, "torch_neuronx")
    assert toolchain.find().why_no_model == "torch-neuronx not installed"


def test_a_compiler_without_its_program_is_a_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "neuronxcc", fake_sdk.module("neuronxcc"))
    found = toolchain.find()
    assert found.level is Level.NONE
    assert [s.partition(" ")[0] for s in found.look_alikes] == ["neuronx-cc"]


# as NxDI 0.9 printed them, for a prompt and for a step
OF_A_PROMPT = (
    "--auto-cast=none --model-type=transformer  --tensorizer-options='--enable-ccop-compute-overlap "
    "--cc-pipeline-tiling-factor=2 --vectorize-strided-dma ' --lnc=2 -O1  --internal-hlo2tensorizer-options='"
    " --modular-flow-mac-threshold=10  --verify-hlo=true' "
)
OF_A_STEP = (
    "--auto-cast=none --model-type=transformer  --tensorizer-options='--enable-ccop-compute-overlap "
    "--cc-pipeline-tiling-factor=1 --vectorize-strided-dma ' --lnc=2 -O2  --internal-hlo2tensorizer-options='"
    "--verify-hlo=true' "
)


def test_nxdi_s_flags_are_its_own_to_the_blank_and_by_choice() -> None:
    assert NXDI_FLAGS == {PREFILL: OF_A_PROMPT, FUSED: OF_A_STEP, DECODE: OF_A_STEP}
    assert read_recipe('{"compiler_flags": "nxdi"}').compiler_flags == dict.fromkeys(NXDI_FLAGS, "nxdi")
    assert flags_of(dict.fromkeys(NXDI_FLAGS, "nxdi")) == NXDI_FLAGS


def test_the_default_flags_are_documented_ones() -> None:
    """Those of the reference guide of SDK 2.32; the rules for integers where the compiler knows them."""
    line = "--model-type transformer --auto-cast none -O2 --lnc 2"
    assert set(DEFAULT_FLAGS.values()) == {line}
    assert flags_of({}, "2.26.6360.0+abc") == flags_of({}, "(unknown version)") == DEFAULT_FLAGS
    for version in ("2.27.5334.0", "2.28.7631.0+f4"):
        assert set(flags_of({}, version).values()) == {
            f"{line} --native-int64=disabled --implicit-integer-downcast=none"
        }
    assert flags_of({FUSED: "-O1"}, "2.28.7631.0")[FUSED] == "-O1"


@pytest.mark.parametrize("flag", ["--lnc=1", "--lnc 1", "--logical-nc-config 1", "-lnc 1"])
def test_flags_for_other_cores_than_the_kernels_are_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"for 1 cores and its kernels have {LNC}, which the compiler r.*EVRF066"):
        flags_of({PREFILL: f"-O3 {flag}"})


def test_no_other_file_imports_the_sdk() -> None:
    sdk = re.compile(r"import.*\b(torch_neuronx|torch_xla|libneuronxla|neuronxcc|neuronx_distributed\w*)\b")
    root = Path(toolchain.__file__).parents[2]
    rooms = ("model", "compile", "bench", "deploy", "nki_kernels")
    sources = [f for room in rooms for f in (root / room).rglob("*.py")]
    found = {str(f.relative_to(root)) for f in sources if sdk.search(f.read_text(encoding="utf-8"))}
    assert found == {"compile/neuron/sdk.py", "compile/neuron/xla_check/lower.py"}


def test_flags_are_the_default_ones_or_by_tag() -> None:
    assert flags_of({}) == DEFAULT_FLAGS
    assert flags_of({FUSED: "-O3"}) == DEFAULT_FLAGS | {FUSED: "-O3"}
    with pytest.raises(UserError, match="compiler_flags has 'fused'"):
        flags_of({"fused": "-O3"})


def test_three_graphs_of_a_bucket_have_a_tag_of_nxdi_s() -> None:
    """A prompt's, the step of the largest k and the step of 0: no shorter prompt, none asking or without filters."""
    of_pair = BuildSpec(k="3,7", max_len=128).bundle
    tagged = {g.key: tag for g in make_plan(of_pair).graphs if (tag := nxdi_tag(g.key, of_pair))}
    assert tagged == {
        GraphKey(Stage.PREFILL, 7, 128, rows=128): PREFILL,
        GraphKey(Stage.STEP, 7, 128): FUSED,
        GraphKey(Stage.STEP, 0, 128): DECODE,
    }


def test_logical_cores_are_those_of_the_neuron_config(base: Path) -> None:
    assert json.loads(neuron_config.render(spec(base).bundle))["neuron_config"]["logical_nc_config"] == LNC


def test_nothing_found_leaves_a_build_as_it_was(base: Path) -> None:
    bundle = read_bundle(build(spec(base, "bare", **SMALL)))
    assert bundle.manifest.compiler == Compiler()
    with pytest.raises(UserError, match="toolchain neuron needs neuronx-cc"):
        build(spec(base, "asked", toolchain="neuron"))


def test_the_compiler_alone_makes_neffs(base: Path, compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = build(spec(base, "neffs", **SMALL))
    bundle = read_bundle(out)
    compiled = bundle.manifest.compiler
    assert (compiled.toolchain, compiled.neff, compiled.flags) == ("compiler", "neff", DEFAULT_FLAGS)
    assert "this bundle gets NEFFs and no model.pt: torch-neuronx, " in capsys.readouterr().err
    doctor([str(out)])
    for graph in bundle.graphs:
        assert (out / f"neff/{graph.key.name}.neff").read_bytes()[:4] == b"NEFF"
        log = (out / f"logs/{graph.key.name}.txt").read_text(encoding="utf-8")
        assert "--target=trn2" in log
        assert "--model-type transformer --auto-cast none -O2 --lnc 2" in log
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.neff")}
    build(spec(base, "neffs", **SMALL, compiler_flags={FUSED: "--lnc=2 -O3"}))
    changed = [p.name for p, time in before.items() if p.stat().st_mtime_ns != time]
    # the halves of a step are fused graphs too
    own = {f"{name}_bk128.neff" for name in ("step_k1", "step_k1_unfiltered", "draft_k1_asking", "verify_k1_asking")}
    assert set(changed) == own, "other flags compile their own graphs alone"
    build(spec(base, "neffs", **SMALL, toolchain="cpu"))
    assert not list(out.rglob("*.neff")), "what a bundle does not list is not left in its folder"
    assert damage(read_bundle(out)) == []


def test_a_graph_that_the_compiler_refuses_is_a_sentence_and_the_rest_is_kept(base: Path, compiler: Path) -> None:
    fake_sdk.write_compiler(compiler, fails="step_k0")
    with pytest.raises(UserError, match=r"ended with 1 on step_k0.* said: \[F137\] the graph is too large; read"):
        build(spec(base, "refused", **SMALL))
    kept = {p: p.stat().st_mtime_ns for p in (base / "refused").rglob("*.neff")}
    assert len(kept) == 7
    fake_sdk.write_compiler(compiler)
    build(spec(base, "refused", **SMALL))
    assert all(p.stat().st_mtime_ns == time for p, time in kept.items())


def test_a_log_that_is_gone_does_not_end_a_build(base: Path, compiler: Path) -> None:
    """As after a forced or resumed build whose graph the compiler took from its cache."""
    out = build(spec(base, "gone", **SMALL))
    for log in (*out.rglob("step_k1_bk128.txt"), *out.rglob("log-neuron-cc.txt")):
        log.unlink()
    assert damage(read_bundle(build(spec(base, "gone", **SMALL)))) == []
    assert (out / "logs/step_k1_bk128.txt").read_text(encoding="utf-8") == "the compiler left no log-neuron-cc.txt\n"


def test_flags_that_the_compiler_does_not_know_end_the_build(base: Path, compiler: Path) -> None:
    with pytest.raises(UserError, match="unrecognized arguments: --lncc=2"):
        build(spec(base, "unknown", **SMALL, compiler_flags=dict.fromkeys(DEFAULT_FLAGS, "--lncc=2")))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_whole_sdk_makes_a_model(base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sdk.install(monkeypatch)
    out = build(spec(base, "model", max_len=256))
    bundle, builder = read_bundle(out), fake_sdk.ModelBuilder.built[-1]
    assert (bundle.manifest.compiler.toolchain, bundle.manifest.compiler.neff) == ("full", "model.pt")
    assert {"model.pt", "logs/step_k3_bk256.txt", "logs/step_k3_bk256.hlo"} <= bundle.files.keys()
    doctor([str(out)])
    torch.jit.load(str(out / "model.pt"))
    assert (builder.tp, builder.lnc, builder.groups) == (1, LNC, set())
    assert {key: e["flags"] for key, e in builder.added.items()} == {t: DEFAULT_FLAGS[t] for t in NXDI_TAGS}
    assert {key: e["priority"] for key, e in builder.added.items()} == {PREFILL: None, FUSED: 0}
    # NxDI's tuple: ids, mask, positions, slots, sampling parameters, and two that are not ours
    shapes = [[list(t.shape) for t in e] for e in builder.added[FUSED]["inputs"]]
    assert shapes == [[[2, 1], [2, s], [2, 1], [2], [2, 3], [2], [2]] for s in (128, 256)]
    assert [t.dtype for t in builder.added[FUSED]["inputs"][0]] == [torch.int32] * 4 + [torch.float32] + [
        torch.int32
    ] * 2
    other = {PREFILL: "-O3 --lnc=2"}
    again = read_bundle(build(spec(base, "model", max_len=256, compiler_flags=other)))
    assert again.manifest.compiler.flags == {PREFILL: "-O3 --lnc=2", FUSED: DEFAULT_FLAGS[FUSED]}
    assert fake_sdk.ModelBuilder.built[-1].added[PREFILL]["flags"] == "-O3 --lnc=2"
    # the target alone has the fused step's input shapes, which the real builder would route to one of them
    monkeypatch.setattr(toolchain, "NXDI_TAGS", (FUSED, DECODE))
    with pytest.raises(AssertionError, match="two tags have one list of input shapes"):
        toolchain.build_model(make_plan(spec(base).bundle), out / "x", out / "work", DEFAULT_FLAGS)


def test_a_tracer_that_would_drop_all_reduces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla returns the input where it sees one rank: NxD's builder tells it of all of them."""
    fake_sdk.install(monkeypatch)
    monkeypatch.setattr(sys.modules["torch_xla.runtime"], "world_size", lambda: 1)
    with pytest.raises(
        UserError, match="torch_xla sees 1 ranks while a graph of 2 is traced, and of one rank it drops"
    ):
        toolchain.device_ops(2).all_reduce(torch.ones(3))
    assert toolchain.device_ops(1).all_reduce(torch.ones(3)).tolist() == [1, 1, 1]


class SlotSeeds:
    """The bundle's graphs with the noise of model.pt: keyed by the slot and the prompts that it has had."""

    def __init__(self, graphs: XlaRunner) -> None:
        self.graphs, self.counts = graphs, Counter[int]()

    def run(self, key: GraphKey, inputs: Any) -> StepOutputs:
        slots = [int(slot) for slot in inputs.seq_ids]
        if key.is_prefill:
            self.counts.update(slots)
        seeds = np.array([(slot, self.counts[slot]) for slot in slots], np.int32)
        return self.graphs.run(key, inputs._replace(seeds=seeds))

    def draft(self, key: GraphKey, inputs: Any) -> Any:
        return self.graphs.draft(key, inputs)


class Ranks(EagerRanks):
    """Modules of every rank as a runner of the engine."""

    def __init__(self, path: Path, tp: int, base: Path, **changes: object) -> None:
        plan = make_plan(spec(base, tp=tp, **changes).bundle)
        backing = backing_of(plan.spec.kernels, simulated.serve)
        super().__init__(plan, NXDI_TAGS, [load_file(path / shard_file(rank)) for rank in range(tp)], backing)

    def run(self, key: GraphKey, inputs: Any) -> StepOutputs:
        tag = PREFILL if key.is_prefill else FUSED
        given = [torch.from_numpy(np.asarray(x).copy()) for x in inputs[:5]]
        nothing = torch.zeros(given[0].shape[0], dtype=torch.int32)
        return StepOutputs(*(t.numpy() for t in self(tag, [*given, nothing, nothing])))

    def draft(self, key: GraphKey, inputs: Any) -> None:
        """Nothing: a prompt's module is both models'."""


def test_two_requests_that_follow_each_other_in_one_slot_meet_other_noise(base: Path) -> None:
    path = build(spec(base, "slots", **SMALL))
    request = Request((5, 9, 2, 7), Params(2.0), max_new_tokens=12)
    first, second = (
        r.ids for r in Engine(Ranks(path, 1, base, **SMALL), engine_config(read_bundle(path))).run([request] * 2)
    )
    assert first != second
    again = Engine(Ranks(path, 1, base, **SMALL), engine_config(read_bundle(path))).run([request] * 2)
    assert [r.ids for r in again] == [first, second], "and the same noise in the same order"


def test_the_module_for_nxdi_emits_what_the_bundle_emits(base: Path) -> None:
    """On two ranks; on one: test_nxdi_host.py."""
    # NxDI's host gives a prompt whole
    changes: dict[str, Any] = {"tp": 2, "chunks": ()}
    path = untraced(spec(base, "same", **changes))
    bundle = read_bundle(path)
    # the last one reaches the end of the cache
    requests = [
        Request((5, 9, 2, 7), max_new_tokens=6),
        Request((8, 1), Params(0.9, seed=3), max_new_tokens=8),
        Request((3, 3, 4), Params(1.2, top_k=9, top_p=0.8), max_new_tokens=8),
        Request((6, 2, 1, 1, 9) * 24, Params(0.7), max_new_tokens=20),
    ]

    def ids(runner: Any) -> list[list[int]]:
        return [r.ids for r in Engine(runner, engine_config(bundle)).run(requests)]

    graphs = AsTheyRun(bundle)
    expected = ids(SlotSeeds(graphs))
    assert ids(Ranks(path, base=base, **changes)) == expected
    assert ids(graphs) != expected, "seeds have a say"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_module_for_nxdi_carries_groups_of_ranks(
    base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft on 2 of 4 ranks: the tokens of the bundle on one rank."""
    changes = {"tp": 4, "draft_tp": 2, "max_len": 256, "chunks": ()}
    with monkeypatch.context() as patch:
        fake_sdk.install(patch)
        path = untraced(spec(base, "groups", **changes))
        assert fake_sdk.ModelBuilder.built[-1].groups == {2, 4}
    alone = read_bundle(untraced(spec(base, "alone", max_len=256, chunks=())))
    requests = [
        Request((5, 9, 2, 7), Params(0.9, seed=3), max_new_tokens=6),
        # from the first block into the second
        Request((6, 2, 1, 1, 9) * 25, max_new_tokens=12),
        Request((6, 2, 1, 8) * 40, Params(1.1), max_new_tokens=6),
    ]

    def ids(runner: Any) -> list[list[int]]:
        return [r.ids for r in Engine(runner, engine_config(alone)).run(requests)]

    ranks = Ranks(path, base=base, **changes)
    expected = ids(SlotSeeds(AsTheyRun(alone)))
    assert ids(ranks) == expected


class Nxd(torch.nn.Module):
    """NxDModel's initialize: weights of every rank, and the first rank as an int32 tensor of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.zeros(2)

    @torch.jit.export
    def initialize(self, weights: list[dict[str, torch.Tensor]], start_rank_tensor: torch.Tensor) -> None:
        assert start_rank_tensor.dtype == torch.int32
        assert start_rank_tensor.shape == [1]
        self.weight = weights[0]["w"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Executor(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nxd_model = Nxd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nxd_model(x)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_saved_model_is_loaded_with_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.jit.save(torch.jit.script(Executor()), str(tmp_path / "model.pt"))
    with pytest.raises(ImportError, match="torch_neuronx"):
        toolchain.run_model(tmp_path / "model.pt", [])
    fake_sdk.install(monkeypatch)
    model = toolchain.run_model(tmp_path / "model.pt", [{"w": torch.tensor([2.0, 3.0])}])
    assert model(torch.ones(2)).tolist() == [2, 3]


def _append(ops: Any, positions: list[list[int]]) -> torch.Tensor:
    cache, new = torch.arange(48.0).reshape(2, 1, 6, 4), -torch.arange(1.0, 25).reshape(2, 1, 3, 4)
    at = torch.tensor(positions, dtype=torch.int32)
    return ops.append(cache, new, torch.tensor([[1], [0]], dtype=torch.int32), at)


POSITIONS = [[[0, 1, 2], [3, 4, 5]], [[4, 5, 6], [-1, 0, 9]], [[6, 7, 8], [5, 6, 7]], [[-3, -2, -1], [7, 2, -1]]]


@pytest.mark.parametrize("positions", POSITIONS)
def test_append_writes_the_same_bits_and_nothing_outside_on_every_route(positions: list[list[int]]) -> None:
    """Beyond a cache the eager one drops a row; a scatter of a device may end the run there."""
    same: Callable[[torch.Tensor], torch.Tensor] = fake_sdk.same
    cache, new = torch.arange(48.0).reshape(2, 1, 6, 4), -torch.arange(1.0, 25).reshape(2, 1, 3, 4)
    at, slots = torch.tensor(positions, dtype=torch.int32), torch.tensor([[1], [0]], dtype=torch.int32)
    expected = EAGER.append(cache, new, slots, at)
    assert torch.equal(StaticOps(lambda ranks: (same, same)).append(cache, new, slots, at), expected)

    def traced(*given: torch.Tensor) -> torch.Tensor:
        return TracedOps(1).append(*given)

    arguments = [jnp.asarray(t.numpy()) for t in (cache, new, slots, at)]
    lowered: Any = jax.jit(lambda *a: interop.call_torch(traced, *a)).lower(*arguments)
    assert np.array_equal(lowered.compile()(*arguments), expected.numpy())
    module = hlo.parse(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    places = _indices_of_the_scatter(module, [np.asarray(a) for a in arguments])
    limits = [cache.shape[0], cache.shape[2]]
    assert (places >= 0).all()
    assert (places < limits).all(), "a row is written outside of the cache"


def _indices_of_the_scatter(module: Any, arguments: list[Any]) -> Any:
    """(rows, 2): what a graph's one scatter gets as its indices, by a run of the graph that returns them."""
    ((computation, scatter),) = [(c, i) for c in module.computations for i in c.instructions if i.opcode == "scatter"]
    assert computation.id == module.entry_computation_id, "the scatter is in a function that was not inlined"
    indices = next(i for i in computation.instructions if i.id == scatter.operand_ids[1])
    computation.root_id = indices.id
    for shape in (computation.program_shape, module.host_program_shape):
        shape.result.CopyFrom(indices.shape)
    executable = pjrt.compile_hlo(module.SerializeToString(), pjrt.devices_of("cpu", 1))
    placed = [jax.device_put(a, pjrt.devices_of("cpu", 1)[0]) for a in arguments]
    return np.asarray(executable.execute_sharded(placed).disassemble_into_single_device_arrays()[0][0]).reshape(-1, 2)
