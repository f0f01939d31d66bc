"""Fused layers against the plain ones, and what a launch on a device is given."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from model.backing import REFERENCE
from model.cache import Placement, empty_caches
from model.config import PRESETS
from model.errors import UserError
from model.nki import simulated
from model.nki.context import make_context
from model.nki.fused_layer import launched as layers_of_launches
from model.nki.launches import LNC, Launch, Result
from model.nki.on_device import launch_on_device
from model.nki.table import KERNELS
from model.packing import fused_packing
from model.parallel import Parallel
from model.qwen3 import Qwen3
from model.weights import decoder_weights

SIMULATED = backing_of("nki", simulated.serve)
# the smallest Qwen3 that the fused kernels take
CONFIG = dataclasses.replace(
    PRESETS["Qwen/Qwen3-0.6B"],
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=2,
    vocab_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def models(dtype: torch.dtype) -> tuple[Qwen3, Qwen3]:
    """The same random weights behind both backings."""
    torch.manual_seed(1)
    made = [Qwen3(CONFIG, backing=backing).to(dtype) for backing in (REFERENCE, SIMULATED)]
    for name, p in made[0].named_parameters():
        if p.is_floating_point():
            torch.nn.init.normal_(p, 1.0 if name.endswith("norm.weight") else 0.0, 0.06)
    made[1].load_state_dict(packed(made[0].state_dict()))
    return made[0], made[1]


def packed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights in the layout of the fused kernels."""
    weights = decoder_weights(CONFIG, fused_packing(CONFIG, 1))
    names = ((w, [name.removeprefix("model.") for name, _ in w.parts]) for w in weights)
    made = {w.name: w.pack(*(state[n] for n in parts), CONFIG.head_dim) for w, parts in names if w.pack}
    inside = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return {n: t for n, t in state.items() if n.split(".")[-2] not in inside} | made


def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    real = simulated.simulate

    def counted(launch: Any, operands: Any) -> Any:
        names.append(launch.kernel)
        return real(launch, operands)

    monkeypatch.setattr(simulated, "simulate", counted)
    return names


TABLE = torch.tensor([[3, 6], [5, 1]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_pass_through_fused_layers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 128 and 256 rows, then rows of two sequences: logits within the dtype's rounding, by kernels alone."""
    names = launched(monkeypatch)
    outs = []
    for model in models(dtype):
        caches = empty_caches(CONFIG, Parallel(), 8, 128, dtype)
        keys = torch.arange(256, dtype=torch.int32)
        for slot, rows in ((0, 128), (1, 256)):
            ids = torch.arange(rows, dtype=torch.int32)[None] * (slot + 3) % 512
            slots, table = torch.tensor([slot], dtype=torch.int32), TABLE[slot : slot + 1]
            placement = Placement(keys[None, :rows], keys, slots, table_BL=table)
            _, caches, _ = model.hidden(ids, caches, placement)
        positions = torch.tensor([[40], [200]], dtype=torch.int32) + torch.arange(5, dtype=torch.int32)
        placement = Placement(positions, keys, table_BL=TABLE)
        x, caches, _ = model.hidden(torch.arange(10, dtype=torch.int32).view(2, 5), caches, placement)
        outs.append(model.logits(x))
        assert all(not t[[0, 2, 4, 7]].any() for cache in caches for t in cache)
    # a layer rounds a dozen times on the way
    bound = 24 * torch.finfo(dtype).eps * outs[0].abs().max()
    assert (outs[0] - outs[1]).abs().max() <= bound
    of_prompts = {"append_rows": 2, "prompt_attention": 2, "prompt_product": 4, "prompt_mlp": 1}
    # a prompt of 128 rows fits the kernel of a step
    expected = of_prompts | {"decode_attention": 1, "decode_mlp": 2}
    layers = CONFIG.num_hidden_layers
    assert {name: names.count(name) for name in names} == {name: n * layers for name, n in expected.items()}


@torch.no_grad()
def test_keys_and_values_alone_take_no_products_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit those of a whole product, whose blocks of queries are not multiplied."""
    shapes: list[tuple[int, ...]] = []
    real = simulated.simulate

    def counted(launch: Any, operands: Any) -> Any:
        shapes.extend(result.shape for result in launch.results)
        return real(launch, operands)

    monkeypatch.setattr(simulated, "simulate", counted)
    attention = models(torch.bfloat16)[1].layers[0].self_attn
    rows = torch.randn(2, 3, CONFIG.hidden_size).bfloat16()
    whole, pair = attention.qkv(rows)[1:], attention.kv(rows)  # type: ignore[union-attr, operator]
    assert all(torch.equal(a, b) for a, b in zip(whole, pair, strict=True))
    features = CONFIG.head_dim * (CONFIG.num_attention_heads + 2 * CONFIG.num_key_value_heads)
    assert shapes == [(6, features), (6, features // 2)]


@torch.no_grad()
def test_launches_of_several_layers_end_where_a_drafter_taps() -> None:
    """Tapped states, the last rows and all caches have the bits of the halves; the launches have 2, 1 and 2 layers."""
    config, launches, found = dataclasses.replace(CONFIG, num_hidden_layers=5), list[Launch](), []

    def noted(launch: Launch, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        launches.append(launch)
        return simulated.serve(launch, tensors)

    for most in (1, 2):
        torch.manual_seed(1)
        model = Qwen3(config, backing=backing_of("nki", noted, most)).to(torch.bfloat16)
        for p in model.parameters():
            torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 1.0, 0.06) if p.is_floating_point() else None
        model.taps = (0, 2, 3, 5)
        positions = torch.tensor([[40], [200]], dtype=torch.int32) + torch.arange(5, dtype=torch.int32)
        placement = Placement(positions, torch.arange(256, dtype=torch.int32), table_BL=TABLE)
        caches = empty_caches(config, Parallel(), 8, 128, torch.bfloat16)
        x, caches, taps = model.hidden(torch.arange(10, dtype=torch.int32).view(2, 5), caches, placement)
        assert taps is not None
        found.append([x, taps, *(t for cache in caches for t in cache)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    layers = [len(launch.arguments[1]) if launch.kernel == "decode_layers" else 0 for launch in launches]
    assert [launch.kernel for launch in launches[:10]] == ["decode_attention", "decode_mlp"] * 5
    assert layers[10:] == [2, 0, 0, 2]


def test_how_many_layers_each_launch_has() -> None:
    assert layers_of_launches(64, 16) == [16] * 4
    assert layers_of_launches(28, 16) == [16, 12]
    assert layers_of_launches(64, 16, (2, 32, 61)) == [2, 16, 14, 16, 13, 3]
    assert layers_of_launches(3, 16, (0, 3)) == [3]


def _logits(model: Qwen3, chunks: tuple[tuple[int, int], ...], tables: list[list[int]]) -> torch.Tensor:
    """Logits of rows behind 400 ids, whose chunks (first, rows) were written by one table and are read by another."""
    caches, keys = empty_caches(CONFIG, Parallel(), 10, 128, torch.bfloat16), torch.arange(512, dtype=torch.int32)
    ids, slot = torch.arange(512, dtype=torch.int32)[None] * 7 % 512, torch.zeros(1, dtype=torch.int32)
    written, read = (torch.tensor([t], dtype=torch.int32) for t in tables)
    for first, rows in chunks:
        of_rows = slice(first, first + rows)
        placement = Placement(keys[None, of_rows], keys, slot, table_BL=written)
        _, caches, _ = model.hidden(ids[:, of_rows], caches, placement)
    x, *_ = model.hidden(ids[:, 400:403], caches, Placement(keys[None, 400:403], keys, table_BL=read))
    return model.logits(x)


@torch.no_grad()
def test_bits_do_not_depend_on_blocks_and_chunks() -> None:
    """Random blocks, and chunks that begin anywhere; a swapped block and a block of another request are seen."""
    model = models(torch.bfloat16)[1]
    right = _logits(model, ((0, 512),), [[1, 2, 3, 4]] * 2)
    chunks = ((0, 128), (100, 256), (356, 128))
    assert torch.equal(_logits(model, chunks, [[9, 3, 7, 1]] * 2), right)
    assert not torch.equal(_logits(model, chunks, [[5, 8, 2, 6], [5, 8, 6, 2]]), right)
    assert not torch.equal(_logits(model, chunks, [[5, 8, 2, 6], [5, 8, 2, 4]]), right)


def test_a_device_launch_needs_a_device() -> None:
    launch = Launch("gumbel_noise", ["#0", "#1", 1], (Result((1, 1), "float32"),))
    with pytest.raises(UserError, match="nki is the simulator"):
        launch_on_device(launch, (torch.zeros(1, 2), torch.zeros(1, 1)))


def test_a_device_launch_gives_the_kernel_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the vendor's nki: torch tensors in, results and changed tensors out."""
    seen: list[Any] = []

    def kernel(*arguments: Any) -> Any:
        seen.extend(arguments)
        return arguments[0] + 1

    monkeypatch.setitem(sys.modules, "nki", ModuleType("nki"))
    monkeypatch.setitem(KERNELS, "gumbel_noise", {LNC: kernel})
    x, y = torch.zeros(2), torch.ones(3)
    out = launch_on_device(Launch("gumbel_noise", ["#0", "#1", 5], (Result((2,), "float32"),), (1,)), (x, y))
    assert torch.equal(out[0], x + 1)
    assert out[1] is y
    assert seen[0] is x
    assert seen[1] is y
    assert seen[2:] == [5]
