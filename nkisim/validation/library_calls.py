"""The call of nki-library of a measured row: the function's name and its arguments by name.

Shapes, dtypes and argument names are those of the record; what the record leaves out is stated here.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkisim import isa, language, launch
from nkisim.dtypes import INFO

# the value of an argument and the arrays and plain values that a kernel takes
Arguments = dict[str, Any]
Find = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class LibraryRow:
    """One call of a vendor's kernel: its tensors as (shape, dtype), its plain arguments, its measured time or 0."""

    id: str
    kernel: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    arguments: Mapping[str, Any]
    lnc: int
    lnc_from: str
    us: float
    source: str


# bytes of a partition that the library's kernels manage
LIBRARY_SBUF = 200 * 1024
# the library's name of a kernel where the record's is different
FUNCTIONS = {"qkv_tkg": "qkv", "rope": "RoPE"}


def call_of(row: LibraryRow, find: Find) -> tuple[launch.Kernel, Arguments]:
    """The kernel and its arguments; `find` returns an object of the library by its name.

    Raises:
        LookupError: the library has no function of that name.
    """
    tensors = {name: array(shape, dtype) for name, (shape, dtype) in row.tensors.items()}
    plain = {name: _member(value, find) for name, value in row.arguments.items()}
    special = _SPECIAL.get(row.kernel)
    if special is not None:
        return special(row, tensors, plain, find)
    kernel = find(FUNCTIONS.get(row.kernel, row.kernel))
    return launch.jit(kernel), tensors | plain


def array(shape: tuple[int, ...], dtype: str) -> Any:
    """Zeros: times do not depend on values. A dtype in words such as `=lse` is a computed fp32 state."""
    if dtype.startswith("="):
        dtype = "float32"
    return np.zeros(shape, bool if dtype == "bool" else INFO[dtype].storage)


def _member(value: Any, find: Find) -> Any:
    """A member of the library's enumerations where the record names one, as in `@NormType.RMS_NORM`."""
    if isinstance(value, list):
        return tuple(_member(part, find) for part in value)
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    kind, _, name = value[1:].partition(".")
    members: type[enum.Enum] = find(kind)
    return members[name]


def _rmsnorm_quant(_row: LibraryRow, tensors: Arguments, plain: Arguments, find: Find) -> tuple[Any, Arguments]:
    """The kernel takes its choices as one object."""
    return find("rmsnorm_quant_kernel"), tensors | {"kargs": find("RmsNormQuantKernelArgs")(**plain)}


def _rotational_topk(row: LibraryRow, tensors: Arguments, plain: Arguments, find: Find) -> tuple[Any, Arguments]:
    """The library computes the kernel's configuration from the shape on the host."""
    values = tensors["inp"]
    base = find("create_topk_config")(values.shape, language.float32, plain["k"], plain["ordered"], row.lnc)
    config = find("create_rotational_topk_config")(values.shape, base)
    return find("rotational_topk"), {"inp": values, "config": find("prepare_rotational_constants")(config)}


# the record lost how x is loaded: element by element (`x_sb_layout` 2) fits the other rows, contiguous runs this one
BY_RUNS = frozenset({"router_topk[0]"})


def _router_topk(row: LibraryRow, tensors: Arguments, plain: Arguments, find: Find) -> tuple[Any, Arguments]:
    """Part of a larger kernel: x, [T, H], is brought to SBUF first."""
    route, load = find("router_topk"), find("router_topk_input_x_load")
    tokens, experts = tensors["x"].shape[0], tensors["w"].shape[1]
    outputs = {
        "router_logits": np.zeros((tokens, experts), np.float32),
        "expert_affinities": np.zeros((tokens, experts), np.float32),
        "expert_index": np.zeros((tokens, plain["k"]), np.uint32),
    }
    layout = 0 if row.id in BY_RUNS else 2
    layouts = {"x_hbm_layout": 1, "x_sb_layout": layout, "use_indirect_dma_scatter": True}

    def routed(x: Any, **arrays: Any) -> Any:
        return route(load(x, 1, layout), **{"w_bias": None, **arrays, **plain, **layouts})

    return launch.jit(routed), tensors | outputs


def _cross_entropy(row: LibraryRow, tensors: Arguments, plain: Arguments, find: Find) -> tuple[Any, Arguments]:
    """It computes in the logits' dtype, which its argument repeats; a chunk holds at most the vocabulary."""
    logits = tensors["logits_hbm"]
    chunk = min(plain.get("chunk_size", logits.shape[1]), logits.shape[1])
    fixed = {"dtype": getattr(language, logits.dtype.name), "chunk_size": chunk}
    return launch.jit(find(row.kernel)), tensors | plain | fixed


def _mlp_tkg(_row: LibraryRow, tensors: Arguments, plain: Arguments, find: Find) -> tuple[Any, Arguments]:
    """The library's `mlp`: its own object holds the arguments, and says by the tokens which of two kernels runs."""
    parameters, few, manager = find("MLPParameters"), find("is_mlp_tkg"), find("BufferManager")
    decode, encode, log = find("mlp_tkg"), find("mlp_cte"), find("Logger")("mlp")
    # the defaults of `mlp`, which are not those of its object
    tiled = {"use_tkg_gate_up_proj_column_tiling": True, "use_tkg_down_proj_column_tiling": True}
    hidden = tensors["hidden_tensor"]

    def mlp(**arrays: Any) -> Any:
        out = language.ndarray(hidden.shape, dtype=hidden.dtype.name, buffer=language.shared_hbm)
        chosen = parameters(**{**tiled, **arrays, **plain})
        if few(chosen):
            decode(chosen, out, None, sbm=manager(0, LIBRARY_SBUF, log))
        else:
            encode(chosen, out, None)
        return out

    return launch.jit(mlp), tensors


def _attention_tkg(_row: LibraryRow, tensors: Arguments, plain: Arguments, find: Find) -> tuple[Any, Arguments]:
    """Part of a larger kernel: queries and keys are brought to SBUF first, as `[d, B H S]`."""
    attend, config, manager = find("attention_tkg"), find("AttnTKGConfig"), find("create_auto_alloc_manager")
    depth, rows = tensors["q"].shape
    _, batch, heads, active = tensors["mask"].shape
    prior = tensors["k_prior"].shape[-1]
    assert rows == batch * heads * active
    chosen = {name: value for name, value in plain.items() if name in inspect.signature(config).parameters}
    cfg = config(**{"bs": batch, "q_head": heads, "s_active": active, "curr_sprior": prior, "full_sprior": prior,
                    "d_head": depth, "qk_in_sb": True, **chosen})  # fmt: skip

    def attention(q: Any, k_active: Any, v_active: Any, k_prior: Any, v_prior: Any, mask: Any) -> Any:
        q_sb, k_sb = (language.ndarray(x.shape, dtype=x.dtype, buffer=language.sbuf) for x in (q, k_active))
        isa.dma_copy(dst=q_sb, src=q)
        isa.dma_copy(dst=k_sb, src=k_active)
        out = language.ndarray((batch, heads, depth, active), dtype=q.dtype, buffer=language.shared_hbm)
        memory = manager()
        memory.open_scope()
        attend(q_sb, k_sb, v_active, k_prior, v_prior, mask, out, cfg, memory)
        return out

    return launch.jit(attention), tensors


_SPECIAL: dict[str, Callable[[LibraryRow, Arguments, Arguments, Find], tuple[Any, Arguments]]] = {
    "rmsnorm_quant": _rmsnorm_quant,
    "rotational_topk": _rotational_topk,
    "router_topk": _router_topk,
    "cross_entropy_forward": _cross_entropy,
    "cross_entropy_backward": _cross_entropy,
    "mlp_tkg": _mlp_tkg,
    "attention_tkg": _attention_tkg,
}
