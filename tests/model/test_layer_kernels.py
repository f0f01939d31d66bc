"""The layer's halves and the classic rule through the seam: fused NKI kernels against the reference."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from model.bundle.weights import table
from model.cache import Rows, empty_caches
from model.config import PRESETS
from model.errors import UserError
from model.kernels import REFERENCE
from model.nki import simulated
from model.nki.backing import NkiKernels
from model.nki.launches import Launch, Result
from model.nki.on_device import launch_on_device
from model.ops import EAGER
from model.packing import fused_packing
from model.parallel import Parallel
from model.qwen3 import Qwen3
from model.rejection import Drafted, rejection_sample
from model.sampling import Sampling
from nki_kernels.sampling import law
from tests.nki_kernels.sampling.inputs import key

SIMULATED = NkiKernels(simulated.serve)
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
    made = [Qwen3(CONFIG, kernels=kernels).to(dtype) for kernels in (REFERENCE, SIMULATED)]
    for name, p in made[0].named_parameters():
        if p.is_floating_point():
            torch.nn.init.normal_(p, 1.0 if name.endswith("norm.weight") else 0.0, 0.06)
    made[1].load_state_dict(packed(made[0].state_dict()))
    return made[0], made[1]


def packed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights in the layout of the fused kernels."""
    names = ((w, [name.removeprefix("model.") for name, _ in w.parts]) for w in table(CONFIG, fused_packing(CONFIG, 1)))
    made = {w.ours: w.join(*(state[n] for n in parts), CONFIG.head_dim) for w, parts in names if w.ours not in state}
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_pass_through_fused_layers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, then rows of two sequences: logits within the dtype's rounding; the fused kernels did serve."""
    names = launched(monkeypatch)
    outs = []
    for model in models(dtype):
        caches = empty_caches(CONFIG, Parallel(), 2, 256, dtype, model.kernels.layout)
        keys = torch.arange(256, dtype=torch.int32)
        for slot in range(2):
            ids = torch.arange(40, dtype=torch.int32)[None] * (slot + 3) % 512
            rows = Rows(torch.arange(40, dtype=torch.int32)[None], keys, torch.tensor([slot], dtype=torch.int32))
            _, caches = model.hidden(ids, caches, rows)
        positions = torch.tensor([[40], [40]], dtype=torch.int32) + torch.arange(5, dtype=torch.int32)
        x, _ = model.hidden(torch.arange(10, dtype=torch.int32).view(2, 5), caches, Rows(positions, keys))
        outs.append(model.logits(x))
    # a layer rounds a dozen times on the way
    bound = 24 * torch.finfo(dtype).eps * outs[0].abs().max()
    assert (outs[0] - outs[1]).abs().max() <= bound
    assert names.count("decode_attention") == CONFIG.num_hidden_layers
    assert names.count("decode_mlp") == 3 * CONFIG.num_hidden_layers
    # two prompts in two pieces each
    assert names.count("verify_attention") == 4 * CONFIG.num_hidden_layers


@torch.no_grad()
def test_many_rows_are_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    names = launched(monkeypatch)
    reference, simulated_model = models(torch.float32)
    x = torch.randn(1, 200, 256)
    halves = [
        m.kernels.mlp_half(EAGER, m.layers[0].post_attention_layernorm, m.layers[0].mlp, x)  # type: ignore[union-attr]
        for m in (reference, simulated_model)
    ]
    assert torch.equal(*halves)
    assert not names


def _case(batch: int, k: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, Drafted, Sampling, torch.Tensor]:
    rng = np.random.default_rng(seed)
    target = (2 * rng.standard_normal((batch, k + 1, vocabulary))).astype(np.float32)
    draft = target[:, :k] + rng.standard_normal((batch, k, vocabulary)).astype(np.float32)
    sampling = Sampling(
        torch.tensor(rng.choice([0.6, 1.0, 1.5], batch), dtype=torch.float32),
        torch.tensor(rng.choice([0, 5, 30], batch), dtype=torch.float32),
        torch.tensor(rng.choice([1.0, 0.9, 0.5], batch), dtype=torch.float32),
        torch.tensor(rng.choice([0.0, 0.02], batch), dtype=torch.float32),
        torch.from_numpy(rng.integers(-(2**31), 2**31, (batch, 2)).astype(np.int32)),
    )
    drafts = np.zeros((batch, k), np.int32)
    for b in range(batch):
        for n in range(k):
            drafts[b, n] = rng.choice(vocabulary, p=law.distribution(draft[b, n].astype(np.float64), _row(sampling, b)))
    limits = torch.from_numpy(rng.choice([k, k, max(0, k - 2)], batch).astype(np.int32))
    drafted = Drafted(torch.from_numpy(drafts), torch.from_numpy(draft), limits)
    return torch.from_numpy(target), drafted, sampling, torch.arange(100, 100 + batch, dtype=torch.int32)[:, None]


def _row(sampling: Sampling, b: int) -> law.RowParameters:
    temperature, top_k, top_p, min_p = (float(t[b]) for t in sampling[:4])
    return law.RowParameters(temperature, int(top_k), top_p, min_p)


@pytest.mark.parametrize(("batch", "k", "vocabulary"), [(5, 3, 61), (3, 7, 200), (9, 1, 33)])
def test_the_classic_rule_in_both_backings(batch: int, k: int, vocabulary: int) -> None:
    """Filtered and tempered, keyed by seed and position: token for token the law's."""
    lengths = set()
    for seed in range(3):
        target, drafted, sampling, positions = _case(batch, k, vocabulary, seed)
        accepted, counts = rejection_sample(EAGER, target, drafted, sampling, positions)
        served, served_counts = SIMULATED.rejection_sample(EAGER, target, drafted, sampling, positions)
        assert torch.equal(accepted, served)
        assert torch.equal(counts, served_counts)
        for b in range(batch):
            row, limit, first = _row(sampling, b), min(int(drafted.limit_B[b]), k), int(positions[b, 0])
            words = key(sampling.seed_R2.numpy(), b)
            p = np.array([law.distribution(target[b, n].double().numpy(), row) for n in range(limit + 1)])
            q = np.array([law.distribution(drafted.logits_BKV[b, n].double().numpy(), row) for n in range(limit)])
            u = [law.uniform(words, first + n, 0, 1) for n in range(limit)]
            noise = np.array([law.gumbel_noise(words, first + n, range(vocabulary), 2) for n in range(limit + 1)])
            expected = law.rejection_sample(p, q, [int(t) for t in drafted.ids_BK[b, :limit]], u, noise)
            assert [int(t) for t in accepted[b, : int(counts[b])]] == expected
            lengths.add(len(expected))
    assert len(lengths) > 1


def test_a_device_launch_needs_a_device() -> None:
    launch = Launch("uniform", ["#0", "#1", 1], (Result((1, 1), "float32"),))
    with pytest.raises(UserError, match="nki is the simulator"):
        launch_on_device(launch, (torch.zeros(1, 2), torch.zeros(1, 1)))


def test_a_device_launch_gives_the_kernel_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the vendor's nki: torch tensors in, results and changed tensors out."""
    seen: list[Any] = []

    def kernel(*arguments: Any) -> Any:
        seen.extend(arguments)
        return arguments[0] + 1

    monkeypatch.setitem(sys.modules, "nki", ModuleType("nki"))
    monkeypatch.setitem(simulated.KERNELS, "uniform", {1: kernel})
    x, y = torch.zeros(2), torch.ones(3)
    out = launch_on_device(Launch("uniform", ["#0", ["#1", 5]], (Result((2,), "float32"),), (1,)), (x, y))
    assert torch.equal(out[0], x + 1)
    assert out[1] is y
    assert seen[0] is x
    assert seen[1] == (y, 5)
