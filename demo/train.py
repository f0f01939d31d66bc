"""Trains the demo pair from nothing: tokenizer, target, both drafts; `python -m demo.train`."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich import progress
from transformers import Qwen3ForCausalLM

from demo.corpus import load_prose
from demo.learn import Learner, own_text
from demo.models import DRAFT, DRAFT_SMALL, TARGET, build, load, parameters, rounded, save
from demo.report import write_report
from demo.run import QUICK, Run, TrainingPlan
from demo.tokenizer import end_id, train_tokenizer

HERE = Path(__file__).parent
COLUMNS = (
    progress.TextColumn("{task.description:10}"),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeElapsedColumn(),
    progress.TimeRemainingColumn(),
)


def train_target(run: Run) -> Qwen3ForCausalLM:
    """The target, on the corpus; its weights end rounded to bfloat16."""
    plan = run.plan
    torch.manual_seed(plan.seed)
    learner = Learner(build(TARGET, end_id(run.tokenizer)), plan.target_rates, plan.steps)
    batches = run.batches(plan.seed, plan.batch)
    for step in run.stage("target", plan.steps):
        loss = learner.step(next(batches))
        if run.due(step, plan.steps):
            run.record(learner, TARGET.name, "corpus", step, loss)
    return rounded(learner.model)


def train_drafts(run: Run, target: Qwen3ForCausalLM) -> dict[str, Qwen3ForCausalLM]:
    """Both drafts: on the corpus first, then towards the target on corpus and on its own text."""
    plan, end = run.plan, end_id(run.tokenizer)
    torch.manual_seed(plan.seed + 1)
    total = plan.draft_steps + plan.distil_steps
    shapes = (DRAFT, DRAFT_SMALL)
    drafts = {s.name: Learner(build(s, end), plan.draft_rates, total) for s in shapes}
    batches = run.batches(plan.seed + 1, plan.batch)
    for step in run.stage("drafts", plan.draft_steps):
        ids = next(batches)
        for name, draft in drafts.items():
            loss = draft.step(ids)
            if run.due(step, plan.draft_steps):
                run.record(draft, name, "corpus", step, loss)
    own = own_rows(run, target)
    for step in run.stage("distil", plan.distil_steps):
        at = torch.arange(plan.batch) + step // 2 * plan.batch
        ids = own[at % len(own)] if step % 2 else next(batches)
        with torch.no_grad():
            teacher_logits = target(ids).logits
        for name, draft in drafts.items():
            loss = draft.step(ids, teacher_logits)
            if run.due(step, plan.distil_steps):
                run.record(draft, name, "distil", plan.draft_steps + step, loss)
    return {name: rounded(draft.model) for name, draft in drafts.items()}


def own_rows(run: Run, target: Qwen3ForCausalLM) -> torch.Tensor:
    """Rows of text that the target wrote, shuffled."""
    plan = run.plan
    prompts = run.batches(plan.seed + 2, plan.own_batch_rows)
    written = own_text(target, prompts, plan.own_batches, plan.length // 2, plan.seed)
    batches = [next(written) for _ in run.stage("own text", plan.own_batches)]
    order = torch.randperm(plan.own_batches * plan.own_batch_rows, generator=torch.Generator().manual_seed(plan.seed))
    return torch.cat(batches)[order]


def saved_target(run: Run, out: Path) -> Qwen3ForCausalLM:
    """The target of an earlier run of the same plan and its curve, instead of training it."""
    earlier = json.loads((out / "run.json").read_text())
    if earlier["plan"] != asdict(run.plan):
        raise SystemExit(f"{out / 'run.json'} is of another plan; train without --reuse-target.")
    run.curves += [point for point in earlier["curves"] if point["model"] == TARGET.name]
    run.stage_seconds["target"] = earlier["stage_seconds"]["target"]
    return load(out / TARGET.name)[0]


def finish(run: Run, models: dict[str, Qwen3ForCausalLM], out: Path) -> None:
    """Save what is trained so far, with its report."""
    for name, model in models.items():
        save(model, run.tokenizer, out / name)
    write_report(run, {name: parameters(model) for name, model in models.items()}, out)


def train(plan: TrainingPlan, out: Path, reuse_target: bool = False) -> None:
    """Run the plan and write three model folders, run.json and loss.svg into `out`."""
    torch.set_num_threads(1)
    prose = load_prose()
    with progress.Progress(*COLUMNS) as bar:
        run = Run(plan, prose, train_tokenizer(prose, plan.seed), bar)
        target = saved_target(run, out) if reuse_target else train_target(run)
        finish(run, {TARGET.name: target}, out)
        finish(run, {TARGET.name: target, **train_drafts(run, target)}, out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into")
    parser.add_argument("--steps", type=int, help=f"steps of the target (default {TrainingPlan.steps})")
    parser.add_argument("--seed", type=int, default=TrainingPlan.seed, help="seed of everything")
    parser.add_argument("--quick", action="store_true", help="a few steps, to test the script")
    parser.add_argument("--reuse-target", action="store_true", help="train only the drafts, for the target in --out")
    args = parser.parse_args()
    plan = replace(QUICK if args.quick else TrainingPlan(), seed=args.seed)
    plan = plan if args.steps is None else replace(plan, steps=args.steps)
    train(plan, args.out, args.reuse_target)
    print(args.out)


if __name__ == "__main__":
    main()
