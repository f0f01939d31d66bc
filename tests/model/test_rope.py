"""YaRN at high positions against transformers, and its forms in config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config as HFConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from model.config import Qwen3Config, Yarn, config_from_dict
from model.errors import UserError
from model.rope import attention_factor, rotation, yarn_frequencies

QWEN3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
STATED: list[dict[str, Any]] = [
    {}, {"factor": 2, "beta_fast": 16, "beta_slow": 2}, {"attention_factor": 1.25}, {"factor": 1.0},
    # DeepSeek-R1-0528-Qwen3-8B's, which transformers and vLLM do not apply
    {"attn_factor": 0.8782488562869419},
]  # fmt: skip
_TYPED = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def hf_config(head_dim: int = 16, **rope: Any) -> HFConfig:
    """A small Qwen3 of transformers with Qwen3's YaRN, changed by `rope`."""
    return HFConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, vocab_size=97, initializer_range=0.2, eos_token_id=None,
        rope_parameters={"rope_theta": 1e6, **QWEN3, **rope},
    )  # fmt: skip


def read(**change: Any) -> Qwen3Config:
    """Reads a config.json with these entries changed; None removes one."""
    raw = hf_config().to_dict()
    return config_from_dict({k: v for k, v in (raw | change).items() if v is not None}, "config.json")


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("rope", STATED, ids=str)
def test_rotations_are_transformers(rope: dict[str, Any], head_dim: int) -> None:
    hf = hf_config(head_dim, **rope)
    config = config_from_dict(hf.to_dict(), "config.json")
    assert config.rope_scaling
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")
    actual = torch.tensor(yarn_frequencies(head_dim, 1e6, config.rope_scaling), dtype=torch.float32)
    # the last bit of `pow` differs between libraries
    assert torch.allclose(actual, expected, rtol=2.4e-7, atol=0)
    assert attention_factor(config.rope_scaling) == pytest.approx(scale, rel=1e-12)
    positions = torch.cat((torch.arange(9), torch.arange(40000, 40150), torch.tensor([131071])))[None]
    cos, sin = Qwen3RotaryEmbedding(hf)(torch.zeros(1), positions)

    def distance(config: Qwen3Config) -> float:
        both = zip(rotation(positions, config), (cos, sin), strict=True)
        return max(float((a - b[..., : head_dim // 2]).abs().max()) for a, b in both)

    # the last bit of a frequency at these positions
    assert distance(config) < 0.02
    # negative controls: another factor, another attention factor, no YaRN
    for yarn in (Yarn(3.0, 32768), replace(config.rope_scaling, attention_factor=1.5), None):
        assert distance(replace(config, rope_scaling=yarn)) > 0.1 or (yarn is None and rope.get("factor") == 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 1e6, **QWEN3}},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": QWEN3},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": _TYPED},
        {"rope_scaling": QWEN3 | {"factor": 4}},
        # as other programs read it from the files that we write
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": Yarn(4.0, 32768).as_hf()},
    ],
    ids=["transformers 5", "rope_scaling", "type", "an integer", "ours"],
)
def test_every_form_reaches_131072_positions(change: dict[str, Any]) -> None:
    config = read(**change)
    assert (config.rope_scaling, config.rope_theta) == (Yarn(4.0, 32768), 1e6)
    assert config.max_position_embeddings == 131072


def test_a_plain_model_has_no_yarn() -> None:
    config = read(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, max_position_embeddings=40960)
    assert (config.rope_scaling, config.max_position_embeddings) == (None, 40960)


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "sets rope_scaling to .*linear.*, which is not supported"),
        ({"rope_type": "longrope", "factor": 2.0}, "not supported"),
        ({"rope_type": "yarn", "factor": 4.0}, "rope_scaling.original_max_position_embeddings is missing"),
        (QWEN3 | {"factor": "4"}, "rope_scaling.factor is '4', expected a number from 1 to 1024"),
        (QWEN3 | {"mscale": 2.0}, "rope_scaling.mscale is not a field"),
        (QWEN3 | {"partial_rotary_factor": 0.5}, "not supported"),
        ([4.0], "not supported"),
    ],
    ids=str,
)
def test_other_scalings_are_one_sentence(scaling: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read(rope_parameters=None, rope_theta=1e6, rope_scaling=scaling)
