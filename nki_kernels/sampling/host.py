"""Calling the sampling kernels from the host: checks first, then one launch each.

Row tensors are (R, 1) or (R, 2), R <= 128. Every function raises ValueError, one sentence, before anything runs.
`run` makes a launched kernel callable: nki.simulate here, the identity on a Trainium machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import nki
import numpy as np

from nki_kernels.limits import SUM_ROWS
from nki_kernels.sampling.accept_drafts import accept_drafts_kernel
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import DOMAIN_SHIFT, gumbel_noise_kernel
from nki_kernels.sampling.weights_above import weights_above_kernel
from nki_kernels.tiles import P

Run = Callable[[Any], Any]

# ids and sums of ids stay exact in fp32
MAX_VOCABULARY = 1 << 22
MAX_POSITION = (1 << DOMAIN_SHIFT) - 1
FP32, INT32 = ("float32",), ("int32",)
LOGITS = ("float32", "bfloat16")


class Shard(NamedTuple):
    """Logits (R, V) of ids start to start + V, with `start` (1, 1) int32."""

    logits: Any
    start: Any


class Proposal(NamedTuple):
    """The proposal of each sequence: drafts (B, N - 1), the position of its row 0 and its limit (B, 1), int32."""

    drafts: Any
    positions: Any
    limits: Any


def gumbel_noise(
    seeds: Any, positions: Any, start: Any, columns: int, *, domain: int = 0, lnc: int = 1, run: Run = nki.simulate
) -> Any:
    """Noise (R, columns) fp32 of seeds (R, 2) and positions (R, 1) for the ids from start (1, 1) on."""
    rows = _check_generator(seeds, positions, domain)
    _check("start", start, (1, 1), INT32)
    _check_columns(columns, rows)
    return run(gumbel_noise_kernel[_cores(lnc)])(seeds, positions, start, columns, domain)


def coupled_sample(
    shard: Shard, noise: Any, temperature: Any, floor: Any, *, best: Any = None, lnc: int = 1, run: Run = nki.simulate
) -> Any:
    """values (cores, R) fp32 and ids (cores, R) int32: the best perturbed logit of the shard.

    `best` (R, 1) are the rows' best logits over all shards; None if this shard is the whole vocabulary.
    """
    rows, columns = _check_logits("logits", shard.logits)
    _check("noise", noise, (rows, columns), FP32)
    _check("temperature", temperature, (rows, 1), FP32)
    _check("floor", floor, (rows, 1), FP32)
    _check("start", shard.start, (1, 1), INT32)
    if not (np.asarray(temperature) >= 0).all():
        raise ValueError("a temperature is negative or NaN, 0 or more is needed: pass 0 for greedy rows")
    if best is None:
        best = np.asarray(shard.logits).astype(np.float32).max(1, keepdims=True)
    if not (np.asarray(floor) <= best).all():
        raise ValueError("a floor removes every id of a row, its best logit must stay: check top_k, top_p and min_p")
    return run(coupled_sample_kernel[_cores(lnc)])(shard.logits, noise, temperature, floor, shard.start)


def weights_above(
    logits: Any, weigh: tuple[Any, Any], floor: Any, thresholds: Any, *, lnc: int = 1, run: Run = nki.simulate
) -> Any:
    """(cores, J, R) fp32: the weight exp(l * scale + bias) above thresholds (R, J), of the logits from the floor on."""
    rows, _ = _check_logits("logits", logits, SUM_ROWS)
    for name, column in (("scale", weigh[0]), ("bias", weigh[1]), ("floor", floor)):
        _check(name, column, (rows, 1), FP32)
    count = thresholds.shape[-1] if len(thresholds.shape) else 0
    if not 1 <= count <= P:
        raise ValueError(f"{count} thresholds for each row came, 1 to {P} are served: search in more passes")
    _check("thresholds", thresholds, (rows, count), FP32)
    return run(weights_above_kernel[_cores(lnc)])(logits, *weigh, floor, thresholds)


def accept_drafts(values: Any, ids: Any, proposal: Proposal, *, lnc: int = 1, run: Run = nki.simulate) -> Any:
    """accepted (B, N), counts, next ids, next positions (B, 1) of draws (M, B, N) of M shards; no drafts for N = 1."""
    _check_draws(values, ids, proposal)
    return run(accept_drafts_kernel[_cores(lnc)])(values, ids, *proposal)


def _check(name: str, value: Any, shape: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    kind = str(value.dtype).removeprefix("torch.")
    if tuple(value.shape) != shape or kind not in kinds:
        raise ValueError(
            f"{name} is {kind} {tuple(value.shape)}, {' or '.join(kinds)} {shape} is needed: convert or reshape it"
        )


def _check_logits(name: str, logits: Any, most: int = P) -> tuple[int, int]:
    if len(logits.shape) != 2:
        raise ValueError(f"{name} are {tuple(logits.shape)}, (R, V) is needed: flatten sequences and rows")
    rows, columns = logits.shape
    _check(name, logits, (rows, columns), LOGITS)
    _check_columns(columns, rows, most)
    if np.isnan(np.asarray(logits).astype(np.float32)).any():
        raise ValueError(f"{name} hold NaN, numbers are needed: look for an overflow in the layers before")
    return rows, columns


def _check_columns(columns: int, rows: int, most: int = P) -> None:
    if not 1 <= rows <= most:
        raise ValueError(f"there are {rows} rows, 1 to {most} fit a launch: split the batch")
    if not 1 <= columns < MAX_VOCABULARY:
        raise ValueError(f"the shard has {columns} ids, 1 to {MAX_VOCABULARY - 1} are served: shard the vocabulary")


def _check_generator(seeds: Any, positions: Any, domain: int) -> int:
    rows = seeds.shape[0] if len(seeds.shape) else 0
    if not 1 <= rows <= P:
        raise ValueError(f"there are {rows} rows, 1 to {P} fit a launch: split the batch")
    _check("seeds", seeds, (rows, 2), INT32)
    _check("positions", positions, (rows, 1), INT32)
    numbers = np.asarray(positions)
    if numbers.min() < 0 or numbers.max() > MAX_POSITION:
        raise ValueError(
            f"positions run from {numbers.min()} to {numbers.max()}, 0 to {MAX_POSITION} have noise: "
            "end the sequence before"
        )
    if not 0 <= domain < 1 << 6:
        raise ValueError(f"the domain is {domain}, 0 to 63 exist: pass 0, the model's")
    return int(rows)


def _check_draws(values: Any, ids: Any, proposal: Proposal) -> tuple[int, int, int]:
    if len(values.shape) != 3:
        raise ValueError(f"values are {tuple(values.shape)}, (M, B, N) of M shards is needed: add the missing axes")
    shards, batch, candidates = values.shape
    if not 1 <= shards <= P:
        raise ValueError(f"there are {shards} shards, 1 to {P} can be merged: merge in two steps")
    _check("values", values, (shards, batch, candidates), FP32)
    _check("ids", ids, (shards, batch, candidates), INT32)
    _check("positions", proposal.positions, (batch, 1), INT32)
    if proposal.drafts is None:
        if candidates != 1:
            raise ValueError(
                f"drafts are missing for N = {candidates} rows, None goes with N = 1: pass (B, {candidates - 1}) drafts"
            )
        return shards, batch, candidates
    _check("drafts", proposal.drafts, (batch, candidates - 1), INT32)
    _check("limits", proposal.limits, (batch, 1), INT32)
    if np.asarray(proposal.limits).min() < 0:
        raise ValueError("a limit is negative, 0 or more drafts may be accepted: pass 0 to accept none")
    return shards, batch, candidates


def _cores(lnc: int) -> int:
    if lnc not in (1, 2):
        raise ValueError(f"lnc is {lnc}, 1 or 2 cores share a launch on trn2: pass one of them")
    return lnc
