"""A child of test_ids.py: the ids that the demo bundle gives, greedy and drawn."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp

from trnspec import LLM, Params

PROMPTS = ("Count from 1 to 100: 1, 2, 3,", "The quick brown fox", "def add(a, b):")
GREEDY = Params()
DRAWN = (Params(temperature=0.8, seed=7), Params(temperature=1.2, top_p=0.9, seed=11))


def instruction_sets() -> list[str]:
    """What XLA compiles for, as a compiled function names its target."""
    compiled = jax.jit(jnp.tanh).lower(jnp.ones(8)).compile().runtime_executable().serialize()
    return [name for name in ("avx2", "avx512f") if f"+{name}".encode() in compiled]


def main(bundle: str) -> None:
    """Print one JSON object: instruction sets, and ids by prompt and parameters."""
    with LLM(bundle) as llm:
        ids = {
            f"{prompt!r} {params}": llm.generate(prompt, params, max_new_tokens=40).ids
            for params in (GREEDY, *DRAWN)
            for prompt in PROMPTS
        }
    print(json.dumps({"sets": instruction_sets(), "ids": ids}))


if __name__ == "__main__":
    main(sys.argv[1])
