"""How many drafts of each drafter the target accepts, by position; `python -m demo.acceptance`.

The target writes a text; at every position of it each drafter proposes K drafts, and those before the first miss are
accepted. Exact, not modelled: while drafts are accepted, a drafter's own text is the target's.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from transformers import Qwen3ForCausalLM

from demo.acceptance_figure import Acceptance, acceptance_figure
from demo.agreement import leading_hits
from demo.drafter import Drafter, TargetPass, target_pass
from demo.drafters import TRAINED, Chain, load_proposer
from demo.evaluate import Prompt, load_prompts
from demo.learn import continued, greedy, top_p_logits
from demo.models import load
from demo.tokenizer import end_id

HERE = Path(__file__).parent
NEW_TOKENS = 200
SAMPLES = 2
MOST = 15
TEMPERATURE, TOP_P = 0.6, 0.95
# anchors of one pass, to bound the memory of its mask
CHUNK = 64
NOTE = "Stand-in models; acceptance of the demo target's own text, which says nothing about Qwen3-32B."


NAMES = ("chain", *TRAINED)
Proposer = Chain | Drafter
Drafts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Text:
    """A text of the target: its pass, the anchors at which a step may begin, its end, and the noise it was drawn with.

    Without noise it is greedy. `noise_SV` is that of the token at each position.
    """

    seen: TargetPass
    start: int
    stop: int
    noise_SV: torch.Tensor | None

    @property
    def anchors_A(self) -> torch.Tensor:
        """Positions of last kept tokens, from the first token that the target wrote."""
        return torch.arange(self.start, self.stop - 1)

    @property
    def room_A(self) -> torch.Tensor:
        """How many tokens follow each anchor before the text stops."""
        return self.stop - 1 - self.anchors_A


@dataclass(frozen=True)
class CoupledDraw:
    """Draws the token at each next position with that position's noise, as the project's coupled sampling does."""

    noise: Iterator[torch.Tensor]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return (sharpened(logits) + next(self.noise)).argmax(-1, keepdim=True)


def sharpened(logits: torch.Tensor) -> torch.Tensor:
    """Logits over the temperature, those that top-p removes at -inf."""
    return top_p_logits(logits / TEMPERATURE, TOP_P)


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Gumbel(0, 1) noise."""
    return -torch.empty(shape).exponential_(generator=generator).log()


def write(target: Qwen3ForCausalLM, ids: list[int], new: int, end: int, generator: torch.Generator | None) -> Text:
    """The target's text after a prompt, and MOST tokens more so that the last steps have something to propose."""
    length, noise_SV = len(ids) + new + MOST, None
    if generator is None:
        text = continued(target, torch.tensor([ids]), new + MOST, greedy)
    else:
        noise_SV = gumbel((length, target.config.vocab_size), generator)
        text = continued(target, torch.tensor([ids]), new + MOST, CoupledDraw(iter(noise_SV[len(ids) :])))
    written = text[0, len(ids) : len(ids) + new].tolist()
    stop = len(ids) + (written.index(end) + 1 if end in written else new)
    return Text(target_pass(target, text), len(ids), stop, noise_SV)


def ways(text: Text, logits_AKV: torch.Tensor, anchors_A: torch.Tensor, generator: torch.Generator) -> Drafts:
    """Which drafts (A, K) are hits, by each way of choosing them that fits the text.

    coupled: drawn with the noise of the target's draw; independent: with noise of their own; best: the most likely
    ids. rejection is an estimate of the rule of Leviathan et al. 2023: a draft drawn with noise of its own is kept with
    probability sum(min(target, draft)), here after the text before it.
    """
    drafted_AK = anchors_A[:, None] + 1 + torch.arange(logits_AKV.shape[1])
    tokens_AK, best_AK = text.seen.ids_BS[0][drafted_AK], logits_AKV.argmax(-1)
    if text.noise_SV is None:
        return {"greedy": best_AK == tokens_AK}
    sharp_AKV, target_SV = sharpened(logits_AKV), sharpened(text.seen.logits_BSV[0]).softmax(-1)
    overlap_AK = torch.minimum(target_SV[drafted_AK - 1], sharp_AKV.softmax(-1)).sum(-1)
    return {
        "coupled": (sharp_AKV + text.noise_SV[drafted_AK]).argmax(-1) == tokens_AK,
        "independent": (sharp_AKV + gumbel(tuple(sharp_AKV.shape), generator)).argmax(-1) == tokens_AK,
        "best": best_AK == tokens_AK,
        "rejection": torch.rand(overlap_AK.shape, generator=generator) < overlap_AK,
    }


def accepted(drafter: Proposer, text: Text, generator: torch.Generator) -> Drafts:
    """For each way: how many of MOST drafts are accepted at each anchor (A,); drafts past the stop are not."""
    counts: dict[str, list[torch.Tensor]] = {}
    for anchors_A in text.anchors_A.split(CHUNK):
        logits_AKV = drafter.draft_logits(text.seen, anchors_A, MOST)
        for way, hits_AK in ways(text, logits_AKV, anchors_A, generator).items():
            counts.setdefault(way, []).append(leading_hits(hits_AK))
    return {way: torch.cat(parts).minimum(text.room_A) for way, parts in counts.items()}


def steps_of(accepted_A: list[int], k: int) -> int:
    """How many steps of k drafts write the text: each keeps the accepted drafts and one token of the target's."""
    at, steps = 0, 0
    while at < len(accepted_A):
        at += min(accepted_A[at], k) + 1
        steps += 1
    return steps


def summary(drafter: str, entropy: str, way: str, cases: list[tuple[Text, torch.Tensor]]) -> Acceptance:
    """Over all texts of a class."""
    counts, room = (torch.cat(parts) for parts in zip(*((c, text.room_A) for text, c in cases), strict=True))
    shares = [(counts[room > i] > i).float().mean().item() for i in range(MOST)]
    steps = [sum(steps_of(c.tolist(), i + 1) for _, c in cases) for i in range(MOST)]
    return Acceptance(
        drafter=drafter,
        entropy=entropy,
        way=way,
        tokens=len(counts),
        by_position=[round(share, 4) for share in shares],
        tokens_per_step=[round(len(counts) / n, 3) for n in steps],
    )


def measure(
    models: Path, names: Iterable[str], prompts: list[Prompt], new: int = NEW_TOKENS, samples: int = SAMPLES
) -> list[Acceptance]:
    """These drafters on a greedy text and on drawn texts of every prompt."""
    target, tokenizer = load(models / "target")
    drafters = {name: load_proposer(name, models) for name in names}
    cases: dict[tuple[str, str, str], list[tuple[Text, torch.Tensor]]] = {}
    for n, prompt in enumerate(track(prompts, "prompts")):
        ids = tokenizer.encode(prompt.text).ids
        for sample in range(samples + 1):
            generator = torch.Generator().manual_seed(n * 1000 + sample)
            text = write(target, ids, new, end_id(tokenizer), generator if sample else None)
            for name, drafter in drafters.items():
                # of each drafter alone, whichever others are measured
                generator.manual_seed(n * 1000 + 500 + sample)
                for way, counts in accepted(drafter, text, generator).items():
                    cases.setdefault((name, prompt.entropy, way), []).append((text, counts))
    return [summary(*key, own) for key, own in sorted(cases.items())]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafters", nargs="*", default=NAMES, help="which (default: all); the others' results stay")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the model folders")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="new tokens per prompt")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of acceptance.json and acceptance.svg")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.out / "acceptance.json"
    earlier = [Acceptance(**r) for r in json.loads(file.read_text())["results"]] if file.exists() else []
    results = [r for r in earlier if r.drafter not in args.drafters]
    results += measure(args.models, args.drafters, load_prompts(), args.tokens)
    results.sort(key=lambda r: (NAMES.index(r.drafter), r.entropy, r.way))
    report = {"note": NOTE, "temperature": TEMPERATURE, "top_p": TOP_P, "results": [asdict(r) for r in results]}
    file.write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "acceptance.svg").write_text(acceptance_figure(results))
    for r in results:
        print(f"{r.drafter:9} {r.entropy:11} {r.way:12}", *(f"{n:6.2f}" for n in r.tokens_per_step))
    print(file)


if __name__ == "__main__":
    main()
