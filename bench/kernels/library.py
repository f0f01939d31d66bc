"""The vendor's kernels beside ours, on the same simulator at the same shapes, all without a launch.

The vendor's are `mlp_tkg` and `attention_tkg` of a checkout of nki-library, run unmodified. `attention_tkg` gets its
queries and keys in SBUF and appends nothing, where ours begins and ends in HBM and appends to the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bench.kernels.case import Case
from bench.kernels.cases import CASES
from bench.kernels.layer import ON_TWO_CORES, TARGET, Shard, mlp_case
from bench.kernels.library_prompts import prompts_beside
from bench.table import markdown
from model.errors import UserError
from nki_kernels.roofline import AttentionDims
from nkisim.accuracy.library import Library
from nkisim.accuracy.library_calls import LibraryRow
from nkisim.timeline.schedule import schedule

BF16 = "bfloat16"
DIMS = tuple(AttentionDims(4, 2, 1, 8, slots, 128, 2) for slots in (1024, 8192))


def mlp_row(shard: Shard, lnc: int) -> LibraryRow:
    """The vendor's call for the MLP half of a shard's layer."""
    hidden, inner = shard.config.hidden_size, shard.config.intermediate_size // shard.tp
    shapes = {
        "hidden_tensor": (shard.batch, shard.candidates, hidden),
        "gate_proj_weights_tensor": (hidden, inner),
        "up_proj_weights_tensor": (hidden, inner),
        "down_proj_weights_tensor": (inner, hidden),
        "normalization_weights_tensor": (1, hidden),
    }
    plain = {
        "activation_fn": "@ActFnType.SiLU", "normalization_type": "@NormType.RMS_NORM",
        "quantization_type": "@QuantizationType.NONE", "skip_gate_proj": False,
    }  # fmt: skip
    return _row("mlp_tkg", shapes, plain, lnc)


def attention_row(d: AttentionDims, lnc: int) -> LibraryRow:
    """The vendor's call for attention of one kv head."""
    shapes = {
        "q": (d.dim, d.batch * d.heads * d.candidates),
        "k_active": (d.dim, d.batch * d.candidates),
        "v_active": (d.batch, 1, d.candidates, d.dim),
        "k_prior": (d.batch, 1, d.dim, d.slots),
        "v_prior": (d.batch, 1, d.slots, d.dim),
    }
    row = _row("attention_tkg", shapes, {}, lnc)
    mask = (d.slots, d.batch, d.heads, d.candidates), "uint8"
    return LibraryRow(row.id, row.kernel, {**row.tensors, "mask": mask}, {}, lnc, "", 0.0, "")


def _row(kernel: str, shapes: dict[str, tuple[int, ...]], plain: dict[str, Any], lnc: int) -> LibraryRow:
    tensors = {name: (shape, BF16) for name, shape in shapes.items()}
    return LibraryRow(kernel, kernel, tensors, plain, lnc, "", 0.0, "")


def pairs() -> Iterator[tuple[Case, LibraryRow]]:
    """Our cases and the vendor's calls at the same shapes, on one core and on two."""
    for lnc in (1, 2):
        for shard in dict.fromkeys((TARGET, *ON_TWO_CORES)):
            yield mlp_case(shard, lnc), mlp_row(shard, lnc)
        for dims in DIMS:
            case = next(c for c in CASES if c.dims == dims and c.lnc == lnc and "ancestors" not in c.name)
            yield case, attention_row(dims, lnc)


def beside(checkout: Path) -> str:
    """The table of both and that of prompt attention, markdown.

    Raises:
        UserError: the folder holds no nki-library.
    """
    try:
        library = Library(checkout)
    except ValueError as error:
        raise UserError(str(error)) from None
    lines = []
    for case, row in pairs():
        ours = schedule(case.recorded().events, band=False)
        # the vendor's kernels print what they allocate
        with redirect_stdout(sys.stderr):
            recorded = library.record(row)
        theirs, ratio = recorded.refused, ""
        if recorded.events is not None:
            latency = schedule(recorded.events, band=False).latency_ns
            theirs, ratio = f"{latency / 1e3:.1f}", f"{latency / ours.latency_ns:.2f}"
        lines.append([case.full_name, f"{ours.latency_ns / 1e3:.1f}", row.kernel, theirs, ratio])
    decode = markdown(["case", "ours, us (simulated)", "vendor's", "vendor's, us (simulated)", "ratio"], lines)
    return f"{decode}\n\n{prompts_beside(library)}"
