"""Logits and hidden states against transformers' Qwen3ForCausalLM, on random weights."""

import pytest
import torch
from transformers import Qwen3Config as HFConfig
from transformers import Qwen3ForCausalLM

from model.config import PRESETS, config_from_dict
from model.errors import UserError
from model.qwen3 import Qwen3
from model.weights import RANK
from tests.model.paged import empty, rows

CASES = [  # heads, kv heads, head dim, layers, prompt lengths, tied; odd shapes first
    (6, 3, 10, 3, (37, 5, 1), False),
    (2, 1, 16, 1, (7,), True),
    (16, 8, 8, 2, (129, 33), True),
    (8, 2, 16, 2, (64, 63, 62, 128), False),
    (4, 4, 32, 2, (15, 200), True),
]


def _ids(case: tuple) -> str:
    heads, kv, dim, layers, lengths, tied = case
    return f"H{heads}-G{kv}-D{dim}-L{layers}-B{len(lengths)}-{'tied' if tied else 'untied'}"


def _pair(heads: int, kv: int, dim: int, layers: int, tied: bool) -> tuple[Qwen3ForCausalLM, Qwen3]:
    torch.manual_seed(heads * 100 + kv)
    hf_config = HFConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=dim, vocab_size=97, tie_word_embeddings=tied,
        initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    hf = Qwen3ForCausalLM(hf_config).eval()
    ours = Qwen3(config_from_dict(hf_config.to_dict(), "test")).eval()
    weights = {k.removeprefix("model."): v for k, v in hf.state_dict().items()}
    ours.load_state_dict(weights | {RANK: torch.zeros(1, dtype=torch.int32)})
    return hf, ours


def _prefix_logits(ours: Qwen3, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Logits of a prompt in two chunks; the second attends the cache of the first."""
    caches = empty(ours.config, 1, 256)
    chunks, start = [], 0
    for stop in (length // 2, length):
        if stop > start:
            x, caches, _ = ours.hidden(ids[None, start:stop], caches, rows(start, stop, 1, 256))
            chunks.append(ours.logits(x)[0])
        start = stop
    return torch.cat(chunks)


@pytest.mark.parametrize("case", CASES, ids=_ids)
@torch.no_grad()
def test_logits_equal_transformers(case: tuple) -> None:
    heads, kv, dim, layers, lengths, tied = case
    hf, ours = _pair(heads, kv, dim, layers, tied)
    for length in lengths:
        ids = torch.randint(0, 97, (length,))
        expected, got = hf(ids[None]).logits[0], _prefix_logits(ours, ids, length)
        assert (got - expected).abs().max() < 1e-5


@torch.no_grad()
def test_a_wrong_rotation_is_noticed() -> None:
    hf, ours = _pair(8, 2, 16, 2, False)
    ids = torch.randint(0, 97, (40,))
    ours.config = ours.config.__class__(**{**ours.config.__dict__, "rope_theta": 100.0})
    assert (_prefix_logits(ours, ids, 40) - hf(ids[None]).logits[0]).abs().max() > 1e-3


def test_preset_sizes_are_the_published_ones() -> None:
    billions = dict[str, float]()
    for name, config in PRESETS.items():
        with torch.device("meta"):
            model = Qwen3(config)
        tied = model.lm_head.weight.numel() if config.tie_word_embeddings else 0
        billions[name.split("-")[1]] = round((sum(p.numel() for p in model.parameters()) - tied) / 1e9, 2)
    assert billions == {"0.6B": 0.6, "1.7B": 1.72, "4B": 4.02, "8B": 8.19, "14B": 14.77, "32B": 32.76}


@pytest.mark.parametrize(
    "change", [{"model_type": "llama"}, {"rope_scaling": {"rope_type": "yarn"}}, {"attention_bias": True}], ids=str
)
def test_another_architecture_is_refused(change: dict) -> None:
    raw = HFConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2).to_dict() | change
    with pytest.raises(UserError):
        config_from_dict(raw, "config.json")


@torch.no_grad()
def test_the_states_at_the_taps_are_transformers_hidden_states() -> None:
    """Inputs of layers, and the normed output of the last layer."""
    hf, ours = _pair(6, 3, 10, 3, False)
    ids = torch.arange(22, dtype=torch.int32).view(2, 11)
    caches = empty(ours.config, 2, 256)
    states = hf(ids.long(), output_hidden_states=True).hidden_states
    plain = ours.hidden(ids, caches, rows(0, 11, 2, 256))[0]
    for taps in ((0,), (3,), (1, 2, 3)):
        ours.taps = taps
        x, _, features = ours.hidden(ids, caches, rows(0, 11, 2, 256))
        assert features is not None
        assert torch.equal(x, plain)
        assert torch.allclose(features, torch.cat([states[t] for t in taps], -1), atol=1e-4, rtol=0)
