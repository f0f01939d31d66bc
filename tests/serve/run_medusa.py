"""`python -m tests.serve.run_medusa FOLDER`: vLLM's Medusa module on the CPU, over a checkpoint and states in a folder.

Reads the checkpoint's config.json and model.safetensors and the states (R, E) of states.safetensors; writes logits
(R, heads, V) to logits.safetensors. A process of its own because vLLM's state of ranks is the process's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace as Named

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.medusa import Medusa


@torch.no_grad()
def main(folder: Path) -> None:
    """Every head's logits for every state."""
    config = Named(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    with set_current_vllm_config(VllmConfig()), tempfile.NamedTemporaryFile() as meeting:
        init_distributed_environment(1, 0, f"file://{meeting.name}.ranks", 0, "gloo")
        initialize_model_parallel(1)
        draft = Named(hf_config=config)
        module = Medusa(vllm_config=Named(speculative_config=Named(draft_model_config=draft)))
        module.load_weights(load_file(folder / "model.safetensors").items())
        for head in module.lm_heads:
            head.quant_method.process_weights_after_loading(head)
        states_RE = load_file(folder / "states.safetensors")["states"]
        logits = module.compute_logits(module(states_RE))
    save_file({"logits": torch.stack(logits, 1)}, folder / "logits.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
