"""The size of a training run and its state: batches, held-out rows, recorded curves."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import rich.progress
import torch
from tokenizers import Tokenizer

from demo.corpus import Prose, Source, mixed_rows, rows
from demo.learn import Learner, Rates, held_out_loss

HELD_OUT_ROWS = 8
TARGET_RATES, DRAFT_RATES = Rates(muon=5e-3, adamw=4e-3), Rates(muon=8e-3, adamw=1e-2)
Point = dict[str, float | int | str]


@dataclass(frozen=True)
class TrainingPlan:
    """The size of a run; the steps of the drafts follow from those of the target."""

    steps: int = 1100
    batch: int = 4
    length: int = 512
    seed: int = 0
    target_rates: Rates = TARGET_RATES
    draft_rates: Rates = DRAFT_RATES
    own_batches: int = 24
    own_batch_rows: int = 24
    every: int = 50

    @property
    def draft_steps(self) -> int:
        """Steps of the drafts on the corpus."""
        return max(1, round(0.25 * self.steps))

    @property
    def distil_steps(self) -> int:
        """Steps of the drafts towards the target."""
        return max(1, round(0.6 * self.steps))


QUICK = TrainingPlan(steps=4, batch=2, length=64, own_batches=2, own_batch_rows=2, every=2)


@dataclass
class Run:
    """What a run reads and what it has recorded so far."""

    plan: TrainingPlan
    prose: Prose
    tokenizer: Tokenizer
    progress: rich.progress.Progress
    held_out: dict[str, torch.Tensor] = field(default_factory=dict)
    curves: list[Point] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entropy in ("structured", "open"):
            source = Source(self.prose, entropy, held_out=True)
            stream = rows(source, self.tokenizer, self.plan.length, self.plan.seed)
            self.held_out[entropy] = torch.tensor(list(itertools.islice(stream, HELD_OUT_ROWS)))

    def batches(self, seed: int, batch: int) -> Iterator[torch.Tensor]:
        """Endless batches [B, S], half of the rows structured and half open."""
        stream = mixed_rows(self.prose, self.tokenizer, self.plan.length, seed)
        while True:
            yield torch.tensor(list(itertools.islice(stream, batch)))

    def record(self, learner: Learner, name: str, stage: str, step: int, loss: float) -> None:
        """Keep a point of the loss curve, with the held-out loss of each class."""
        point: Point = {"model": name, "stage": stage, "step": step, "loss": round(loss, 4)}
        for entropy, ids in self.held_out.items():
            point[f"held_out_{entropy}"] = round(held_out_loss(learner.model, ids), 4)
        self.curves.append(point)
        self.progress.console.print(json.dumps(point), soft_wrap=True, highlight=False)

    def stage(self, name: str, steps: int) -> Iterator[int]:
        """Count steps from 1 under a progress bar and keep how long the stage took."""
        began = time.perf_counter()
        yield from self.progress.track(range(1, steps + 1), description=name)
        self.stage_seconds[name] = round(time.perf_counter() - began, 1)

    def due(self, step: int, steps: int) -> bool:
        """Whether this step's loss is recorded."""
        return step == 1 or step % self.plan.every == 0 or step == steps
