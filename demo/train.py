"""Training of the target on the corpus, and of both chain drafts on the corpus and on the target's probabilities."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import tokenizers
import torch
import transformers
from rich.progress import track
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from demo.corpus import Prose, batches, end_id, rows
from demo.learn import Rates, Sampler, Updates, distillation_loss, greedy, next_token_loss, written
from demo.models import build, rounded

HELD_OUT_ROWS = 8
TARGET_RATES, DRAFT_RATES = Rates(muon=5e-3, adamw=4e-3), Rates(muon=8e-3, adamw=1e-2)
OWN_PROMPT_TOKENS = (8, 16, 32)
Point = dict[str, float | int | str]


@dataclass(frozen=True)
class PairPlan:
    """The size of a run: steps of the target, of the drafts on the corpus, and of the drafts towards the target."""

    steps: int = 1100
    draft_steps: int = 275
    distil_steps: int = 660
    batch: int = 4
    length: int = 512
    seed: int = 0
    target_rates: Rates = TARGET_RATES
    draft_rates: Rates = DRAFT_RATES
    own_batches: int = 24
    own_batch_rows: int = 24
    every: int = 50


class Learner:
    """A language model with its updates."""

    def __init__(self, name: str, end: int, rates: Rates, steps: int) -> None:
        self.name, self.model = name, build(name, end)
        self.updates = Updates(self.model, self.model.model.layers.parameters(), rates, steps)

    def step(self, ids: torch.Tensor, teacher_logits: torch.Tensor | None = None) -> float:
        """One update on ids [B, S]: next-token loss, or the distance to teacher logits [B, S, V]."""
        self.model.train()
        logits = self.model(ids).logits
        loss = next_token_loss(logits, ids) if teacher_logits is None else distillation_loss(logits, teacher_logits)
        return self.updates.apply(loss)


class PairRun:
    """A run of the plan: its text, its curve, and the seconds of each stage."""

    def __init__(self, plan: PairPlan, prose: Prose, tokenizer: Tokenizer) -> None:
        self.plan, self.prose, self.tokenizer = plan, prose, tokenizer
        self.curve: list[Point] = []
        self.seconds: dict[str, float] = {}
        self.held_out: dict[str, torch.Tensor] = {}
        for entropy in ("structured", "open"):
            stream = rows(prose, entropy, tokenizer, plan.length, plan.seed, held_out=True)
            self.held_out[entropy] = torch.tensor(list(itertools.islice(stream, HELD_OUT_ROWS)))

    def batches(self, seed: int, count: int) -> Iterator[torch.Tensor]:
        """Batches [count, S] of the corpus."""
        return batches(self.prose, self.tokenizer, (count, self.plan.length), seed)

    def stage(self, name: str, steps: int) -> Iterator[int]:
        """Count steps from 1 under a progress bar, and keep the stage's seconds."""
        began = time.perf_counter()
        yield from track(range(1, steps + 1), name)
        self.seconds[name] = round(time.perf_counter() - began, 1)

    @torch.no_grad()
    def record(self, learner: Learner, stage: str, at: tuple[int, int, int], loss: float) -> None:
        """At the first, each `every`-th and the last step (before the stage, in it, all): a point of the curve."""
        before, step, steps = at
        if step not in (1, steps) and step % self.plan.every:
            return
        point: Point = {"model": learner.name, "stage": stage, "step": before + step, "loss": round(loss, 4)}
        learner.model.train(False)
        for entropy, ids in self.held_out.items():
            point[f"held_out_{entropy}"] = round(next_token_loss(learner.model(ids).logits, ids).item(), 4)
        self.curve.append(point)
        print(json.dumps(point), flush=True)

    def target(self) -> Qwen3ForCausalLM:
        """The target, on the corpus; its weights end rounded to bfloat16."""
        plan = self.plan
        torch.manual_seed(plan.seed)
        learner = Learner("target", end_id(self.tokenizer), plan.target_rates, plan.steps)
        corpus = self.batches(plan.seed, plan.batch)
        for step in self.stage("target", plan.steps):
            self.record(learner, "corpus", (0, step, plan.steps), learner.step(next(corpus)))
        return rounded(learner.model)

    def drafts(self, target: Qwen3ForCausalLM) -> dict[str, Qwen3ForCausalLM]:
        """Both drafts: on the corpus first, then towards the target, on corpus rows and on its own text in turn."""
        plan, end = self.plan, end_id(self.tokenizer)
        torch.manual_seed(plan.seed + 1)
        total = plan.draft_steps + plan.distil_steps
        learners = [Learner(name, end, plan.draft_rates, total) for name in ("draft", "draft_small")]
        corpus = self.batches(plan.seed + 1, plan.batch)
        for step in self.stage("drafts", plan.draft_steps):
            ids = next(corpus)
            for learner in learners:
                self.record(learner, "corpus", (0, step, plan.draft_steps), learner.step(ids))
        own_RS = self.own_rows(target)
        for step in self.stage("distil", plan.distil_steps):
            at = torch.arange(plan.batch) + step // 2 * plan.batch
            ids = own_RS[at % len(own_RS)] if step % 2 else next(corpus)
            with torch.no_grad():
                teacher_logits = target(ids).logits
            for learner in learners:
                loss = learner.step(ids, teacher_logits)
                self.record(learner, "distil", (plan.draft_steps, step, plan.distil_steps), loss)
        return {learner.name: rounded(learner.model) for learner in learners}

    def own_rows(self, target: Qwen3ForCausalLM) -> torch.Tensor:
        """Rows of text that the target wrote, greedy and sampled in turn, shuffled."""
        plan, generator = self.plan, torch.Generator().manual_seed(self.plan.seed)
        choices = (greedy, Sampler(generator))
        ways = [(OWN_PROMPT_TOKENS[n % 3], choices[n % 2]) for n in range(plan.own_batches)]
        own_RS = written(target, self.batches(plan.seed + 2, plan.own_batch_rows), ways, plan.length // 2)
        return own_RS[torch.randperm(len(own_RS), generator=torch.Generator().manual_seed(plan.seed))]

    def report(self) -> dict[str, object]:
        """Plan, seconds, versions, data and curve."""
        versions = {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)}
        data = {"versions": versions, "prose_sha256": self.prose.sha256}
        return {"plan": asdict(self.plan), "seconds": self.seconds, **data, "curve": self.curve}
