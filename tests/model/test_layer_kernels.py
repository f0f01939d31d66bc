"""The model on simulated kernels, with fused layers, against torch; launches in graphs.

tests/compile/test_ranks.py compares tokens of graphs with simulated kernels.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.device_check.kernels import CASES
from compile.graph.trace import lower_graphs
from model.cache import AttentionMetadata
from model.config import PRESETS
from model.context import Context
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.layers import RMSNorm
from model.nki import custom_calls, simulated
from model.nki.context import NkiContext, make_context
from model.nki.fused_layer import group_sizes
from model.nki.launches import CUSTOM_CALL_TARGET, Launch, Result, from_text, to_text
from model.nki.table import KERNELS
from model.ops import EAGER
from model.qwen3 import Qwen3
from model.rope import rotation
from nki_kernels.limits import SPARE_PAGES
from tests.compile.tiny import spec, write_model
from tests.model.paged import empty_caches
from trnspec.bundle import hlo
from trnspec.bundle.plan import make_plan

# the smallest Qwen3 that the fused kernels support
SMALL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 501}
CONFIG = dataclasses.replace(PRESETS["Qwen/Qwen3-0.6B"], **SMALL, num_attention_heads=4, num_key_value_heads=2)
TABLE = torch.tensor([[3, 6], [5, 1]], dtype=torch.int32)


class Launches(list[Launch]):
    """A launcher that simulates and records the launches."""

    def __call__(self, launch: Launch, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self.append(launch)
        return simulated.serve(launch, tensors)

    def __hash__(self) -> int:
        return id(self)


def model_of(ctx: Context, dtype: torch.dtype, layers: int = 2) -> Qwen3:
    """The same random weights on every backend."""
    torch.manual_seed(1)
    model = Qwen3(dataclasses.replace(CONFIG, num_hidden_layers=layers), ctx).to(dtype)
    for name, p in model.named_parameters():
        if p.is_floating_point():
            torch.nn.init.normal_(p, 1.0 if name.endswith("norm.weight") else 0.0, 0.06)
    return ctx.fuse(model)


def rows(first: int, count: int, table: torch.Tensor) -> AttentionMetadata:
    return AttentionMetadata(torch.arange(first, first + count, dtype=torch.int32)[None], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_pass_through_fused_layers(dtype: torch.dtype) -> None:
    """Prefills of 128 and 256 rows, then a step of two sequences: logits within rounding, all by kernels."""
    launches, outs = Launches(), []
    for ctx in (Context(), NkiContext(1, EAGER, launches)):
        model, caches = model_of(ctx, dtype), empty_caches(CONFIG, 1, 8, dtype)
        for slot, count in ((0, 128), (1, 256)):
            ids = torch.arange(count, dtype=torch.int32)[None] * (slot + 3) % 501
            _, caches, _ = model.hidden(ids, caches, rows(0, count, TABLE[slot : slot + 1]))
        positions = torch.tensor([[40], [200]], dtype=torch.int32) + torch.arange(5, dtype=torch.int32)
        ids = torch.arange(10, dtype=torch.int32).view(2, 5)
        x, caches, _ = model.hidden(ids, caches, AttentionMetadata(positions, TABLE))
        outs.append(model.logits(x))
        assert all(not t[[0, 2, 4, 7]].any() for cache in caches for t in cache)
    # about a dozen roundings per layer
    bound = 24 * torch.finfo(dtype).eps * outs[0].abs().max()
    assert (outs[0] - outs[1]).abs().max() <= bound
    assert launches.pop().kernel == "prompt_product", "the head"
    expected = {"append_rows": 2, "prompt_attention": 2, "prompt_qkv": 2, "prompt_product": 2, "prompt_mlp": 1}
    # the decode kernels support the 128 rows of the first prefill
    expected |= {"decode_attention": 1, "decode_mlp": 2}
    per_layer = {name: n / CONFIG.num_hidden_layers for name, n in Counter(x.kernel for x in launches).items()}
    assert per_layer == expected


@torch.no_grad()
def test_a_block_attends_all_of_its_rows() -> None:
    """With packed attention, as a DFlash draft; causal rows differ (negative control)."""
    outs, positions = [], torch.tensor([[40], [200]], dtype=torch.int32) + torch.arange(5, dtype=torch.int32)
    for ctx in (Context(), NkiContext(1, EAGER, simulated.serve)):
        model, ids = model_of(ctx, torch.float32, 1), torch.arange(10, dtype=torch.int32).view(2, 5)
        for attend_to_B1 in (positions[:, -1:], None):
            meta = AttentionMetadata(positions, TABLE, attend_to_B1)
            outs.append(model.hidden(ids, empty_caches(model.config, 1, 8, torch.float32), meta)[0])
    assert (outs[0] - outs[2]).abs().max() < 1e-4 < (outs[0] - outs[1]).abs().max()


@torch.no_grad()
def test_keys_and_values_take_no_products_of_queries() -> None:
    """Those of normed rows are, within rounding, those of the rows; the queries' blocks are not multiplied."""
    launches = Launches()
    layer: Any = model_of(NkiContext(1, EAGER, launches), torch.bfloat16).layers[0]
    x, rope = torch.randn(2, 3, 256).bfloat16(), rotation(torch.arange(6, dtype=torch.int32).view(2, 3), CONFIG)
    _, *expected = layer.self_attn.qkv(x, rope)
    actual = layer.self_attn.key_value(RMSNorm.forward(layer.input_layernorm, x), rope)
    torch.testing.assert_close(actual, tuple(expected), rtol=0, atol=16 * torch.finfo(x.dtype).eps)
    heads, kv_heads = CONFIG.num_attention_heads, CONFIG.num_key_value_heads
    shapes = [(2, n, 3, CONFIG.head_dim) for n in (heads, kv_heads, kv_heads)]
    assert [r.shape for launch in launches for r in launch.results] == [*shapes, (6, 2 * kv_heads * CONFIG.head_dim)]


@torch.no_grad()
def test_launches_of_several_layers_end_where_a_drafter_taps() -> None:
    """Tapped states, outputs and caches have the bits of single-layer launches; groups have 2, 1 and 2 layers."""
    actual, kernels = [], []
    for layers in (1, 2):
        launches = Launches()
        model = model_of(NkiContext(1, EAGER, launches, layers), torch.bfloat16, 5)
        model.taps = (0, 2, 3, 5)
        positions = torch.tensor([[40], [200]], dtype=torch.int32) + torch.arange(5, dtype=torch.int32)
        caches = empty_caches(model.config, 1, 8, torch.bfloat16)
        ids = torch.arange(10, dtype=torch.int32).view(2, 5)
        x, caches, taps = model.hidden(ids, caches, AttentionMetadata(positions, TABLE))
        assert taps is not None
        actual.append([x, taps, *(t for cache in caches for t in cache)])
        kernels.append([(x.kernel, len(x.arguments[1]) if x.kernel == "decode_layers" else 0) for x in launches])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))
    halves = [("decode_attention", 0), ("decode_mlp", 0)]
    assert kernels == [halves * 5, [("decode_layers", 2), *halves, ("decode_layers", 2)]]


def test_how_many_layers_each_launch_has() -> None:
    assert group_sizes(28, 16) == [16, 12]
    assert group_sizes(64, 16, (2, 32, 61)) == [2, 16, 14, 16, 13, 3]
    assert group_sizes(3, 16, (0, 3)) == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_prompt(dtype: torch.dtype) -> None:
    """Chunks at several starts, the last one with padding beyond the table: outputs within rounding of torch, pools
    bitwise equal except for the spare blocks. tests/nki_kernels/attention covers the rows of a step."""
    torch.manual_seed(0)
    contexts = Context(8), NkiContext(8, EAGER, simulated.serve)
    pools = [empty_caches(PRESETS["Qwen/Qwen3-0.6B"], 8, 20, dtype)[0] for _ in contexts]
    table = torch.arange(9, 1, -1, dtype=torch.int32)[None]
    for first, count in ((0, 256), (200, 128), (384, 512), (800, 256), (950, 128)):
        q, k, v = (torch.randn(1, heads, count, 128).to(dtype) for heads in (2, 1, 1))
        outs = []
        for i, ctx in enumerate(contexts):
            out, pools[i] = ctx.attention(q, k, v, pools[i], rows(first, count, table))
            outs.append(out.float()[:, :, : 1024 - first])
        # relative to the largest output: torch sums in fp32 in an unspecified order
        assert (outs[0] - outs[1]).abs().max() <= 16 * torch.finfo(dtype).eps * outs[0].abs().max()
    assert all(torch.equal(a[:-SPARE_PAGES], b[:-SPARE_PAGES]) for a, b in zip(*pools, strict=True))


def test_more_rows_than_partitions_are_refused() -> None:
    q, k, v = (torch.zeros(1, heads, 9, 128) for heads in (16, 1, 1))
    cache = empty_caches(PRESETS["Qwen/Qwen3-0.6B"], 8, 20, torch.float32)[0]
    with pytest.raises(UserError, match=r"has 144 rows, at most 128 .* lower k, or use --kernels reference"):
        make_context("nki", 8).attention(q, k, v, cache, rows(0, 9, torch.ones(1, 8, dtype=torch.int32)))


def test_a_launch_survives_as_text() -> None:
    launch = Launch("gumbel_noise", ["#0", "#1", "#2", 17, None, 0.5], (Result((2, 3), "float32"),), (1,))
    operands = [Result((1, 2), "int32"), Result((4,), "bfloat16")]
    assert from_text(to_text(launch, operands)) == (launch, operands)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with head dim 64."""
    folder = tmp_path_factory.mktemp("simulated")
    sizes: dict[str, Any] = {"scale": 0.3, "hidden_size": 64, "head_dim": 64, "eos_token_id": None}
    for name, layers in (("target", 2), ("draft", 1)):
        write_model(folder / name, 5, num_hidden_layers=layers, **sizes)
    return folder


@pytest.mark.parametrize("without", [(), ("verify_attention", "accept_drafts")], ids=str)
def test_the_graph_has_the_calls_but_those_of_kernels_that_are_left_out(folder: Path, without: tuple[str, ...]) -> None:
    """Attention, noise, sampling and acceptance are custom calls with the compiler's target name."""
    plan = make_plan(spec(folder, kernels="nki", without=without).bundle)
    (proto,) = (p for _, p in lower_graphs(plan.spec, [plan.by_key[GraphKey(Stage.STEP, 3, 128)]]))
    kernels = ("verify_attention", "gumbel_noise", "coupled_sample", "weights_above", "accept_drafts")
    assert {k for k in kernels if f'"kernel": "{k}"'.encode() in proto} == {*kernels} - {*without}


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if "bits" not in case])
def test_kernels_that_are_left_out_are_operations_of_the_graph(case: str) -> None:
    """The results are torch's within rounding, not in bits; `no_launch` would raise for a launch."""
    nki = make_context("nki", 1, layers=3, without=tuple(KERNELS))
    for actual, expected in zip(CASES[case](nki), CASES[case](Context()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_failure_inside_a_call_is_raised_after_the_run() -> None:
    """Once: the next run has no error."""
    custom_calls.register()
    custom_calls._serve(0, None, b"{}", 2, 0)
    with pytest.raises(UserError, match="a simulated kernel rejected its operands: 'results'; build the bundle again"):
        custom_calls.check([])
    custom_calls.check([])


@pytest.mark.slow
def test_no_two_graphs_with_kernels_have_the_same_launches(folder: Path) -> None:
    """Except PREFILL_LOGPROBS, which adds HLO operations to the launches of PREFILL."""
    plan = make_plan(spec(folder, kernels="nki", batch=1, max_len=512, chunks=(128, 512)).bundle)
    graphs = [graph for graph in plan.graphs if graph.key.stage is not Stage.PREFILL_LOGPROBS]
    launches = {tuple(_launches(proto)) for _, proto in lower_graphs(plan.spec, graphs)}
    assert len(launches) == len(graphs) == 8


def _launches(proto: bytes) -> list[bytes]:
    calls = (
        i for c in hlo.parse(proto).computations for i in c.instructions if i.custom_call_target == CUSTOM_CALL_TARGET
    )
    return sorted(call.backend_config for call in calls)
