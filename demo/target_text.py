"""Text that the target wrote, which the drafters learn from; `python -m demo.target_text FILE`."""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from demo.corpus import load_prose, mixed_rows
from demo.learn import Sampler, continued, greedy
from demo.models import load

HERE = Path(__file__).parent
PROMPT_TOKENS = (4, 8, 16, 32)


@dataclass(frozen=True)
class TextPlan:
    """How much text; every batch is of one kind: greedy, at T = 0.6 with top-p 0.95, at T = 1, in turn."""

    batches: int = 48
    batch_rows: int = 64
    length: int = 256
    seed: int = 5


QUICK = TextPlan(batches=3, batch_rows=4, length=48)


def write_text(target_folder: Path, plan: TextPlan) -> torch.Tensor:
    """Rows [R, S] that the target continued from the first tokens of corpus rows, shuffled."""
    target, tokenizer = load(target_folder)
    generator = torch.Generator().manual_seed(plan.seed)
    choices = (greedy, Sampler(generator, 0.6, 0.95), Sampler(generator))
    stream = mixed_rows(load_prose(), tokenizer, plan.length, plan.seed)
    batches = []
    for n in track(range(plan.batches), "target text"):
        prompt_tokens = PROMPT_TOKENS[n // len(choices) % len(PROMPT_TOKENS)]
        prompts = torch.tensor(list(itertools.islice(stream, plan.batch_rows)))[:, :prompt_tokens]
        batches.append(continued(target, prompts, plan.length - prompt_tokens, choices[n % len(choices)]))
    rows = torch.cat(batches)
    return rows[torch.randperm(len(rows), generator=generator)]


def load_text(file: Path) -> torch.Tensor:
    """Rows [R, S] of ids, as saved by this module."""
    return torch.from_numpy(np.load(file).astype(np.int64))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the .npy file to write")
    parser.add_argument("--target", type=Path, default=HERE / "target", help="folder of the target")
    parser.add_argument("--quick", action="store_true", help="a few rows, to test the script")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = write_text(args.target, QUICK if args.quick else TextPlan())
    args.file.parent.mkdir(parents=True, exist_ok=True)
    np.save(args.file, rows.numpy().astype(np.uint16))
    print(args.file)


if __name__ == "__main__":
    main()
