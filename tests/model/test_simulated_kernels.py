"""The whole model with simulated NKI kernels, called from the executed graph: the reference's tokens.

The two backings round exp, log and sums differently, so that a near-tie could fall on the other side; none does here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile.graph.trace import lower_graph
from model.backing import REFERENCE
from model.cache import Placement, empty_caches
from model.config import PRESETS
from model.errors import UserError
from model.filters import Filters
from model.graph_key import GraphKey, Stage
from model.nki import custom_calls, simulated
from model.nki.backing import backing_of
from model.nki.filter_floor import filter_floor
from model.nki.kernels import NkiKernels
from model.nki.launches import TARGET, Launch, Result, from_text, to_text
from model.ops import EAGER
from model.parallel import Parallel
from model.sampling import Sampling
from nki_kernels.limits import NO_FLOOR
from nki_kernels.sampling import law
from tests.compile.tiny import spec, write_model
from tests.last_few import last_few
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner

NKI, SIMULATED = backing_of("nki", simulated.serve), NkiKernels(simulated.serve)
# the one that filters is the longest: beside it no step needs the graph without filters, which XLA would compile too
REQUESTS = [
    Request((9, 2, 7), Params(), 6),
    Request(tuple(range(60, 20, -1)), Params(0.8, seed=7), 6),
    Request((1, 2, 3, 1, 2, 3), Params(1.3, seed=3), 5),
    Request((4,), Params(1.0, 20, 0.9, 0.02, 2**63 + 11), 9),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose draft is right now and then, with the head dim that attention's kernel takes as it is."""
    folder = tmp_path_factory.mktemp("simulated")
    sizes = {"scale": 0.3, "hidden_size": 64, "head_dim": 64, "eos_token_id": None}
    for name, layers in (("target", 2), ("draft", 1)):
        write_model(folder / name, 5, num_hidden_layers=layers, **sizes)  # type: ignore[arg-type]
    return folder


@last_few
def _graphs(folder: Path, kernels: str, k: int, batch: int, dtype: str = "fp32") -> XlaRunner:
    plan = spec(folder, f"{kernels}{k}-{batch}-{dtype}", kernels=kernels, k=k, batch=batch, dtype=dtype)
    return AsTheyRun(read_bundle(untraced(plan)))


def _run(g: XlaRunner, speculative: bool, requests: list[Request]) -> list[Any]:
    return Engine(g, engine_config(g.bundle), speculative).run(requests)


def _ids(g: XlaRunner, speculative: bool = True, requests: list[Request] = REQUESTS) -> list[list[int]]:
    return [r.ids for r in _run(g, speculative, requests)]


@pytest.mark.parametrize(("k", "batch"), [(7, 4), (3, 2)])
def test_tokens_are_the_reference_s(folder: Path, k: int, batch: int) -> None:
    """Greedy, drawn and filtered requests, as many at a time as there are, and fewer."""
    expected = _ids(_graphs(folder, "reference", 3, 2))
    results = _run(_graphs(folder, "nki", k, batch), True, REQUESTS)
    assert [r.ids for r in results] == expected
    assert 0 < sum(sum(r.accepted) for r in results) < sum(sum(r.drafted) for r in results)
    assert [len(ids) for ids in expected] == [request.max_new_tokens for request in REQUESTS]


@pytest.mark.parametrize(("k", "batch", "dtype"), [(7, 1, "bf16"), (3, 2, "fp32")])
def test_the_target_alone_emits_the_same(folder: Path, k: int, batch: int, dtype: str) -> None:
    """In bf16 alone, without filters: graphs of many drafts take XLA longest."""
    requests = REQUESTS[:3] if dtype == "bf16" else REQUESTS
    g = _graphs(folder, "nki", k, batch, dtype)
    assert _ids(g, False, requests) == _ids(g, True, requests)


def test_the_graph_holds_the_calls(folder: Path) -> None:
    """Each layer's attention, the noise, the draws and the acceptance are calls by the compiler's name."""
    plans = (make_plan(spec(folder, kernels=kernels).bundle) for kernels in ("nki", "reference"))
    step = GraphKey(Stage.STEP, 3, 128)
    fused, plain = (lower_graph(plan.spec, plan.by_key[step]) for plan in plans)
    assert TARGET.encode() in fused
    for kernel in ("verify_attention", "gumbel_noise", "coupled_sample", "weights_above", "accept_drafts"):
        assert f'"kernel": "{kernel}"'.encode() in fused
    assert TARGET.encode() not in plain


def test_a_failure_inside_a_call_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(launch: Launch, arrays: Any) -> Any:
        raise ValueError("the floor is on fire")

    g = _graphs(folder, "nki", 1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(custom_calls, "simulate", broken)
        with pytest.raises(UserError, match="a simulated kernel refused its operands: the floor is on fire"):
            _ids(g)
    assert _ids(g, True, REQUESTS[:1]) == _ids(_graphs(folder, "reference", 3, 2))[:1]


def test_a_launch_survives_as_text() -> None:
    launch = Launch("gumbel_noise", ["#0", "#1", "#2", 17, None, 0.5], (Result((2, 3), "float32"),), (1,))
    operands = [Result((1, 2), "int32"), Result((4,), "bfloat16")]
    assert from_text(to_text(launch, operands)) == (launch, operands)


def _filters(rows: int, seed: int) -> Sampling:
    rng = np.random.default_rng(seed)
    columns = (
        rng.choice([0.5, 1.0, 1.7], rows),
        rng.choice([0, 1, 3, 17, 400], rows),
        rng.choice([1.0, 0.9, 0.3, 0.01], rows),
        rng.choice([0.0, 0.0, 0.05, 1.0], rows),
    )
    temperature, *filters = (torch.tensor(c, dtype=torch.float32) for c in columns)
    return Sampling(temperature, torch.zeros(rows, 2, dtype=torch.int32), Filters(*filters))


@pytest.mark.parametrize("shape", [(40, 501), (33, 2048), (3, 7)])
def test_the_floor_keeps_what_the_filters_keep(shape: tuple[int, int]) -> None:
    """Exactly the law's ids, ties included; more rows than a launch takes."""
    rows = shape[0]
    for seed, step in ((0, 0.0), (1, 0.25)):
        rng = np.random.default_rng(seed)
        logits = (2 * rng.standard_normal(shape)).astype(np.float32)
        if step:
            logits = np.round(logits / step).astype(np.float32) * np.float32(step)
        draw = _filters(rows, seed).draw(torch.zeros(rows, 1, dtype=torch.int32))
        assert draw.filters
        by = (draw.heat_R, draw.filters)
        floor = filter_floor(EAGER, torch.from_numpy(logits), by, SIMULATED._weights_above).numpy()
        for r in range(rows):
            top_k, top_p, min_p = (float(t[r]) for t in draw.filters)
            row = law.RowParameters(float(draw.temperature_R[r]), int(top_k), top_p, min_p)
            assert np.array_equal(logits[r] >= floor[r], law.kept_ids(logits[r].astype(np.float64), row)), r


def test_no_filter_is_no_floor() -> None:
    off = torch.zeros(2)
    sampling = Sampling(off + 1, torch.zeros(2, 2, dtype=torch.int32), Filters(off, off + 1, off))
    draw = sampling.draw(torch.zeros(2, 1, dtype=torch.int32))
    assert draw.filters
    floor = filter_floor(EAGER, torch.randn(2, 50), (draw.heat_R, draw.filters), SIMULATED._weights_above)
    assert (floor == NO_FLOOR).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_prompt_and_of_rows(dtype: torch.dtype) -> None:
    """Chunks of a prompt, the last longer than the rest of the table, then rows of all sequences, one without blocks:
    within rounding of the reference; pools are equal bit for bit."""
    config, own = PRESETS["Qwen/Qwen3-0.6B"], slice(1, 2)
    torch.manual_seed(0)
    pools = [empty_caches(config, Parallel(8), 20, 128, dtype)[0] for _ in range(2)]
    table = torch.zeros(3, 8, dtype=torch.int32)
    table[1], table[2] = torch.arange(9, 1, -1), torch.arange(11, 19)
    keys, slot = torch.arange(1024, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    chunks = [(slot, table[own], first, count) for first, count in ((0, 256), (256, 128), (384, 512), (800, 256))]
    for slots, blocks, first, count in (*chunks, (None, table, 1000, 8)):
        batch = len(blocks)
        q = torch.randn(batch, 2, count, 128).to(dtype)
        new = tuple(torch.randn(batch, 1, count, 128).to(dtype) for _ in "kv")
        positions = (first + torch.arange(count, dtype=torch.int32)).expand(batch, -1).contiguous()
        placement = Placement(positions, keys, slots, table_BL=blocks)
        outs = []
        for i, backing in enumerate((REFERENCE, NKI)):
            out, pools[i] = backing.kernels.verify_attention(EAGER, q, new, pools[i], placement)  # type: ignore[arg-type]
            outs.append(out.float()[blocks[:, 0] > 0][:, :, : 1024 - first])
        # relative to the largest output: the reference's own sums are in fp32, in an order of the processor's
        assert (outs[0] - outs[1]).abs().max() <= 16 * torch.finfo(dtype).eps * outs[0].abs().max()
    assert all(torch.equal(a, b) for a, b in zip(*pools, strict=True))
