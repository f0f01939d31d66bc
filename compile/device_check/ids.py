"""The requests that a device and the CPU answer, and whether ids that differ are numerically tied."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from model.cache import KEY_TILE
from model.errors import UserError
from model.ops import EAGER, iota
from model.sampling import gumbel_noise
from trnspec.bundle.spec import BundleSpec
from trnspec.engine.request import Params, Request, Result

# at this temperature noise decides, for target and draft alike: every draft is accepted
_HOT = 1e30
# steps of a device per step of the CPU: tied logits reject a draft now and then
_MAX_STEPS = 1.25
# logits of the demo target, and shares of noise, that are so close may change places
_TIE, _NOISE = {"fp32": 2e-3, "bf16": 0.3}, 2.0**-16


def requests(spec: BundleSpec) -> list[Request]:
    """Requests for a pair whose sequences have two blocks or more.

    One to the context's end; prompts of one id, of a block's border and beyond the first block; each way of sampling,
    in bf16 without filters, whose borders move; then hot ones, until noise has chosen every id of the vocabulary.
    """
    first, end, vocabulary = KEY_TILE, spec.max_len, spec.target_config.vocab_size
    listed = [
        (20, end, Params()), (first + 22, 60, Params(0.8, 20, 0.9, seed=1)), (30, 60, Params(1.3, seed=2)),
        (25, 60, Params(1.0, top_p=0.9, seed=3)), (1, 12, Params()), (first - 1, 12, Params()),
        (first, 12, Params()), (12, 40, Params(0.8, 20, seed=4)), (9, 40, Params(1.1, min_p=0.1, seed=5)),
    ]  # fmt: skip
    prompt, missing = tuple(i % vocabulary for i in range(40, 40 + end)), set(range(vocabulary))
    every = [Request(prompt[:length], params, count) for length, count, params in listed]
    found = [request for request in every if spec.dtype == "fp32" or not request.params.filters]
    while missing:
        found.append(Request(prompt[:3], Params(_HOT, seed=len(found)), end))
        missing -= set(_noise(found[-1], end - 3, vocabulary).argmax(-1).tolist())
    return found


def _noise(request: Request, count: int, vocabulary: int) -> Tensor:
    """(count, V) the noise of the ids after a prompt."""
    seed_R2 = torch.tensor([request.params.seed_words], dtype=torch.int32).expand(count, -1)
    return gumbel_noise(EAGER, seed_R2, len(request.ids) + iota(count, seed_R2), iota(vocabulary, seed_R2))


def compared(
    spec: BundleSpec, sent: Sequence[Request], device: Sequence[Result], cpu: Sequence[Result],
    logprob: Callable[[Sequence[int]], float],
) -> dict[str, Any]:  # fmt: skip
    """Facts of a device's results that have the CPU's ids, each up to the first that is tied with another.

    `logprob` is the CPU's, of the last id after the others. Raises UserError for another id that is not tied, or more
    steps than the CPU takes.
    """
    count, ties = 0, list[float]()
    for request, found, expected in zip(sent, device, cpu, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(found.ids, expected.ids, strict=False)) if a != b), None)
        count += len(found.ids) if at is None else at
        if at is not None:
            known, temperature = [*request.ids, *found.ids[:at]], request.params.temperature
            noise = _noise(request, at + 1, spec.target_config.vocab_size)[at]
            pair = expected.ids[at], found.ids[at]
            best, other = (logprob([*known, i]) + temperature * float(noise[i]) for i in pair)
            ties.append(best - other)
            # below 0 where a filter excludes the device's id
            if abs(best - other) > (tie := _TIE[spec.dtype] + _NOISE * temperature):
                raise UserError(
                    f"a prompt of {len(request.ids)} ids at temperature {temperature:g}: id {at} is {pair[1]}, and "
                    f"{pair[0]} on the CPU; their scores differ by {best - other:.3g}, and {tie:.3g} would be a tie"
                )
        elif len(found.ids) != len(expected.ids):
            raise UserError(f"{len(found.ids)} ids came, {len(expected.ids)} from the CPU: {request.params}")
    steps, cpu_steps = (sum(result.steps for result in results) for results in (device, cpu))
    if steps > _MAX_STEPS * cpu_steps:
        raise UserError(f"the requests took {steps} steps, {cpu_steps} on the CPU: drafts are rejected")
    return {"ids": count, "margins of ties": ties, "steps": steps, "steps on the CPU": cpu_steps}
