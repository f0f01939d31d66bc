"""How near each emitted id was to a different one, by transformers' Qwen3 and the sampler's law in NumPy."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.goldens.cases import Case

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def margins(
    target: Path, dtype: str, cases: Sequence[Case], ids: Sequence[Sequence[int]], forced: Sequence[Any]
) -> np.ndarray:
    """For each emitted id its score less the best other one's, in units of logits; at a filter's border the distance
    to the border.

    `forced` are the tree's outputs for each prompt with its new ids, which have the log-probabilities of the best ids;
    those of all others are transformers' in fp32 with weights of the dtype. Prints how far both are apart. A negative
    margin says that these numbers emit a different id.
    """
    model, distance = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), 0.0
    for parameter in model.parameters() if dtype == "bf16" else ():
        parameter.data = parameter.data.bfloat16().float()
    margins_of_ids = []
    for case, new, output in zip(cases, ids, forced, strict=True):
        first = len(case.prompt) - 1
        with torch.no_grad():
            rows = model(torch.tensor([[*case.prompt, *new[:-1]]])).logits[0, first:].double().numpy()
        for n, (x, token, score) in enumerate(zip(rows, new, output.prompt_scores[first:], strict=True)):
            best = dict(score.best) | {token: score.logprob}
            logits = np.array(list(best.values())) + np.log(np.exp(x - x.max()).sum()) + x.max()
            distance = max(distance, float(np.abs(logits - x[list(best)]).max()))
            x[list(best)] = logits
            margins_of_ids.append(_margin(case, _adjusted(case, x, new[:n]), n, token))
    print(f"  best logits: transformers' are up to {distance:.1e} away", file=sys.stderr)
    return np.array(margins_of_ids)


def _adjusted(case: Case, x: np.ndarray, new: Sequence[int]) -> np.ndarray:
    params = case.params
    for token, bias in params.get("logit_bias", {}).items():
        x[token] += bias
    seen = list({*case.prompt, *new})
    repetition = params.get("repetition_penalty", 1.0)
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    for token, count in Counter(new).items():
        x[token] -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0)
    if "allowed" in case.options:
        words = case.options["allowed"](new)
        x = np.where(np.unpackbits(words.view(np.uint8), bitorder="little") > 0, x, -np.inf)
    return x


def _margin(case: Case, x: np.ndarray, n: int, token: int) -> float:
    params, other = case.params, np.arange(len(x)) != token
    if not (temperature := params.get("temperature", 0.0)):
        return float(x[token] - x[other].max())
    x = (x - x.max()) / temperature
    inside = _inside(x, params)
    score = x + gumbel(params["seed"], len(case.prompt) + n, len(x))
    with np.errstate(invalid="ignore"):
        gap = np.maximum(score[token] - score, -inside)
    return float(temperature * min(gap[other].min(), inside[token]))


def _inside(x: np.ndarray, params: dict[str, float]) -> np.ndarray:
    """(V,) how far each id is inside of the filters; negative outside."""
    inside = np.full(len(x), np.inf)
    if min_p := params.get("min_p", 0.0):
        inside = x - np.log(min_p)
    if top_k := int(params.get("top_k", 0)):
        order = np.sort(x[inside >= 0])[::-1]
        last, following = (order[at] if at < len(order) else -np.inf for at in (top_k - 1, top_k))
        inside = np.minimum(inside, np.where(x >= last, x - following, x - last))
    if (top_p := params.get("top_p", 1.0)) < 1:
        mass = np.where(inside >= 0, np.exp(x), 0.0)
        above = np.array([mass[x > one].sum() for one in x])
        with np.errstate(divide="ignore"):
            inside = np.minimum(inside, np.log(top_p * mass.sum()) - np.log(above))
    return inside


def gumbel(seed: int, position: int, vocabulary: int) -> np.ndarray:
    """(V,) Gumbel noise of a seed and the drawn token's position, from Threefry-2x32 of 13 rounds."""
    keys = [np.uint32(seed % (1 << 32)), np.uint32(seed >> 32)]
    keys.append(keys[0] ^ keys[1] ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):
        x = np.arange((vocabulary + 1) // 2, dtype=np.uint32) + keys[0]
        y = np.full_like(x, position) + keys[1]
        for r in range(13):
            rotation = np.uint32(_ROTATIONS[r % 8])
            x = x + y
            y = (y << rotation | y >> (np.uint32(32) - rotation)) ^ x
            if r % 4 == 3:
                s = r // 4 + 1
                x, y = x + keys[s % 3], y + (keys[(s + 1) % 3] + np.uint32(s))
    words = np.stack((x, y), 1).ravel()[:vocabulary]
    return -np.log(-np.log(((words >> np.uint32(9)) + 0.5) / 2**23))
