"""The requests that a device and the CPU answer, and whether ids that differ are numerically tied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from model.attention import KEY_TILE
from model.cache import AttentionMetadata, empty_caches
from model.config import load_config
from model.errors import UserError
from model.ops import iota
from model.parallel import ONE_RANK
from model.qwen3 import Qwen3
from model.sampling import gumbel
from model.weights import RANK
from trnspec.bundle.opening import Bundle
from trnspec.bundle.spec import BundleSpec
from trnspec.engine.engine import Engine
from trnspec.engine.ready import open_graphs, shape_of
from trnspec.engine.request import Params, Request, Result

# at this temperature noise decides, for target and draft alike: every draft is accepted
_HOT = 1e30
# steps of a device per step of the CPU: tied logits reject a draft now and then
_MAX_STEPS = 1.25
# logits of the demo target that are this close, and shares of noise, may change places
_TIE, _NOISE = {"fp32": 2e-3, "bf16": 0.3}, 2.0**-16


def requests(spec: BundleSpec) -> list[Request]:
    """Requests for a pair with two buckets or more.

    One to the context's end; prompts of one id, of a bucket's border and beyond the first bucket; each way of sampling,
    in bf16 without filters, whose borders move; then hot ones, until noise has chosen every id of the vocabulary.
    """
    first, end = spec.buckets[0], spec.max_len
    listed = [
        (20, end, Params()), (first + 22, 60, Params(0.8, 20, 0.9, seed=1)), (30, 60, Params(1.3, seed=2)),
        (25, 60, Params(1.0, top_p=0.9, seed=3)), (1, 12, Params()), (first - 1, 12, Params()),
        (first, 12, Params()), (12, 40, Params(0.8, 20, seed=4)), (9, 40, Params(1.1, min_p=0.1, seed=5)),
    ]  # fmt: skip
    every = [Request(tuple(range(40, 40 + n)), params, count) for n, count, params in listed]
    found = [request for request in every if spec.dtype == "fp32" or not request.params.filter]
    missing, prompt = set(range(spec.target_config.vocab_size)), (7, 17, 27)
    while missing:
        found.append(Request(prompt, Params(_HOT, seed=len(found)), end))
        missing -= set(_noise(found[-1], end - len(prompt), spec.target_config.vocab_size).argmax(-1).tolist())
    return found


def _noise(request: Request, count: int, vocabulary: int) -> torch.Tensor:
    """(count, V) the noise of the ids after a prompt."""
    seed_R2 = torch.tensor([request.params.seed_words], dtype=torch.int32).expand(count, -1)
    return gumbel(seed_R2, len(request.ids) + iota(count, seed_R2), vocabulary)


def answers(bundle: Bundle, platform: str, asked: Sequence[Request]) -> list[Result]:
    """The results of a bundle's graphs on a platform."""
    graphs = open_graphs(bundle, platform)
    try:
        return Engine(graphs, shape_of(bundle, platform)).run(asked)
    finally:
        graphs.close()


def compared(
    target: Path, dtype: str, asked: Sequence[Request], device: Sequence[Result], cpu: Sequence[Result]
) -> dict[str, Any]:
    """Facts of a device's results that have the CPU's ids, each up to the first that is tied with another.

    Raises:
        UserError: the first request with another id that is not tied, or more steps than the CPU takes.
    """
    count, ties, model = 0, list[float](), _model(target)
    for request, found, expected in zip(asked, device, cpu, strict=True):
        pairs = zip([*found.ids, -1], [*expected.ids, -1], strict=False)
        at, *_ = [at for at, (a, b) in enumerate(pairs) if a != b] or [len(expected.ids)]
        count += at
        if found.ids == expected.ids:
            continue
        if min(len(found.ids), len(expected.ids)) <= at:
            raise UserError(f"{request}: {len(found.ids)} ids came, {len(expected.ids)} from the CPU")
        ties.append(_margin(model, request, expected.ids[: at + 1], found.ids[at]))
        if ties[-1] > (tie := _TIE[dtype] + _NOISE * request.params.temperature):
            raise UserError(
                f"{request}: id {at} is {found.ids[at]}, and {expected.ids[at]} on the CPU, whose score is "
                f"{ties[-1]:.3g} higher; {tie:.3g} would be a tie"
            )
    steps, cpu_steps = (sum(result.steps for result in results) for results in (device, cpu))
    if steps > _MAX_STEPS * cpu_steps:
        raise UserError(f"the requests took {steps} steps, {cpu_steps} on the CPU: drafts are rejected")
    return {"ids": count, "margins of ties": ties, "steps": steps, "steps on the CPU": cpu_steps}


def _model(folder: Path) -> Qwen3:
    model, tensors = Qwen3(load_config(str(folder))), load_file(folder / "model.safetensors").items()
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors}
    model.load_state_dict(weights | {RANK: torch.zeros(1, dtype=torch.int32)})
    return model.float().eval()


@torch.no_grad()
def _margin(model: Qwen3, request: Request, ids: Sequence[int], other: int) -> float:
    """How much higher the score of the last id is than another one's in its place."""
    known, length = [*request.ids, *ids[:-1]], len(request.ids) + len(ids) - 1
    blocks = -(-length // KEY_TILE)
    caches = empty_caches(model.config, ONE_RANK, 1 + blocks, KEY_TILE, torch.float32)
    rows_1N, table_1L = (torch.arange(n, dtype=torch.int32)[None] for n in (length, blocks))
    passed = model.hidden(torch.tensor([known], dtype=torch.int32), caches, AttentionMetadata(rows_1N, 1 + table_1L))
    scores_V = model.logits(passed.x_BNE[:, -1:])[0, 0]
    if temperature := request.params.temperature:
        scores_V = scores_V + temperature * _noise(request, len(ids), len(scores_V))[-1]
    return float(scores_V[ids[-1]] - scores_V[other])
