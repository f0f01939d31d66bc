"""Probes of what is reported of Trainium: lost sums in PSUM, collectives that do not load again. And kernels' times.

Source of the reports: foxl-ai/kiln, docs/neuron-notes.md and tools/probe_psum_interleave.py (trn1, SDK 2.32).
"""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from torch import Tensor

from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps, launch_in_graph, proto_of
from compile.neuron import sdk, specialise
from compile.neuron.flags import flags_of
from compile.recipes import ROOT
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec, TensorSpec
from model.nki.launches import CUSTOM_CALL_TARGET, LNC, Launch, like
from model.nki.table import KERNELS
from nki_kernels.probes import psum_chains_kernel, sum_over_ranks_kernel, wrong_chains
from trnspec.bundle.manifest import STEP
from trnspec.runtime.nrt import environments
from trnspec.runtime.ranks import Ranks

# cases of bench.kernels without caches: filters, sampling, decode weights, a prompt's product
TIMED = (
    "weights_above_kernel/R32-V4748-fp32-lnc2", "coupled_sample_kernel/R32-V4748-fp32-lnc2",
    "decode_mlp_kernel/32B-tp32-B4-N8-lnc2", "prompt_qkv_kernel/32B-tp32-C2048-lnc2",
)  # fmt: skip
_COLLECTIVE, _OPS = "sum_over_ranks", TracedOps(2, "all_gather")


def psum_chains(out: Path) -> dict[str, Any]:
    if wrong := wrong_chains(psum_chains_kernel[LNC]):
        raise UserError("; ".join(wrong))
    return {"wrong chains": 0}


def _sum_by_nki(x: Tensor) -> Tensor:
    return launch_in_graph(Launch(_COLLECTIVE, ["#0", [[0, 1]]], (like(x),)), (x,))[0]


# the graph of one of two ranks
PROBES = {"all-gather": lambda x: _OPS.all_gather(x, x), "all-reduce": _OPS.all_reduce, "NKI all-reduce": _sum_by_nki}


def _data(name: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The inputs of two ranks, and what both get."""
    first = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    inputs = [first, first + 10000]
    return inputs, np.concatenate(inputs, -1) if name == "all-gather" else np.add(*inputs)


def compile_probe(name: str, out: Path) -> dict[str, Any]:
    # specialisation finds it there, in this process
    KERNELS.setdefault(_COLLECTIVE, sum_over_ranks_kernel)
    inputs, expected = _data(name)
    x, y = TensorSpec("x", inputs[0].shape, "float32"), TensorSpec("y", expected.shape, "float32")
    lowered = jax.jit(lambda a: (interop.call_torch(PROBES[name], a),)).lower(inputs[0])
    proto = proto_of(lowered, GraphSpec(GraphKey(Stage.STEP), (), (x,), (), (y,)))
    if CUSTOM_CALL_TARGET.encode() in proto:
        proto = specialise.specialised(proto, out, {})
    file, neff, log = (out / f"{name}.{suffix}" for suffix in ("hlo.pb", "neff", "txt"))
    file.write_bytes(proto)
    sdk.compile_hlo(file, neff, log, flags_of({}, sdk.versions(sdk.COMPILER)[sdk.COMPILER])[STEP], out)
    return {"NEFF bytes": neff.stat().st_size}


def run_probe(name: str, out: Path) -> dict[str, Any]:
    """Load a probe's NEFF in two new processes, a rank each, and run it there."""
    inputs, expected = _data(name)
    with closing(Ranks("compile.device_check.rank", [], environments(len(inputs), LNC))) as ranks:
        ranks.broadcast("run", str(out / f"{name}.neff"), inputs, expected)
    return {"ranks": len(inputs), "right numbers": expected.size}


def bench(work: str, case: str, out: Path) -> dict[str, Any]:
    """What `bench.kernels.device` says after some work on a case, or its error."""
    command = [sys.executable, "-m", "bench.kernels.device", work, case, str(out / case.replace("/", "-"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
