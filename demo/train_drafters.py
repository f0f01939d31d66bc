"""Trains drafters for the demo target, one after the other; `python -m demo.train_drafters parallel`."""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import rich.progress
import torch
from transformers import Qwen3ForCausalLM

from demo.agreement import leading_hits
from demo.drafter import Drafter, K, TargetPass, target_pass
from demo.drafter_figure import loss_figure
from demo.drafters import NEW, TRAINED
from demo.learn import Rates, Updates
from demo.models import load
from demo.target_text import load_text

HERE = Path(__file__).parent
HELD_OUT_ROWS = 12
Point = dict[str, float | int]


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
    "medusa": DrafterPlan(450, Rates(muon=8e-3, adamw=4e-3)),
}
# for every drafter that goes on
AGAIN = DrafterPlan(1500, Rates(muon=4e-3, adamw=4e-3), seed=7)


@dataclass
class DrafterRun:
    """A training in progress: the drafter, its target, the text, and the curve so far."""

    drafter: Drafter
    target: Qwen3ForCausalLM
    plan: DrafterPlan
    text_RS: torch.Tensor
    curve: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        held_out = min(HELD_OUT_ROWS, len(self.text_RS) // 4)
        self.learned_RS = self.text_RS[:-held_out]
        self.held_out = [target_pass(self.target, row[None]) for row in self.text_RS[-held_out:]]

    def batches(self) -> Iterator[TargetPass]:
        """Endless passes of the target over its text, in a new order each time."""
        generator = torch.Generator().manual_seed(self.plan.seed)
        while True:
            for rows in torch.randperm(len(self.learned_RS), generator=generator).split(self.plan.batch):
                yield target_pass(self.target, self.learned_RS[rows])

    def accepted(self) -> float:
        """Mean drafts of K that agree with the target's argmax on held-out rows of its text, over all anchors."""
        self.drafter.module.train(False)
        means = []
        for seen in self.held_out:
            anchors_A = torch.arange(8, seen.ids_BS.shape[1] - K, 7)
            drafts_AK = self.drafter.draft_logits(seen, anchors_A, K).argmax(-1)
            choices_AK = seen.logits_BSV[0].argmax(-1)[anchors_A[:, None] + torch.arange(K)]
            means.append(leading_hits(drafts_AK == choices_AK).float().mean().item())
        return sum(means) / len(means)

    def train(self) -> Iterator[bool]:
        """Run the plan; after each point of the curve: are the held-out rows accepted better than ever?"""
        plan = self.plan
        updates = Updates(self.drafter.module, self.drafter.hidden_matrices(), plan.rates, plan.steps)
        generator, batches = torch.Generator().manual_seed(plan.seed), self.batches()
        before = self.curve[-1]["step"] if self.curve else 0
        best = max((point["accepted"] for point in self.curve), default=-1.0)
        for step in rich.progress.track(range(1, plan.steps + 1), "steps"):
            self.drafter.module.train()
            loss = updates.apply(self.drafter.loss(next(batches), generator))
            if step == 1 or step % plan.every == 0 or step == plan.steps:
                accepted = self.accepted()
                self.curve.append({"step": before + step, "loss": round(loss, 4), "accepted": round(accepted, 3)})
                print(json.dumps(self.curve[-1]), flush=True)
                yield accepted > best
                best = max(accepted, best)


def train(name: str, plan: DrafterPlan, text: Path, out: Path, again: bool) -> None:
    """Train one drafter into `out`/draft_<name>; plans, seconds and curve go to `out`/drafters.json."""
    began = time.perf_counter()
    torch.manual_seed(plan.seed)
    target, text_RS = load(HERE / "target")[0], load_text(text)
    report = out / "drafters.json"
    reports = json.loads(report.read_text()) if report.exists() else {}
    earlier = reports[name] if again else {"plans": [], "seconds": [], "curve": []}
    drafter = TRAINED[name](out) if again else NEW[name](HERE, target, text_RS)
    run = DrafterRun(drafter, target, plan, text_RS, earlier["curve"])
    for better in run.train():
        if better:
            drafter.save(out / f"draft_{name}")
        reports[name] = {
            "plans": [*earlier["plans"], asdict(plan)],
            "seconds": [*earlier["seconds"], round(time.perf_counter() - began, 1)],
            "text_rows": len(run.learned_RS),
            "trained_parameters": sum(w.numel() for w in drafter.module.parameters() if w.requires_grad),
            "curve": run.curve,
        }
        report.write_text(json.dumps(reports, indent=1) + "\n")
        (out / "drafters.svg").write_text(loss_figure({name: of["curve"] for name, of in reports.items()}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafters", nargs="+", choices=list(PLANS), help="which drafters, in this order")
    parser.add_argument("--text", type=Path, required=True, help="the file of demo.target_text")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into")
    parser.add_argument("--again", action="store_true", help="go on from the checkpoint and the curve in --out")
    parser.add_argument("--steps", type=int, help="steps of each, instead of the plan's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.drafters:
        plan = AGAIN if args.again else PLANS[name]
        plan = plan if args.steps is None else replace(plan, steps=args.steps)
        train(name, plan, args.text, args.out, args.again)
        print(args.out / f"draft_{name}")


if __name__ == "__main__":
    main()
