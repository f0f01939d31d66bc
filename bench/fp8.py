"""What FP8 weights cost in quality: the demo pair in fp32, in bf16, and in bf16 with FP8 weights, side by side.

On held-out text: the error of the logits against fp32 (root mean square, relative), how often the
most likely id is fp32's, and perplexity. On the demo's prompts, greedy: the tokens of a step, and how many tokens of a
response come before the first that is not fp32's.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.demo import TARGET, bundle, prompts
from bench.gate import differences
from bench.table import markdown
from demo.corpus import TEXT, TRAINED_SHARE
from model.cache import KEY_TILE, AttentionMetadata, Cache, cache_shape
from model.config import load_config
from model.context import Context
from model.dtypes import BY_FLAG, BY_NAME
from model.errors import command_line, run_cli
from model.qwen3 import Qwen3
from model.weights import RANK, decoder_weights
from nki_kernels.limits import SPARE_PAGES
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.llm import LLM

K, WINDOW, TOKENS = 4, KEY_TILE, 96
BUILDS = {"fp32": ("fp32", "dtype"), "bf16": ("bf16", "dtype"), "FP8": ("bf16", "fp8")}


def held_out(tokenizer: Tokenizer) -> Tensor:
    """Ids (B, N) of the end of each text."""
    texts = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in sorted(TEXT.glob("*.txt.gz"))]
    ids = [tokenizer.encode("\n".join(lines[round(len(lines) * TRAINED_SHARE) :])).ids for lines in texts]
    return torch.tensor([text[i : i + WINDOW] for text in ids for i in range(0, len(text) - WINDOW, WINDOW)][::8])


@torch.no_grad()
def logits(ids_BN: Tensor, dtype: str, weights: str) -> Tensor:
    """The target's logits (B, N, V) of each id's row."""
    config, ctx, kind = load_config(str(TARGET)), Context(fp8=weights == "fp8"), BY_FLAG[dtype].torch
    model, checkpoint = ctx.fuse(Qwen3(config, ctx)), Checkpoint(TARGET, config, fp8=ctx.fp8)
    table = decoder_weights(config, ctx.packing(config))
    values = {w.name: next(checkpoint.shards(w, 1, BY_NAME[w.dtype].torch if w.dtype else kind)) for w in table}
    model.load_state_dict(values | {RANK: torch.zeros(1, dtype=torch.int32)}, assign=True)
    batch, shape = len(ids_BN), cache_shape(config, 1, 1 + len(ids_BN) + SPARE_PAGES)
    caches = [Cache(*torch.zeros(2, *shape, dtype=kind)) for _ in range(config.num_hidden_layers)]
    positions_BN = torch.arange(WINDOW, dtype=torch.int32).expand(batch, -1)
    meta = AttentionMetadata(positions_BN, 1 + torch.arange(batch, dtype=torch.int32)[:, None])
    return model.logits(model.hidden(ids_BN.int(), caches, meta).x_BNE)


def generated(folder: Path, dtype: str, weights: str) -> tuple[list[list[int]], float]:
    """The ids of each response, and the tokens of a step."""
    built = bundle(folder / f"{dtype}-{weights}", "chain", K, dtype=dtype, weights=weights, batch=4)
    with LLM(built) as llm:
        outputs = llm.generate([p.text for p in prompts(3)], max_new_tokens=TOKENS)
    steps, accepted = sum(output.steps for output in outputs), sum(sum(output.accepted) for output in outputs)
    return [output.ids for output in outputs], 1 + accepted / steps


def main(arguments: list[str]) -> None:
    """Print the table."""
    about = "Compare fp32, bf16 and FP8 weights of the demo pair: logits, perplexity, tokens. Takes a minute."
    command_line("bench.fp8", about, "").parse_args(arguments)
    rows, right = list[list[str]](), None
    with tempfile.TemporaryDirectory() as folder:
        for name, build in BUILDS.items():
            ids, per_step = generated(Path(folder), *build)
            ids_BN = held_out(Tokenizer.from_file(str(TARGET / "tokenizer.json")))
            logits_BNV = logits(ids_BN, *build)
            right = right or (logits_BNV, ids)
            error = float((logits_BNV - right[0]).square().mean().sqrt() / right[0].square().mean().sqrt())
            same = float((logits_BNV.argmax(-1) == right[0].argmax(-1)).float().mean())
            loss = torch.nn.functional.cross_entropy(logits_BNV[:, :-1].flatten(0, 1), ids_BN[:, 1:].flatten())
            first = {d.question: d.at for d in differences(right[1], ids)}
            equal = sum(first.get(n, len(one)) for n, one in enumerate(right[1])) / sum(map(len, right[1]))
            rows.append([name, f"{error:.2%}", f"{same:.1%}", f"{loss.exp():.3f}", f"{per_step:.2f}", f"{equal:.0%}"])
    heads = "weights, error of logits, most likely id is fp32's, perplexity, tokens a step, tokens as fp32's"
    print(markdown(heads.split(", "), rows))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
