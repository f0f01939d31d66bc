"""`python -m demo.train --out DIR`: trains a target and its chain drafts as the demo's, in about an hour on one thread.

The target learns the next token of the corpus. The drafts learn it too, and then the target's probabilities, in turn on
rows of the corpus and on text that the target wrote. Hidden matrices are updated by Muon, other weights by AdamW.
Shapes, tokenizer and files are those of the committed models; the weights differ.
"""

import argparse
import copy
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoConfig, DynamicCache, Qwen3ForCausalLM

from demo.corpus import batches

HERE = Path(__file__).parent
DRAFTS = ("draft", "draft_small")
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
# peak rates of Muon and AdamW
TARGET_RATES, DRAFT_RATES = (5e-3, 4e-3), (8e-3, 1e-2)
_WARMUP, _FINAL = 0.04, 0.03
_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """Steps of the target, of the drafts on the corpus and of the drafts towards the target, and sizes of a step."""

    target: int = 1100
    draft: int = 275
    distil: int = 660
    batch: int = 4
    length: int = 512
    written: int = 576


def new_model(name: str) -> Qwen3ForCausalLM:
    """A model of the committed shape. Wider than Qwen's 0.02, which is too small here; blocks begin as the identity."""
    model = Qwen3ForCausalLM(AutoConfig.from_pretrained(HERE / name)).float()
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.03 if model.config.tie_word_embeddings else 0.5)
    for weight_name, weight in model.model.layers.named_parameters():
        if weight_name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
        elif weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


class Learner:
    """A model with its optimizers and their cosine schedules."""

    def __init__(self, name: str, rates: tuple[float, float], steps: int) -> None:
        self.model = new_model(name)
        matrices = [w for w in self.model.model.layers.parameters() if w.ndim == 2]
        taken = {id(w) for w in matrices}
        others = [w for w in self.model.parameters() if id(w) not in taken]
        self.optimizers: list[torch.optim.Optimizer] = [
            # updates as large as AdamW's (Moonlight, arXiv 2502.16982)
            torch.optim.Muon(matrices, lr=rates[0], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rates[1], betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: _share_of_peak(step, steps)) for o in self.optimizers
        ]

    def step(self, ids: torch.Tensor, teacher: torch.Tensor | None = None) -> float:
        """One update on ids (B, S): the next token's loss, or KL(target || draft) to teacher logits (B, S, V)."""
        self.model.train()
        logits = self.model(ids).logits
        if teacher is None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        else:
            target, draft = (x.flatten(0, 1).log_softmax(-1) for x in (teacher, logits))
            loss = functional.kl_div(draft, target, log_target=True, reduction="batchmean")
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.item()


def _share_of_peak(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _FINAL + (1 - _FINAL) * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def written(target: Qwen3ForCausalLM, corpus: Iterator[torch.Tensor], rows: int, length: int) -> torch.Tensor:
    """Rows (R, length) that the target continues from the first tokens of corpus rows, greedy and sampled in turn."""
    parts = list[torch.Tensor]()
    while sum(map(len, parts)) < rows:
        ids, cache = next(corpus)[:, :_PROMPT_TOKENS], DynamicCache()
        step = ids
        while ids.shape[1] < length:
            logits = target(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            step = torch.multinomial(logits.softmax(-1), 1) if len(parts) % 2 else logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, step], dim=1)
        parts.append(ids)
    return torch.cat(parts)[torch.randperm(rows)]


def train(plan: Plan, tokenizer: Tokenizer) -> dict[str, Qwen3ForCausalLM]:
    """The trained models by name, in fp32 with weights rounded to bf16."""
    corpus = batches(tokenizer, plan.batch, plan.length, seed=0)
    learner = Learner("target", TARGET_RATES, plan.target)
    for _ in track(range(plan.target), "target"):
        learner.step(next(corpus))
    target = rounded(learner.model)
    learners = {name: Learner(name, DRAFT_RATES, plan.draft + plan.distil) for name in DRAFTS}
    for _ in track(range(plan.draft), "drafts on the corpus"):
        ids = next(corpus)
        for learner in learners.values():
            learner.step(ids)
    own = written(target, batches(tokenizer, 24, plan.length, seed=1), plan.written, plan.length // 2)
    for step in track(range(plan.distil), "drafts towards the target"):
        ids = own[torch.randint(len(own), (plan.batch,))] if step % 2 else next(corpus)
        with torch.no_grad():
            teacher = target(ids).logits
        for learner in learners.values():
            learner.step(ids, teacher)
    return {"target": target} | {name: rounded(learner.model) for name, learner in learners.items()}


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model with its weights rounded, one by one: casting the module would round rotary frequencies too."""
    for weight in model.parameters():
        weight.data.copy_(weight.data.bfloat16())
    return model.eval()


def save(model: Qwen3ForCausalLM, name: str, folder: Path) -> None:
    """A Hugging Face folder in bf16 with the committed configuration and tokenizer."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    for file in COPIED:
        shutil.copyfile(HERE / name / file, folder / file)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model folders")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, model in train(Plan(), Tokenizer.from_file(str(HERE / "target/tokenizer.json"))).items():
        save(model, name, out / name)
        print(json.dumps({"model": name, "parameters": sum(w.numel() for w in model.parameters())}))


if __name__ == "__main__":
    main()
