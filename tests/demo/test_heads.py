"""The EAGLE-3 head of the demo: the unrolled form is the chain of inference, names are the public ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3ForCausalLM

from demo.drafter import TargetPass, target_pass
from demo.eagle3 import FEATURE_LAYERS, Eagle3, head_config, new_head
from demo.models import load

DEMO = Path("demo")
H, V, QUERY, KEY, INNER = 192, 2048, 256, 128, 512
# the names of RedHatAI/Qwen3-32B-speculator.eagle3, with the demo's shapes
EAGLE3 = {
    "embed_tokens.weight": (V, H),
    "fc.weight": (H, 3 * H),
    "layers.0.hidden_norm.weight": (H,),
    "layers.0.input_layernorm.weight": (H,),
    "layers.0.mlp.down_proj.weight": (H, INNER),
    "layers.0.mlp.gate_proj.weight": (INNER, H),
    "layers.0.mlp.up_proj.weight": (INNER, H),
    "layers.0.post_attention_layernorm.weight": (H,),
    "layers.0.self_attn.k_proj.weight": (KEY, 2 * H),
    "layers.0.self_attn.o_proj.weight": (H, QUERY),
    "layers.0.self_attn.q_proj.weight": (QUERY, 2 * H),
    "layers.0.self_attn.v_proj.weight": (KEY, 2 * H),
    "norm.weight": (H,),
}


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return load(DEMO / "target")[0]


@pytest.fixture(scope="module")
def seen(target: Qwen3ForCausalLM) -> TargetPass:
    return target_pass(target, torch.randint(2048, (1, 40), generator=torch.Generator().manual_seed(2)))


@pytest.fixture(scope="module")
def head(target: Qwen3ForCausalLM, seen: TargetPass) -> Eagle3:
    torch.manual_seed(3)
    head = new_head(target, seen.ids_BS)
    for name, weight in head.layers.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(weight, std=0.1)
    return head.train(False)


@torch.no_grad()
def chained(head: Eagle3, seen: TargetPass, anchor: int, k: int) -> torch.Tensor:
    """Logits (k, D) of the drafts after one anchor, as inference makes them: one row more at a time, no cache."""
    features = head.fc(torch.cat([seen.hidden_LBSH[n] for n in FEATURE_LAYERS], dim=-1))[:, :anchor]
    logits = []
    for _ in range(k):
        length = features.shape[1]
        position_R = torch.arange(length)
        rotary = head.rotary(features, position_R[None])
        embeds = head.embed_tokens(seen.ids_BS[:, 1 : 1 + length])
        out = head.layers[0](embeds, features, rotary, [], position_R <= position_R[:, None])[:, -1:]
        logits.append(head.lm_head(head.norm(out))[0, 0])
        features = torch.cat([features, out], dim=1)
    return torch.stack(logits)


def test_unrolled_drafts_are_those_of_a_chain(head: Eagle3, seen: TargetPass) -> None:
    anchors_A, k = torch.tensor([4, 21, 13]), 6
    logits_AKV = head.draft_logits(seen, anchors_A, k)
    for anchor, logits_KV in zip(anchors_A.tolist(), logits_AKV, strict=True):
        alone_KD = chained(head, seen, anchor, k)
        torch.testing.assert_close(logits_KV[:, head.target_ids_D], alone_KD, atol=1e-4, rtol=0)
    missing = torch.ones(2048, dtype=torch.bool)
    missing[head.target_ids_D] = False
    assert logits_AKV[..., missing].isneginf().all()


def test_a_draft_sees_no_feature_from_its_anchor_on(head: Eagle3, seen: TargetPass) -> None:
    anchor, k = 20, 5
    hidden_LBSH = tuple(state.clone() for state in seen.hidden_LBSH)
    for state in hidden_LBSH:
        state[:, anchor:] = 9.0
    blind = seen._replace(hidden_LBSH=hidden_LBSH)
    anchors_A = torch.tensor([anchor])
    assert torch.equal(head.draft_logits(blind, anchors_A, k), head.draft_logits(seen, anchors_A, k))
    later = head.draft_logits(blind, anchors_A + 1, k)
    assert not torch.equal(later, head.draft_logits(seen, anchors_A + 1, k))


def test_the_eagle3_head_has_the_names_of_the_public_format(target: Qwen3ForCausalLM) -> None:
    config = json.loads((DEMO / "draft_eagle3/config.json").read_text())
    draft_vocab = config["draft_vocab_size"]
    expected = EAGLE3 | {"lm_head.weight": (draft_vocab, H)}
    types = dict.fromkeys(expected, torch.bfloat16) | {"d2t": torch.int64, "t2d": torch.bool}
    expected |= {"d2t": (draft_vocab,), "t2d": (V,)}
    with safe_open(DEMO / "draft_eagle3/model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {n: tuple(w.shape) for n, w in weights.items()} == expected
    assert {n: w.dtype for n, w in weights.items()} == types
    ids_D = weights["d2t"] + torch.arange(draft_vocab)
    assert torch.equal(weights["t2d"].nonzero().flatten(), ids_D)
    assert torch.equal(weights["embed_tokens.weight"].float(), target.model.embed_tokens.weight)
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == list(FEATURE_LAYERS)
    layer = {name: getattr(head_config(target), name) for name in ("head_dim", "rms_norm_eps", "num_key_value_heads")}
    assert layer.items() <= config["transformer_layer_config"].items()
