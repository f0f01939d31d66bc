"""Which candidates a tree of few rows should have, from what the drafters' candidates met; `python -m demo.trees`.

At every position of the target's text each drafter proposes ids for the next positions, ranked by its scores under the
noise of the target's draws. A node of a tree is a list of ranks, one for each position from the anchor on; it is kept
where the text has exactly these. The tree of n rows is grown by the node that is kept most often, on half of the
prompts; what it keeps a step is counted on the other half, beside a chain's of the same rows. Exact for parallel and
Medusa drafts, whose candidates do not hang on each other. A chain's and EAGLE's are known behind their best drafts
alone, so siblings in their trees have no children.
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track

from demo.acceptance import CHUNK, HERE, NOTE, SAMPLES, TEMPERATURE, TOP_P, Proposer, Text, sharpened, write
from demo.drafters import TRAINED, load_proposer
from demo.evaluate import load_prompts
from demo.models import load
from demo.tokenizer import end_id

NEW_TOKENS = 100
DEPTH = 15
ROWS = (4, 8, 16)
# ranks from here on are one: no candidate
WIDTH = 8
# whose siblings have children: drafts that do not read each other
INDEPENDENT = ("parallel", "medusa")
Node = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """A tree that was grown for a drafter and a kind of text, as the parents of its rows, and tokens a step of it and
    of the chain of as many rows."""

    drafter: str
    entropy: str
    way: str
    rows: int
    tree: str
    tokens_per_step: float
    of_chain: float


def ranks_of(drafter: Proposer, text: Text) -> list[Node]:
    """At each anchor the ranks that the text's next tokens have among the drafts; WIDTH ends it, as the text's stop."""
    found: list[Node] = []
    for anchors_A in text.anchors_A.split(CHUNK):
        scores_AKV = drafter.draft_logits(text.seen, anchors_A, DEPTH)
        positions_AK = anchors_A[:, None] + 1 + torch.arange(DEPTH)
        if text.noise_SV is not None:
            scores_AKV = sharpened(scores_AKV) + text.noise_SV[positions_AK]
        own_AK1 = scores_AKV.gather(-1, text.seen.ids_BS[0][positions_AK][..., None])
        ranks_AK = (scores_AKV > own_AK1).sum(-1).where(own_AK1[..., 0] > float("-inf"), WIDTH).clamp(max=WIDTH)
        found += [tuple(ranks) for ranks in ranks_AK.tolist()]
    return [ranks[:room] for ranks, room in zip(found, text.room_A.tolist(), strict=True)]


def grown(cases: list[Node], rows: int, independent: bool) -> list[Node]:
    """The nodes of a tree of so many rows, the input id's among them, parents and better siblings first."""
    kept = Counter(ranks[:depth] for ranks in cases for depth in range(1, len(ranks) + 1))
    nodes: list[Node] = [()]
    while len(nodes) < rows:
        hang = [n for n in nodes if independent or not any(n)]
        hang = [n for n in hang if len(n) < DEPTH]
        nodes.append(max(((*n, sum(m[:-1] == n for m in nodes if m)) for n in hang), key=lambda n: kept[n]))
    return nodes


def as_text(nodes: list[Node]) -> str:
    """The parent of each row behind the first."""
    return ",".join(str(nodes.index(node[:-1])) for node in nodes[1:])


def tokens_per_step(texts: list[list[Node]], nodes: list[Node]) -> float:
    """Tokens of texts over the steps that write them: each keeps the deepest node that the text has, and one more."""
    tree, tokens, steps = set(nodes), 0, 0
    for cases in texts:
        at = 0
        while at < len(cases):
            at += max(d for d in range(len(cases[at]) + 1) if cases[at][:d] in tree) + 1
            steps += 1
        tokens += len(cases)
    return round(tokens / steps, 3)


def measure(models: Path, names: list[str], new: int, samples: int) -> list[Tree]:
    """Trees of these drafters for greedy and drawn texts of each class of prompts, and of all together."""
    target, tokenizer = load(models / "target")
    drafters = {name: load_proposer(name, models) for name in names}
    # the prompts to grow on, and the others
    halves: list[dict[tuple[str, str, str], list[list[Node]]]] = [{}, {}]
    for n, prompt in enumerate(track(load_prompts(), "prompts")):
        ids = tokenizer.encode(prompt.text).ids
        for sample in range(samples + 1):
            generator = torch.Generator().manual_seed(n * 1000 + sample)
            text = write(target, ids, new, end_id(tokenizer), generator if sample else None)
            for name, drafter in drafters.items():
                key = (name, prompt.entropy, "coupled" if sample else "greedy")
                halves[n % 2].setdefault(key, []).append(ranks_of(drafter, text))
    trees = []
    for key in sorted(halves[0]):
        cases = [ranks for text in halves[0][key] for ranks in text]
        for rows in ROWS:
            nodes = grown(cases, rows, key[0] in INDEPENDENT)
            chain = [(0,) * depth for depth in range(rows)]
            of_tree, of_chain = (tokens_per_step(halves[1][key], n) for n in (nodes, chain))
            trees.append(Tree(*key, rows, as_text(nodes), of_tree, of_chain))
    return trees


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafters", nargs="*", default=["chain", *TRAINED], help="which (default: all)")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the model folders")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="new tokens per prompt")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="drawn texts per prompt")
    parser.add_argument("--out", type=Path, default=HERE / "trees.json", help="file of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trees = measure(args.models, args.drafters, args.tokens, args.samples)
    report = {"note": NOTE, "temperature": TEMPERATURE, "top_p": TOP_P, "trees": [asdict(t) for t in trees]}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for t in trees:
        print(f"{t.drafter:9} {t.entropy:11} {t.way:8} {t.rows:3} {t.tokens_per_step:6.2f} {t.of_chain:6.2f} {t.tree}")
    print(args.out)


if __name__ == "__main__":
    main()
