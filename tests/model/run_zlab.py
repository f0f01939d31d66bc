"""`python tests/model/run_zlab.py FOLDER`: z-lab's DFlash over the steps in a folder, in an environment of its own.

FOLDER has a draft's config.json and model.safetensors, and steps.safetensors: the states (S, F) of a text, the block's
embeddings (N, E), and the position of each step's input id. Writes rows.safetensors, each step's normed rows (N, E).
"""

import json
import sys
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, Qwen3Config


@torch.no_grad()
def main(folder: Path) -> None:
    config = Qwen3Config(**json.loads((folder / "config.json").read_text()), attn_implementation="sdpa")
    model = DFlashDraftModel(config).eval()
    missing, extra = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if missing or extra:
        raise SystemExit(f"the checkpoint lacks {missing} and has {extra} more")
    steps, cache, rows, known = load_file(folder / "steps.safetensors"), DynamicCache(), {}, 0
    for n, position in enumerate(steps["positions"].tolist()):
        out = model(
            position_ids=torch.arange(known, position + len(steps["embeds"]))[None],
            noise_embedding=steps["embeds"][None],
            target_hidden=steps["states"][None, known:position],
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
        )
        cache.crop(position)
        rows[str(n)], known = out[0].contiguous(), position
    save_file(rows, folder / "rows.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
