"""`python -m demo.run [--only NAME ...]`: trains the demo's tokenizer, target and drafters from nothing, about 2 hours.

`pair` is the tokenizer, the target and both chain drafts; the others learn from text that the target in --out writes.
`run.json` in --out gets the plan, the seconds and the curve of each. Numbers describe these stand-ins alone.
"""

import argparse
import json
from pathlib import Path

import torch

from demo.corpus import load_prose
from demo.models import load, save
from demo.tokenizer import train_tokenizer
from demo.train import PairPlan, PairRun
from demo.train_drafters import NEW, PLANS, TextPlan, train, write_text

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


def train_drafters(names: list[str], out: Path, text: TextPlan) -> dict[str, dict[str, object]]:
    """Write the folders of these drafters for the target in `out`; returns their reports."""
    target, tokenizer = load(out / "target")
    text_RS, reports = write_text(target, tokenizer, load_prose(), text), {}
    for name in names:
        torch.manual_seed(PLANS[name].seed)
        reports[name] = train(NEW[name](out, target, text_RS), target, text_RS, PLANS[name], out / f"draft_{name}")
    return reports


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="default: all, in order")
    parser.add_argument("--batches", type=int, default=TextPlan.batches, help="of 64 rows of the target's text")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the model folders, read and written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.out / "run.json"
    reports = json.loads(file.read_text()) if file.exists() else {}
    if "pair" in args.only:
        reports["pair"] = train_pair(args.out, PairPlan())
    names = [name for name in NEW if name in args.only]
    reports |= train_drafters(names, args.out, TextPlan(batches=args.batches)) if names else {}
    file.write_text(json.dumps(reports, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
