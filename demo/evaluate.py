"""How often each draft agrees with the target, by prompt class; `python -m demo.evaluate`."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from demo.agreement import accepted_runs, agreements, greedy_ids, sampled_acceptance
from demo.learn import Sampler, continued
from demo.models import load
from demo.tokenizer import end_id

HERE = Path(__file__).parent
DRAFTS = ("draft", "draft_small")
NEW_TOKENS = 200
SAMPLES = 4
K = 7
CAPTION = "Stand-in models, bfloat16-rounded weights; says nothing about Qwen3-32B."


@dataclass(frozen=True)
class Prompt:
    """One prompt of demo/prompts.json; entropy is structured or open."""

    name: str
    entropy: str
    text: str


@dataclass(frozen=True)
class Agreement:
    """A draft on the target's own text after one prompt: greedy, and sampled at temperature 1."""

    prompt: str
    entropy: str
    draft: str
    tokens: int
    agreement: float
    accepted_of_7: float
    tokens_per_target_pass: float
    sampled_acceptance: float


def load_prompts(file: Path = HERE / "prompts.json") -> list[Prompt]:
    """The fixed prompt set."""
    return [Prompt(**prompt) for prompt in json.loads(file.read_text())["prompts"]]


def evaluate(folder: Path, new: int = NEW_TOKENS) -> list[Agreement]:
    """Every draft on every prompt."""
    target, tokenizer = load(folder / "target")
    drafts = {name: load(folder / name)[0] for name in DRAFTS}
    results = []
    for prompt in load_prompts():
        ids = tokenizer.encode(prompt.text).ids
        generator = torch.Generator().manual_seed(0)
        sampled = continued(target, torch.tensor([ids] * SAMPLES), new, Sampler(generator))
        continuation = greedy_ids(target, ids, new, end_id(tokenizer))
        for name, draft in drafts.items():
            agree = agreements(draft, ids, continuation)
            runs = accepted_runs(agree, K)
            acceptance = sampled_acceptance(target, draft, sampled, len(ids), end_id(tokenizer))
            results.append(
                Agreement(
                    prompt=prompt.name,
                    entropy=prompt.entropy,
                    draft=name,
                    tokens=len(agree),
                    agreement=round(sum(agree) / len(agree), 4),
                    accepted_of_7=round(sum(runs) / len(runs), 3),
                    tokens_per_target_pass=round(len(agree) / len(runs), 3),
                    sampled_acceptance=round(acceptance, 4),
                )
            )
    return results


def numbers(result: Agreement) -> tuple[float, ...]:
    """The measured columns."""
    r = result
    return r.agreement, r.accepted_of_7, r.tokens_per_target_pass, r.sampled_acceptance


def class_means(results: list[Agreement], draft: str, entropy: str) -> list[float]:
    """Means over the prompts of one class, in the order of `numbers`."""
    own = [numbers(r) for r in results if (r.draft, r.entropy) == (draft, entropy)]
    return [sum(column) / len(own) for column in zip(*own, strict=True)]


def table(results: list[Agreement]) -> Table:
    """The class means, then each prompt."""
    shown = Table("draft", "prompt", "agreement", f"of {K}", "tokens/pass", "sampled")
    shown.caption = CAPTION
    for draft in DRAFTS:
        for entropy in ("structured", "open"):
            means = class_means(results, draft, entropy)
            shown.add_row(draft, f"mean, {entropy}", *(f"{mean:.2f}" for mean in means))
    shown.add_section()
    for result in results:
        shown.add_row(result.draft, result.prompt, *(f"{n:.2f}" for n in numbers(result)))
    return shown


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the model folders")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="new tokens per prompt")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = evaluate(args.models, args.tokens)
    Console().print(table(results))
    if args.json:
        written = {"note": CAPTION, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
