"""FP8 weights: their numbers, Qwen's block-FP8 checkpoints, what is refused, tokens with and without drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile.spec import BuildSpec
from model.fp8 import quantize
from model.weights import Packing
from tests.compile.test_ranks import PACKED
from tests.compile.tiny import refused, shard_of, spec, write_model
from tests.model.family import AsTheyRun, eager_engine, untraced
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request

NAME = "model.layers.1.mlp.up_proj.weight"
ATTENTION = {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qkvo"}
PROJECTIONS = ATTENTION | {f"model.layers.{i}.mlp.{p}_proj.weight" for i in (0, 1) for p in ("gate", "up", "down")}
REQUESTS = [Request((3, 5, 7), Params(), 16), Request((9, 2, 40, 41, 6), Params(1.0, seed=5), 12)]


def test_numbers_and_scales() -> None:
    """The largest of a channel is 240, all are within half a step; trn2 reads torch's bits as the same numbers."""
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 4, 40)[:, None]
    weight[7] = 0
    numbers, scale = quantize(weight)
    assert torch.equal(numbers.float().abs().amax(1), torch.full((40,), 240.0).index_fill(0, torch.tensor([7]), 0))
    of_trn2 = numbers.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3).astype(np.float32)
    assert np.array_equal(of_trn2, numbers.float().numpy())
    # three bits of mantissa, and steps of 2^-9 below 2^-6
    step = (weight / scale).abs().clamp(min=2.0**-6) * 2.0**-4
    assert ((numbers.float() - weight / scale).abs() <= step * 1.0001).all()


@pytest.mark.parametrize(
    ("number", "sentence"), [(float("nan"), "has NaN or infinity"), (float("inf"), "has NaN or infinity"),
                             (1e-37, "its scale is subnormal")], ids=str,
)  # fmt: skip
def test_what_cannot_be_fp8(number: float, sentence: str, tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", 1)
    tensors = load_file(target / "model.safetensors")
    tensors[NAME][3] = 0
    tensors[NAME][3, 2] = number
    save_file(tensors, target / "model.safetensors")
    checkpoint = Checkpoint(target, spec(tmp_path, k=0).bundle.target_config, fp8=True)
    refused(
        lambda: shard_of(checkpoint, 0, 1, torch.float32, Packing(fp8=True)), NAME, sentence, "without --weights fp8"
    )


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight as Qwen's checkpoints have it: e4m3fn up to 448, a scale for each block; and their product."""
    numbers, product = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    scales = torch.zeros([-(-size // 128) for size in weight.shape])
    for i, j in np.ndindex(*scales.shape):
        block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        scales[i, j] = weight[block].abs().max() / 448
        numbers[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
        product[block] = numbers[block].float() * scales[i, j]
    return numbers, scales, product


def write_blocks(folder: Path) -> dict[str, Tensor]:
    """Put a checkpoint's projections in blocks of FP8; returns the numbers that they stand for."""
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name in PROJECTIONS:
        stored[name], stored[f"{name}_scale_inv"], plain[name] = in_blocks(plain[name])
    save_file(stored, folder / "model.safetensors")
    return plain


def test_a_checkpoint_in_blocks(tmp_path: Path) -> None:
    """The shards of its numbers in fp32, on both of two ranks, which have the scales of the full weights."""
    sizes = PACKED | {"hidden_size": 256, "intermediate_size": 320}
    blocks, plain = (write_model(tmp_path / name, 1, **sizes) for name in ("blocks", "plain"))
    save_file(write_blocks(blocks), plain / "model.safetensors")
    raw = json.loads((blocks / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (blocks / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = BuildSpec(target=str(blocks), k="0").bundle.target_config
    for rank in (0, 1):
        actual, expected = (
            shard_of(Checkpoint(folder, config, fp8=True), rank, 2, torch.bfloat16, Packing(fp8=True))
            for folder in (blocks, plain)
        )
        assert all(torch.equal(actual[n].view(torch.uint8), expected[n].view(torch.uint8)) for n in expected)
    down = quantize(load_file(plain / "model.safetensors")["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(actual["layers.0.mlp.down_proj.weight_scale"], down[1])
    assert torch.equal(actual["layers.0.mlp.down_proj.weight"].float(), down[0].float()[:, 160:])
    refused(lambda: Checkpoint(blocks, config), "is quantized")
    tensors = load_file(blocks / "model.safetensors")
    save_file(tensors | {f"{NAME}_scale_inv": torch.ones(2, 2)}, blocks / "model.safetensors")
    refused(lambda: Checkpoint(blocks, config, fp8=True), f"{NAME}_scale_inv is (2, 2), expected (3, 2)")


def test_drafts_change_no_token(family: Path) -> None:
    """Eager graphs with FP8 weights; tokens are others than those of the same weights in fp32."""
    requests = [Request((seed, 5, 7), Params(0.8 * (seed % 2), seed=seed), 12) for seed in range(8)]
    options: dict[str, Any] = {"k": 3, "batch": 8}
    runs = {
        (weights, drafts): eager_engine(family, "chain", drafts, weights=weights, **options).run(requests)
        for weights, drafts in (("fp8", False), ("fp8", True), ("dtype", False))
    }
    plain, drafted, fp32 = ([r.ids for r in results] for results in runs.values())
    assert plain == drafted != fp32
    assert 0 < sum(sum(r.accepted) for r in runs["fp8", True]) < sum(sum(r.drafted) for r in runs["fp8", True])


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "nki"])
def test_a_bundle_s_tokens(kernels: str, tmp_path: Path) -> None:
    """In bf16: equal with drafts and without, and the reference's; kernels run on the simulator."""
    # blocks of gate and up are K tiles of down
    sizes = PACKED | {"intermediate_size": 256, "vocab_size": 2048}
    for name, layers in (("target", 2), ("draft", 1)):
        write_model(tmp_path / name, 1, 0.2, **sizes, num_hidden_layers=layers)
    common: dict[str, Any] = {"k": 1, "graphs": "greedy", "dtype": "bf16", "weights": "fp8"}
    requests = [replace(request, max_new_tokens=6) for request in REQUESTS]

    def tokens(name: str, speculative: bool = True, **options: Any) -> list[list[int]]:
        bundle = read_bundle(untraced(spec(tmp_path, name, **common, **options)))
        return [r.ids for r in Engine(AsTheyRun(bundle), engine_config(bundle), speculative).run(requests)]

    options = {"layers": 2} if kernels == "nki" else {}
    drafted, plain = (tokens("two", speculative, kernels=kernels, **options) for speculative in (True, False))
    assert drafted == plain
    # greedy: kernels and the reference round bf16 at other places, which may decide a sample
    assert drafted[0] == tokens("one")[0]


def test_builds_that_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "target", 1)
    for options, sentence in (
        ({"weights": "int8"}, "weights is 'int8', expected one of dtype, fp8"),
        ({"kernels": "nki"}, "kernels multiply FP8 weights by bf16 rows only; use --dtype bf16"),
        ({"kernels": "nki", "dtype": "bf16"}, "has layers that no kernel packs, whose weights cannot be FP8"),
    ):
        refused(lambda options=options: spec(tmp_path, k=0, **{"weights": "fp8"} | options).check(), sentence)
