"""The three Qwen3 shapes of the demo pair, and how they are built and saved."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo.tokenizer import VOCAB, end_id, save_tokenizer

ROPE_THETA = 1_000_000.0


@dataclass(frozen=True)
class Shape:
    """What differs between the three models; head_dim is 32 in all of them."""

    name: str
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    intermediate: int
    tied: bool


TARGET = Shape("target", 192, 6, 8, 4, 512, tied=False)
DRAFT = Shape("draft", 96, 2, 4, 2, 256, tied=True)
DRAFT_SMALL = Shape("draft_small", 64, 1, 4, 2, 128, tied=True)


def build(shape: Shape, end: int) -> Qwen3ForCausalLM:
    """A freshly initialised model; the caller seeds torch."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        intermediate_size=shape.intermediate,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        attention_bias=False,
        max_position_embeddings=1024,
        max_window_layers=shape.layers,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=shape.tied,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = Qwen3ForCausalLM(config)
    _initialise(model, embedding_std=0.03 if shape.tied else 0.5)
    return model


def _initialise(model: Qwen3ForCausalLM, embedding_std: float) -> None:
    """Wider than Qwen's 0.02, which is too small for these widths; blocks start as the identity."""
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=embedding_std)
    for name, weight in model.model.layers.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
        elif weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model, in place and in float32, with its weights rounded to bfloat16 as when saved."""
    # weight by weight: casting the module would also round the rotary frequencies
    for weight in model.parameters():
        weight.data.copy_(weight.data.bfloat16())
    model.train(False)
    return model


def parameters(model: Qwen3ForCausalLM) -> int:
    """How many weights, tied ones once."""
    return sum(weight.numel() for weight in model.parameters())


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder in bfloat16; the model itself stays as it is."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    # readers older than transformers 5 look for rope_theta and torch_dtype at the top level
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = json.dumps({"do_sample": False, **ends}, indent=2)
    (folder / "generation_config.json").write_text(generation + "\n")
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """A saved model in float32 (bfloat16-rounded weights) and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert end_id(tokenizer) == model.config.eos_token_id
    return model, tokenizer
