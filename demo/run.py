"""`python -m demo.run [--only NAME ...]`: trains the demo's tokenizer, target and drafters from nothing, about 2 hours.

`pair` is the tokenizer, the target and both chain drafts; the others learn from text that the target in --out writes.
`run.json` in --out gets the plan, the seconds and the curve of each. Numbers describe these stand-ins alone.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from demo.corpus import load_prose
from demo.models import load, save
from demo.tokenizer import train_tokenizer
from demo.train import PairPlan, PairRun
from demo.train_drafters import LONGER, NEW, PLANS, TRAINED, TextPlan, train, write_text

HERE = Path(__file__).parent
STAGES = ("pair", *NEW)


def train_pair(out: Path, plan: PairPlan) -> dict[str, object]:
    """Write the folders of the target and its chain drafts; returns the report."""
    prose = load_prose()
    run = PairRun(plan, prose, train_tokenizer(prose, plan.seed))
    target = run.target()
    for name, model in {"target": target, **run.drafts(target)}.items():
        save(model, run.tokenizer, out / name)
    return run.report()


def train_drafters(names: list[str], out: Path, text: TextPlan, longer: bool) -> dict[str, dict[str, object]]:
    """Write these drafters' folders for the target in `out`, or train those there longer; returns their reports."""
    target, tokenizer = load(out / "target")
    text_RS, reports = write_text(target, tokenizer, load_prose(), text), {}
    for name in names:
        plan = LONGER if longer else PLANS[name]
        torch.manual_seed(plan.seed)
        drafter = TRAINED[name](out, target) if longer else NEW[name](out, target, text_RS)
        reports[name] = train(drafter, target, text_RS, plan, out / f"draft_{name}")
    return reports


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="default: all, in order")
    parser.add_argument("--batches", type=int, default=TextPlan.batches, help="of 64 rows of the target's text")
    parser.add_argument("--open-rows", type=int, default=TextPlan.open_rows, help="of them for each structured one")
    parser.add_argument("--longer", action="store_true", help="train the drafters in --out longer")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the model folders, read and written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.out / "run.json"
    reports = json.loads(file.read_text()) if file.exists() else {}
    if "pair" in args.only:
        reports["pair"] = train_pair(args.out, PairPlan())
    names = [name for name in NEW if name in args.only]
    if names:
        text = TextPlan(batches=args.batches, open_rows=args.open_rows)
        for name, report in train_drafters(names, args.out, text, args.longer).items():
            before = {"before": reports.get(name)} if args.longer else {}
            reports[name] = report | {"text": asdict(text)} | before
    file.write_text(json.dumps(reports, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
