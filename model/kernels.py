"""The one seam to the kernels: each operation that a Trainium kernel serves, by one name.

`Kernels` is the reference in torch. `NkiKernels` has the same signatures and composes launches of the NKI kernels;
who serves a launch is its one field: nkisim at once (`simulated.serve`), a custom call of a graph
(`compile/custom_call.py`), or the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model import attention, sampling
from model.cache import Cache, Layout, Rows
from model.filter_floor import NO_FLOOR, filter_floor
from model.launches import Argument, Launch, Result
from model.ops import Ops
from model.sampling import Sampling

# rows of noise and draws, and of sums, that a launch takes; new rows of attention
_ROWS, _SUM_ROWS, _CANDIDATES = 128, 32, 32
_PARTITIONS = 128


class Kernels:
    """The reference backing: torch alone, the definition that the others must equal."""

    layout = Layout()

    def length(self, cache: Cache) -> int:
        """Positions that a cache can hold."""
        return cache.v.shape[2] - self.layout.margin

    def prepare(self, ops: Ops, drawn: Sampling, positions_BN: Tensor, vocabulary: int) -> Sampling:
        """The parameters with what the draws at these positions of a step can share."""
        return drawn

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, rows: Rows
    ) -> tuple[Tensor, Cache]:
        """See `model.attention.verify_attention`."""
        return attention.verify_attention(ops, q_BHND, new, cache, rows)

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, drawn: Sampling, positions_R: Tensor) -> Tensor:
        """See `model.sampling.coupled_sample`."""
        return sampling.coupled_sample(ops, logits_RV, drawn, positions_R)

    def accept(self, ops: Ops, drafts_BK: Tensor, targets_BN: Tensor, limit_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `model.sampling.accept`."""
        return sampling.accept(drafts_BK, targets_BN, limit_B)


REFERENCE = Kernels()


class NkiKernels(Kernels):
    """The NKI kernels, launched by `launch`."""

    layout = Layout(transposed_keys=True, margin=_CANDIDATES)

    def __init__(self, launch: Callable[[Launch, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
        self.launch = launch

    def _run(
        self, kernel: str, arguments: tuple[Argument, ...], *results: Result, changed: tuple[int, ...] = ()
    ) -> tuple[Tensor, ...]:
        tensors = tuple(a for a in arguments if isinstance(a, Tensor))
        places = {id(t): i for i, t in enumerate(tensors)}
        plain = tuple(f"#{places[id(a)]}" if isinstance(a, Tensor) else a for a in arguments)
        return self.launch(Launch(kernel, plain, results, changed), tensors)

    def prepare(self, ops: Ops, drawn: Sampling, positions_BN: Tensor, vocabulary: int) -> Sampling:
        """The noise of all positions of a step, which draft and target share."""
        noisy = drawn.temperature_R > 0
        positions_R, seeds = positions_BN.flatten(), drawn.seed_R2.repeat_interleave(positions_BN.shape[1], 0)
        noise = ops.cond(
            noisy.any(),
            lambda: self._noise(seeds, positions_R, vocabulary),
            lambda: torch.zeros(positions_R.shape[0], vocabulary, device=positions_R.device),
        )
        return drawn._replace(noise_BNV=noise.unflatten(0, positions_BN.shape))

    def _noise(self, seeds_R2: Tensor, positions_R: Tensor, vocabulary: int) -> Tensor:
        parts: list[Tensor] = []
        for seeds, positions in zip(seeds_R2.split(_ROWS), positions_R[:, None].split(_ROWS), strict=True):
            start = torch.zeros(1, 1, dtype=torch.int32, device=positions.device)
            result = Result((positions.shape[0], vocabulary), "float32")
            parts += self._run("gumbel_noise", (seeds, positions, start, vocabulary, sampling.GUMBEL_DOMAIN), result)
        return torch.cat(parts)

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, drawn: Sampling, positions_R: Tensor) -> Tensor:
        if drawn.noise_BNV is None:
            drawn = self.prepare(ops, drawn, positions_R[:, None], logits_RV.shape[1])
        assert drawn.noise_BNV is not None
        filtering = (drawn.top_k_R > 0) | (drawn.top_p_R < 1) | (drawn.min_p_R > 0)
        filtering &= drawn.temperature_R > 0
        lowest = torch.full_like(drawn.temperature_R, NO_FLOOR)
        floor = ops.cond(
            filtering.any(), lambda: filter_floor(ops, logits_RV, drawn, self._weights_above), lambda: lowest
        )
        floor = torch.where(filtering, floor, lowest)
        noise_RV, ids = drawn.noise_BNV.flatten(0, 1), []
        for first in range(0, logits_RV.shape[0], _ROWS):
            part = slice(first, first + _ROWS)
            start = torch.zeros(1, 1, dtype=torch.int32, device=logits_RV.device)
            arguments = (logits_RV[part], noise_RV[part], drawn.temperature_R[part, None], floor[part, None], start)
            shape = (1, arguments[0].shape[0])
            ids.append(self._run("coupled_sample", arguments, Result(shape, "float32"), Result(shape, "int32"))[1][0])
        return torch.cat(ids)

    def _weights_above(
        self, logits_RV: Tensor, scale_R: Tensor, bias_R: Tensor, floor_R: Tensor, thresholds_RJ: Tensor
    ) -> Tensor:
        parts = []
        for first in range(0, logits_RV.shape[0], _SUM_ROWS):
            part = slice(first, first + _SUM_ROWS)
            columns = (t[part, None] for t in (scale_R, bias_R, floor_R))
            result = Result((1, thresholds_RJ.shape[1], logits_RV[part].shape[0]), "float32")
            parts.append(self._run("weights_above", (logits_RV[part], *columns, thresholds_RJ[part]), result)[0][0].T)
        return torch.cat(parts)

    def accept(self, ops: Ops, drafts_BK: Tensor, targets_BN: Tensor, limit_B: Tensor) -> tuple[Tensor, Tensor]:
        batch, count = targets_BN.shape
        column, values = torch.zeros_like(limit_B)[:, None], torch.zeros(1, batch, count, device=limit_B.device)
        steps = (drafts_BK, column, limit_B[:, None]) if count > 1 else (None, column, None)
        results = (Result((batch, count), "int32"), *(Result((batch, 1), "int32"),) * 3)
        accepted, counts, _, _ = self._run("accept_drafts", (values, targets_BN[None], *steps), *results)
        return accepted, counts

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, rows: Rows
    ) -> tuple[Tensor, Cache]:
        if rows.slots_B is None:
            return self._attend(q_BHND, new, cache, rows.positions_BN)
        # a prompt goes into its slot in pieces; how it is split has no say in a row's bits
        taken = Cache(*(c.index_select(0, rows.slots_B) for c in cache))
        heads, count = q_BHND.shape[1:3]
        step = min(_CANDIDATES, _PARTITIONS // (heads // cache.v.shape[1]))
        parts = []
        for first in range(0, count, step):
            part = slice(first, first + step)
            pieces = (new[0][:, :, part], new[1][:, :, part])
            out, taken = self._attend(q_BHND[:, :, part], pieces, taken, rows.positions_BN[:, part])
            parts.append(out)
        index = torch.arange(cache.v.shape[0], dtype=torch.int32, device=q_BHND.device)
        here = (index == rows.slots_B)[:, None, None, None]
        return torch.cat(parts, 2), Cache(*(torch.where(here, t, c) for t, c in zip(taken, cache, strict=True)))

    def _attend(
        self, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, positions_BN: Tensor
    ) -> tuple[Tensor, Cache]:
        result = Result(tuple(q_BHND.shape), str(q_BHND.dtype).removeprefix("torch."))
        out, k, v = self._run("verify_attention", (q_BHND, *new, *cache, positions_BN), result, changed=(3, 4))
        return out, Cache(k, v)


BACKINGS: dict[str, type[Kernels]] = {"reference": Kernels, "nki": NkiKernels}
