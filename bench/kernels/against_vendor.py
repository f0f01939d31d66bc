"""`python -m bench.kernels.against_vendor SOURCE`: verify_attention beside the vendor's attention_tkg, simulated.

SOURCE is the `src` folder of a checkout of aws-neuron/nki-library, whose kernel runs as it is published, under the
policy `vendor`. Both attend the same numbers and are held to the same law; of the vendor's two key layouts the faster
counts. Ours also writes the step's keys and values into the cache, which the vendor leaves to its caller.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import nkisim
from bench.kernels.case import normal
from model.errors import UserError, run_cli
from nki_kernels import roofline
from nki_kernels.attention import law
from nki_kernels.attention.verify import verify_attention_kernel
from nki_kernels.roofline import AttentionDims
from nkisim import isa as nisa
from nkisim import language as nl
from nkisim.timeline.schedule import hbm_peak, schedule
from nkisim.timeline.trn2 import TRN2

# the shard of Qwen3-32B at tp 32: B, H, N, D
B, H, N, D = 4, 2, 8, 128
SLOTS = (1024, 4096, 8192, 16384)
# bf16 weights and values: what a sum of some thousand products loses
_TOLERANCE = 2e-2
# the vendor's tests leave this much of SBUF to the compiler
_SPARED = 16 * 1024


class Operands(NamedTuple):
    """One step's numbers: q (B, H, N, D), new and cached keys and values (B, 1, N or S, D), all bf16."""

    q: Any
    new: tuple[Any, Any]
    cache: tuple[Any, Any]

    @classmethod
    def of(cls, slots: int) -> Operands:
        """Normal numbers, a cache of so many slots whose last N are the step's."""
        new, cache = normal((2, B, 1, N, D), 2), normal((2, B, 1, slots, D), 2)
        return cls(normal((B, H, N, D), 2), (new[0], new[1]), (cache[0], cache[1]))

    def expected(self) -> Any:
        """(B, H, N, D) by the law."""
        wide = [x.astype(np.float64) for x in (self.q, *self.new, *self.cache)]
        positions = np.tile(np.arange(N) + self.cache[0].shape[2] - N, (B, 1))
        return law.verify_attention(wide[0], (wide[1], wide[2]), (wide[3], wide[4]), positions)[0]


def timed(kernel: Any, arguments: tuple[Any, ...], policy: nkisim.Policy) -> tuple[Any, Any, Any]:
    """The outputs, the schedule and the events of one run."""
    with contextlib.redirect_stdout(io.StringIO()):
        result = nkisim.run(kernel, arguments, policy=replace(policy, recording=True))
    return result.outputs, schedule(result.recording.events), result.recording.events


def ours(operands: Operands, lnc: int) -> tuple[Any, Any, Any]:
    """verify_attention: out (B, H, N, D), its schedule, its events."""
    slots = operands.cache[0].shape[2]
    positions = np.tile(np.arange(slots - N, slots, dtype=np.int32), (B, 1))
    keys, values = np.ascontiguousarray(operands.cache[0].swapaxes(2, 3)), operands.cache[1].copy()
    arguments = (operands.q, *operands.new, keys, values, positions, None)
    return timed(verify_attention_kernel[lnc], arguments, nkisim.STRICT)


def theirs(library: Any, operands: Operands, lnc: int, strided: bool) -> tuple[Any, Any, Any]:
    """attention_tkg with queries and new keys in SBUF and positions for a mask: out (B, H, N, D) and the rest."""
    slots = operands.cache[0].shape[2]
    shape = {"bs": B, "q_head": H, "s_active": N, "curr_sprior": slots, "full_sprior": slots, "d_head": D}
    config = library.AttnTKGConfig(**shape, use_pos_id=True, qk_in_sb=True, strided_mm1=strided)
    scaled = (operands.q.astype(np.float32) / np.sqrt(D)).astype(ml_dtypes.bfloat16)
    causal = np.triu(np.ones((N, N), np.uint8))[:, None, None].repeat(B, 1).repeat(H, 2)
    arguments = (
        np.ascontiguousarray(scaled.transpose(3, 0, 1, 2).reshape(D, -1)),
        (np.ascontiguousarray(operands.new[0].transpose(3, 0, 1, 2).reshape(D, -1)), operands.new[1]),
        (np.ascontiguousarray(operands.cache[0].swapaxes(2, 3)), operands.cache[1]),
        causal, np.full((B, N), slots - N, np.float32), config,
    )  # fmt: skip
    out, *rest = timed(_wrapped(library)[lnc], arguments, nkisim.VENDOR)
    return np.asarray(out).swapaxes(2, 3), *rest


def _wrapped(library: Any) -> Any:
    @nkisim.jit
    def attention(q: Any, new: Any, cache: Any, mask: Any, positions: Any, config: Any) -> Any:
        memory = library.SbufManager(0, nl.tile_size.total_available_sbuf_size - _SPARED)
        memory.open_scope()
        out = nl.ndarray((B, H, D, N), dtype=q.dtype, buffer=nl.shared_hbm)
        q_sb = memory.alloc_stack(q.shape, dtype=q.dtype, buffer=nl.sbuf)
        k_sb = memory.alloc_stack(new[0].shape, dtype=q.dtype, buffer=nl.sbuf)
        nisa.dma_copy(q_sb, q)
        nisa.dma_copy(k_sb, new[0])
        library.attention_tkg(q_sb, k_sb, new[1], cache[0], cache[1], mask, out, config, memory, None, positions)
        memory.close_scope()
        return out

    return attention


def compare(library: Any, slots: int, lnc: int) -> dict[str, Any]:
    """One row: both latencies in us, their bands, the ratio and our share of the roofline, all simulated."""
    operands = Operands.of(slots)
    expected = operands.expected()
    runs = {"ours": [ours(operands, lnc)], "vendor": [theirs(library, operands, lnc, s) for s in (False, True)]}
    row: dict[str, Any] = {"slots": slots, "lnc": lnc}
    for name, tried in runs.items():
        for out, _, _ in tried:
            error = np.abs(np.asarray(out).astype(np.float64) - expected).max()
            if not error < _TOLERANCE:
                raise UserError(
                    f"{name} is off by {error:.3g} at {slots} slots, {_TOLERANCE} is allowed; mend it first"
                )
        _, best, events = min(tried, key=lambda run: run[1].latency_ns)
        cost = roofline.verify_attention(AttentionDims(B, H, 1, N, slots, D, 2))
        row[name] = {
            "us": best.latency_ns / 1e3, "low": best.low_ns / 1e3, "high": best.high_ns / 1e3,
            "roofline_share": cost.hbm_bytes / hbm_peak(events, TRN2) / best.latency_ns,
        }  # fmt: skip
    return row | {"times_as_fast": row["vendor"]["us"] / row["ours"]["us"]}


def main(arguments: list[str]) -> None:
    """Print the table; --out keeps the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.against_vendor", description=__doc__)
    parser.add_argument("source", type=Path, help="the src folder of a checkout of aws-neuron/nki-library")
    parser.add_argument("--out", type=Path, help="file for the rows, JSON")
    options = parser.parse_args(arguments)
    if not (options.source / "nkilib_src").is_dir():
        raise UserError(f"{options.source} has no nkilib_src; name the src folder of a checkout of nki-library")
    sys.path.insert(0, str(options.source.resolve()))
    library = importlib.import_module("nkilib_src.nkilib.core.attention.attention_tkg")
    print("| S | cores | ours, us | its band | roofline | vendor's, us | its band | roofline | times as fast |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for lnc in (1, 2):
        for slots in SLOTS:
            rows.append(compare(library, slots, lnc))
            sides = " | ".join(_cells(rows[-1][name]) for name in ("ours", "vendor"))
            print(f"| {slots} | {lnc} | {sides} | {rows[-1]['times_as_fast']:.2f} |", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"source": "simulated", "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _cells(side: dict[str, float]) -> str:
    return f"{side['us']:.2f} | {side['low']:.1f} to {side['high']:.1f} | {side['roofline_share']:.0%}"


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
