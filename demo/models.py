"""The three Qwen3 shapes of the demo pair, and how they are built and saved."""

import copy
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo.tokenizer import VOCAB, save_tokenizer

ROPE_THETA = 1_000_000.0


# name: layers, then hidden, inner, query heads, kv heads and tied embeddings; head_dim is 32 in all of them
SHAPES = {
    "target": (6, 192, 512, 8, 4, False),
    "draft": (2, 96, 256, 4, 2, True),
    "draft_small": (1, 64, 128, 4, 2, True),
}


def build(name: str, end: int) -> Qwen3ForCausalLM:
    """A freshly initialised model; the caller seeds torch."""
    layers, hidden, inner, query_heads, kv_heads, tied = SHAPES[name]
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        intermediate_size=inner,
        max_position_embeddings=1024,
        max_window_layers=layers,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=tied,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.03 if tied else 0.5)
    initialise_layers(model.model.layers)
    return model


def initialise_layers(layers: torch.nn.Module) -> None:
    """Wider than Qwen's 0.02, which is too small for these widths; blocks start as the identity."""
    for name, weight in layers.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
        elif weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model, in place and in float32, with its weights rounded to bfloat16 as when saved."""
    # weight by weight: casting the module would also round the rotary frequencies
    for weight in model.parameters():
        weight.data.copy_(weight.data.bfloat16())
    return model.train(False)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder in bfloat16; the model itself stays as it is."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    # readers older than transformers 5 look for rope_theta and torch_dtype at the top level
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {"do_sample": False} | {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """A saved model in float32 (bfloat16-rounded weights) and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return model, tokenizer
