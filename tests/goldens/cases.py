"""The checkpoints and the requests of the goldens, from fixed NumPy seeds."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

CLASSES = ("greedy", "sampled", "penalties", "logprobs", "grammar")
VOCABULARY = {"tiny": 512, "demo": 2048}
# of the three groups of each class: the longest continuation, log-probabilities of an id and of a prompt's id
MAX_NEW_TOKENS, LOGPROBS, PROMPT_LOGPROBS = (8, 20, 32), (0, 3, 1), (None, None, 1)
DEMO = Path("demo")
DEMO_DRAFTS = {"chain": "draft", "parallel": "draft_parallel", "dflash": "draft_dflash", "dspark": "draft_dspark",
               "eagle3": "draft_eagle3"}  # fmt: skip
_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 512,
}  # fmt: skip
_CONFIG = _SIZES | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "max_position_embeddings": 1024,
    "eos_token_id": None, "bos_token_id": None, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_WORDS = tuple(
    re.findall("[a-zA-Z]+", "the cat sat on a mat and she said that he was not in my house when they went to")
)


class Case(NamedTuple):
    """A request of a class: prompt ids, the fields of `Params` and the options of `LLM.generate`."""

    kind: str
    prompt: list[int]
    params: dict[str, Any]
    options: dict[str, Any]


def write_tiny(folder: Path) -> dict[str, Path]:
    """A random target of two layers with head dim 32, and a draft that is its first layer."""
    width, inner = _SIZES["hidden_size"], _SIZES["intermediate_size"]
    rng = np.random.Generator(np.random.PCG64(53))
    heads, groups = (_SIZES["head_dim"] * _SIZES[f"num_{n}_heads"] for n in ("attention", "key_value"))

    def normal(*shape: int, gain: float = 1.0) -> np.ndarray:
        return (gain * rng.standard_normal(shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(_SIZES["vocab_size"], width)}
    tensors["lm_head.weight"] = normal(_SIZES["vocab_size"], width, gain=0.3)
    tensors["model.norm.weight"] = np.ones(width, np.float32)
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, size in (("input_layernorm", width), ("post_attention_layernorm", width), ("self_attn.q_norm", 32),
                           ("self_attn.k_norm", 32)):  # fmt: skip
            tensors[f"{layer}{name}.weight"] = 1 + normal(size, gain=0.1)
        for name, rows, columns in (
            ("self_attn.q_proj", heads, width), ("self_attn.k_proj", groups, width),
            ("self_attn.v_proj", groups, width), ("self_attn.o_proj", width, heads),
            ("mlp.gate_proj", inner, width), ("mlp.up_proj", inner, width), ("mlp.down_proj", width, inner),
        ):  # fmt: skip
            tensors[f"{layer}{name}.weight"] = normal(rows, columns, gain=columns**-0.5)
    folders = {"target": folder / "target", "chain": folder / "draft"}
    for layers, part in ((2, folders["target"]), (1, folders["chain"])):
        part.mkdir(parents=True)
        save_file({n: t for n, t in tensors.items() if layers == 2 or "layers.1" not in n}, part / "model.safetensors")
        (part / "config.json").write_text(json.dumps(_CONFIG | {"num_hidden_layers": layers}), encoding="utf-8")
        words = {f"w{i}": i for i in range(_SIZES["vocab_size"])}
        Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(part / "tokenizer.json"))
    return folders


def cases(model: str, vocabulary: int, count: int) -> list[Case]:
    """`count` requests of each class, in three groups of equal options; prompts of 1 to 150 ids."""
    rng, requests = np.random.Generator(np.random.PCG64(5300)), list[Case]()
    for kind in CLASSES:
        for group, length in enumerate(MAX_NEW_TOKENS):
            options: dict[str, Any] = {"max_new_tokens": length}
            if kind == "logprobs":
                options |= {"logprobs": LOGPROBS[group], "prompt_logprobs": PROMPT_LOGPROBS[group]}
            if kind == "grammar":
                options |= {"allowed": allowed_of(vocabulary)}
            for _ in range(len(range(group, count, len(MAX_NEW_TOKENS)))):
                ids = _text(rng) if model == "demo" else rng.integers(vocabulary, size=150).tolist()
                requests.append(Case(kind, ids[: int(rng.integers(1, 151))], _params(rng, kind, vocabulary), options))
    return requests


def _params(rng: np.random.Generator, kind: str, vocabulary: int) -> dict[str, Any]:
    def number(low: float, high: float) -> float:
        return round(float(rng.uniform(low, high)), 3)

    params: dict[str, Any] = {}
    if kind == "sampled" or (kind != "greedy" and rng.integers(2)):
        params = {"temperature": number(0.3, 1.5), "seed": int(rng.integers(1 << 63))}
        if kind == "sampled":
            mix = int(rng.integers(8))
            params |= {"top_k": int(rng.integers(2, 60))} if mix & 1 else {}
            params |= {"top_p": number(0.5, 0.99)} if mix & 2 else {}
            params |= {"min_p": number(0.01, 0.2)} if mix & 4 else {}
    if kind == "penalties":
        params |= {"presence_penalty": number(-1, 2), "frequency_penalty": number(-1, 2)}
        params |= {"repetition_penalty": number(0.8, 1.5)}
        params |= {"logit_bias": {int(i): number(-5, 5) for i in rng.choice(vocabulary, 12, replace=False)}}
    return params


def allowed_of(vocabulary: int) -> Callable[[Sequence[int]], np.ndarray]:
    """A grammar by the ids so far: two of seven residue classes are forbidden and each fifth id is forced."""

    def allowed(ids: Sequence[int]) -> np.ndarray:
        last, every = (ids[-1] if ids else 0), np.arange(vocabulary)
        forced = len(ids) % 5 == 4
        bits = every == (7 * last + 3) % vocabulary if forced else (every + last) % 7 > 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    return allowed


@functools.cache
def demo_tokenizer() -> Tokenizer:
    """The demo pair's."""
    return Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))


def _text(rng: np.random.Generator) -> list[int]:
    """Ids of a text of the demo's kinds, at least 150: a count, a repeated line, or words."""
    line = " ".join(rng.choice(_WORDS, 8)) + ".\n"
    step = int(rng.integers(1, 9))
    counted = ", ".join(str(step * n) for n in range(1, 150))
    texts = (
        f"Count from {step} to {150 * step} in steps of {step}: {counted}",
        f"Repeat the following line exactly 50 times: {line}" + 50 * line,
        " ".join(rng.choice(_WORDS, 200)),
    )
    return demo_tokenizer().encode(texts[int(rng.integers(3))]).ids
