"""Draft models on several ranks and on simulated kernels, and Markov decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.approx_filters import approximate
from model.cache import AttentionMetadata
from model.config import load_config
from model.context import ONE_RANK, Context
from model.drafters.dflash import DFlashConfig, DFlashModel
from model.drafters.eagle3 import Eagle3, Eagle3Model
from model.drafters.registry import load_draft
from model.filters import Filters
from model.logprobs import TOP
from model.nki import simulated
from model.nki.context import NkiContext
from model.ops import EAGER, iota
from model.sampling import SamplingParams, gumbel_noise
from model.weights import Packing
from tests.compile.tiny import shard_of, write_model
from tests.model.heads import write_head
from tests.model.paged import empty_caches
from tests.model.ranks import on_ranks
from trnspec.bundle.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and an EAGLE-3 head, with the hidden size that the packed MLP kernels require."""
    folder = tmp_path_factory.mktemp("models")
    target = write_model(folder / "target", 1, num_hidden_layers=8, hidden_size=128)
    write_head(folder / "head", target, hidden_size=128)
    return folder


def _head(folder: Path, ctx: Context, rank: int = 0, packing: Packing | None = None) -> Eagle3Model:
    """The head on one rank."""
    target = load_config(str(folder / "target"))
    config = load_draft(Eagle3, str(folder / "head"), target)
    checkpoint, draft = Checkpoint(folder / "head", config), Eagle3Model(config, ctx)
    draft = ctx.fuse(draft) if packing else draft
    draft.load_state_dict(shard_of(checkpoint, rank, ctx.tp, torch.float32, packing or Packing()))
    return draft


def _params(temperature: list[float], top_k: list[float], top_p: list[float]) -> SamplingParams:
    rows = len(temperature)
    seeds_R2 = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2)
    filters = Filters(torch.tensor(top_k), torch.tensor(top_p), torch.zeros(rows))
    return approximate(SamplingParams(torch.tensor(temperature), seeds_R2, filters))


def _of_head(folder: Path, ctx: Context, rank: int) -> Tensor:
    """Drafts of random rows, greedy and sampled, with and without filters; checks the features of random states."""
    params = _params([0.0, 0.7, 1.3, 0.0, 0.9, 2.0], [0.0, 0.0, 5.0, 0.0, 0.0, 9.0], [1.0, 1.0, 1.0, 1.0, 0.8, 0.9])
    x_B1E, states_B1F = (torch.randn(6, 1, n * 128, generator=torch.Generator().manual_seed(n)) for n in (1, 3))
    draft = _head(folder, ctx, rank)
    assert torch.allclose(draft.feature(states_B1F), states_B1F @ _head(folder, ONE_RANK).fc.weight.T, atol=1e-5)
    return draft.draft(x_B1E, params, draft.noise(params.seed_R2, torch.full((6, 1), 40, dtype=torch.int32)))


MARKOV = _params([0.0, 0.7, 1.3, 0.9], [0.0, 0.0, 0.0, 1.0], [1.0] * 4)


def _of_markov_head(vocabulary: int, ctx: Context, rank: int, k: int = 4) -> Tensor:
    """Drafts of random rows after the ids 0, 1, 2, 3, on one of the ranks."""
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=vocabulary, tie_word_embeddings=False, block_size=6, mask_id=0, taps=(1,), shifted=True,
        causal=False, markov_rank=4,
    )  # fmt: skip
    model = DFlashModel(config, ctx)
    model.rank.data[:] = rank
    model.markov_w1.data, model.markov_w2.data, logits_BkV = _markov_numbers(vocabulary, k)
    noise_BkV = model.noise(MARKOV.seed_R2, 40 + torch.arange(k, dtype=torch.int32).expand(4, -1))
    ids_B1 = torch.arange(4, dtype=torch.int32)[:, None]
    return model.markov_decode(ids_B1, logits_BkV.chunk(ctx.tp, -1)[rank], MARKOV, noise_BkV)


def _markov_numbers(vocabulary: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """w1, w2 and the logits of k rows of four sequences, which vary less than the noise."""
    # not torch's global generator: ranks are threads
    generator = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(vocabulary, 4, generator=generator) for _ in "12")
    return w1, w2, 0.3 * torch.randn(4, k, vocabulary, generator=generator)


@pytest.mark.parametrize("vocabulary", [TOP, 64])
def test_a_markov_decoding_is_a_chain_of_samples(vocabulary: int) -> None:
    """Sequences with different temperatures, one with top-k 1. Candidates are the TOP ids with the best logit plus
    noise: a sampled draft would seldom be among the TOP best logits."""
    k, actual = 4, _of_markov_head(vocabulary, ONE_RANK, 0).tolist()
    w1, w2, logits_BkV = _markov_numbers(vocabulary, k)
    for b, (temperature, top_k) in enumerate(zip(MARKOV.temperature_R.tolist(), (0, 0, 0, 1), strict=True)):
        before = b
        for n in range(k):
            bias_V, logits_V = w2 @ w1[before], logits_BkV[b, n]
            position, ids_V = torch.tensor([40 + n]), iota(vocabulary, logits_V)
            noise_V = gumbel_noise(EAGER, MARKOV.seed_R2[b : b + 1], position, ids_V)[0] if temperature else 0 * bias_V
            base_V = logits_V + bias_V if n == 0 else logits_V
            best_C = (base_V / (temperature or 1) + noise_V).topk(TOP).indices
            scores_C = (logits_V + bias_V)[best_C] / (temperature or 1) + noise_V[best_C]
            if top_k:
                scores_C = (logits_V + bias_V)[best_C]
            before = int(best_C[scores_C.argmax()])
            assert actual[b][n] == before, (b, n)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@torch.no_grad()
def test_two_ranks_draft_what_one_does(folder: Path, kind: str) -> None:
    """Each rank has half of the logits; candidates and drafts are from both halves."""
    of_rank: Callable[[Context, int], Tensor] = {
        "eagle3": lambda ctx, rank: _of_head(folder, ctx, rank),
        "dspark": lambda ctx, rank: _of_markov_head(64, ctx, rank),
    }[kind]
    expected = of_rank(ONE_RANK, 0)
    assert len({*expected.flatten().tolist()}) > 3
    for actual in on_ranks(2, lambda ops: of_rank(NkiContext(2, ops, simulated.serve), ops.rank)):
        assert torch.equal(actual, expected)


@torch.no_grad()
def test_kernels_serve_a_head(folder: Path) -> None:
    """Several rows, then one: attention with unpacked projections, and the packed MLP kernel."""
    states = torch.randn(2, 3, 3 * 128, generator=torch.Generator().manual_seed(7))
    ids, table = torch.tensor([[3, 60, 9], [5, 5, 1]], dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
    meta, outputs = AttentionMetadata(torch.tensor([[0, 1, 2], [90, 91, 92]], dtype=torch.int32), table), []
    for ctx in (ONE_RANK, NkiContext(1, EAGER, simulated.serve)):
        config = _head(folder, ONE_RANK).config
        draft = _head(folder, ctx, 0, ctx.packing(config)._replace(attention={}))
        assert ("layers.0.mlp.gate_up_packed" in draft.state_dict()) == ctx.sharded
        x_B3E, caches = draft.hidden(ids, draft.feature(states), empty_caches(config, 1, 5, torch.float32), meta)
        after = meta._replace(positions_BN=meta.positions_BN[:, 2:] + 1)
        x_B1E, _ = draft.hidden(ids[:, :1], x_B3E[:, 2:], caches, after)
        outputs.append(draft.lm_head(draft.norm(torch.cat((x_B3E, x_B1E), 1)), draft.rank_11))
    assert torch.allclose(*outputs, atol=1e-4, rtol=0)
