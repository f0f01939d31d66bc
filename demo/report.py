"""What a training run leaves beside the models: run.json and loss.svg."""

import json
import platform
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
import transformers

from demo.figure import loss_figure
from demo.run import Run

STAND_IN = "small stand-in models; no number here says anything about Qwen3-32B or Qwen3-1.7B"


def write_report(run: Run, sizes: dict[str, int], out: Path) -> None:
    """Write run.json (plan, versions, data, sizes, times, curves) and loss.svg."""
    plan, tokens = run.plan, run.plan.batch * run.plan.length
    report = {
        "note": STAND_IN,
        "plan": asdict(plan),
        "seconds": round(sum(run.stage_seconds.values()), 1),
        "stage_seconds": run.stage_seconds,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "prose_sha256": run.prose.sha256,
        "tokens_seen": {
            "target": plan.steps * tokens,
            "drafts_corpus": plan.draft_steps * tokens,
            "drafts_distil": plan.distil_steps * tokens * 3 // 4,
        },
        "parameters": sizes,
        "curves": run.curves,
    }
    (out / "run.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "loss.svg").write_text(loss_figure(run.curves))
