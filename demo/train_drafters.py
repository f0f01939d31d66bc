"""Training of the drafters that learn from text that the target wrote."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from demo.corpus import Prose, batches
from demo.dflash import RANK, load_draft, new_draft
from demo.drafter import Drafter, K, TargetPass, target_pass
from demo.eagle3 import load_head, new_head
from demo.learn import Rates, Sampler, Updates, greedy, written
from demo.models import load
from demo.parallel import Parallel

HELD_OUT_ROWS = 12
PROMPT_TOKENS = (4, 8, 16, 32)
# a drafter before training, of the folder of models, the target and its text
NEW: dict[str, Callable[[Path, Qwen3ForCausalLM, torch.Tensor], Drafter]] = {
    "parallel": lambda models, target, text_RS: Parallel(*load(models / "draft")),
    "eagle3": lambda models, target, text_RS: new_head(target, text_RS),
    "dflash": lambda models, target, text_RS: new_draft(target),
    "dspark": lambda models, target, text_RS: new_draft(target, RANK),
}
# a trained one of the same folder
TRAINED: dict[str, Callable[[Path, Qwen3ForCausalLM], Drafter]] = {
    "parallel": lambda models, target: Parallel(*load(models / "draft_parallel")),
    "eagle3": lambda models, target: load_head(models / "draft_eagle3"),
    "dflash": lambda models, target: load_draft(models / "draft_dflash", target),
    "dspark": lambda models, target: load_draft(models / "draft_dspark", target),
}


@dataclass(frozen=True)
class TextPlan:
    """The size of the text; its batches are greedy, drawn at T = 0.6 with top-p 0.95 and at T = 1, in turn."""

    batches: int = 48
    batch_rows: int = 64
    length: int = 256
    # for each structured row
    open_rows: int = 1
    seed: int = 5


@dataclass(frozen=True)
class DrafterPlan:
    """The size of a drafter's training."""

    steps: int
    rates: Rates
    batch: int = 4
    seed: int = 6
    every: int = 50


PLANS = {
    "parallel": DrafterPlan(1500, Rates(muon=6e-3, adamw=6e-3)),
    "eagle3": DrafterPlan(800, Rates(muon=8e-3, adamw=4e-3)),
    "dflash": DrafterPlan(1500, Rates(muon=8e-3, adamw=4e-3)),
    "dspark": DrafterPlan(1500, Rates(muon=8e-3, adamw=4e-3)),
}
# of a trained one
LONGER = DrafterPlan(600, Rates(muon=4e-3, adamw=2e-3), every=100)


def write_text(target: Qwen3ForCausalLM, tokenizer: Tokenizer, prose: Prose, plan: TextPlan) -> torch.Tensor:
    """Rows [R, S] that the target continued from the first tokens of corpus rows, shuffled."""
    generator = torch.Generator().manual_seed(plan.seed)
    choices = (greedy, Sampler(generator, 0.6, 0.95), Sampler(generator))
    ways = [(PROMPT_TOKENS[n // 3 % 4], choices[n % 3]) for n in range(plan.batches)]
    corpus = batches(prose, tokenizer, (plan.batch_rows, plan.length), plan.seed, plan.open_rows)
    rows = written(target, corpus, ways, plan.length)
    return rows[torch.randperm(len(rows), generator=generator)]


def passes(target: Qwen3ForCausalLM, text_RS: torch.Tensor, plan: DrafterPlan) -> Iterator[TargetPass]:
    """Endless passes of the target over its text, in a new order each time."""
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        for rows in torch.randperm(len(text_RS), generator=generator).split(plan.batch):
            yield target_pass(target, text_RS[rows])


def accepted(drafter: Drafter, held_out: list[TargetPass]) -> float:
    """Mean drafts of K that agree with the target's argmax on held-out rows of its text, over all anchors."""
    drafter.train(False)
    means = []
    for seen in held_out:
        anchors_A = torch.arange(8, seen.ids_BS.shape[1] - K, 7)
        drafts_AK = drafter.draft_logits(seen, anchors_A, K).argmax(-1)
        choices_AK = seen.logits_BSV[0].argmax(-1)[anchors_A[:, None] + torch.arange(K)]
        # those before the first miss
        means.append((drafts_AK == choices_AK).int().cumprod(-1).sum(-1).float().mean().item())
    return sum(means) / len(means)


def train(
    drafter: Drafter, target: Qwen3ForCausalLM, text_RS: torch.Tensor, plan: DrafterPlan, folder: Path
) -> dict[str, object]:
    """Run the plan; the weights that accept most on held-out rows go to the folder. Returns plan, seconds and curve."""
    began, held_out = time.perf_counter(), min(HELD_OUT_ROWS, len(text_RS) // 4)
    learned_RS, shown = text_RS[:-held_out], [target_pass(target, row[None]) for row in text_RS[-held_out:]]
    updates = Updates(drafter, drafter.hidden_matrices(), plan.rates, plan.steps)
    generator, seen = torch.Generator().manual_seed(plan.seed), passes(target, learned_RS, plan)
    curve: list[dict[str, float]] = []
    for step in track(range(1, plan.steps + 1), folder.name):
        drafter.train()
        loss = updates.apply(drafter.loss(next(seen), generator))
        if step in (1, plan.steps) or step % plan.every == 0:
            before, hits = max((p["accepted"] for p in curve), default=-1.0), round(accepted(drafter, shown), 3)
            curve.append({"step": step, "loss": round(loss, 4), "accepted": hits})
            print(json.dumps(curve[-1]), flush=True)
            if hits > before:
                drafter.save(folder)
    seconds = round(time.perf_counter() - began, 1)
    return {"plan": asdict(plan), "seconds": seconds, "text_rows": len(learned_RS), "curve": curve}
