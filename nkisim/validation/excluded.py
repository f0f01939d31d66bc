"""Published versions that have no row, each with its reason, and how many versions each record publishes.

A version is a kernel with a name and a time in its record; repeats of a version are one. Not counted are kernels that
language models wrote as attempts (logs of trainium-agent-labs), which their record does not name.
"""

from __future__ import annotations

from dataclasses import dataclass

KDA, FUSION = "kda-for-trainium", "trainium-kernel-fusion"
LABS, COURSE = "trainium-agent-labs", "asst4-trainium2"

SAME = "the compiler makes the kernel of {} of it, by its record"
WRONG = "its result was wrong"
SPILLED = "the compiler spilled, which a sketch cannot: the chip moved more bytes than the kernel requests"
NOT_SKETCHED = "not sketched"

_NORMED = "matmul, residual and RMSNorm, stored at once, split"


@dataclass(frozen=True, slots=True)
class Unrun:
    """A version without a row; `us` is the core's time as in `operators.py`, None where the record has none."""

    name: str
    record: str
    us: float | None
    why: str
    # versions that share the reason
    count: int = 1


def _kda(name: str, ms: float, why: str) -> Unrun:
    return Unrun(name, KDA, 2000 * ms - 10, why)


UNRUN: tuple[Unrun, ...] = (
    _kda("add_rmsnorm_matmul_v3b_bf16_split4", 0.5145, f"{NOT_SKETCHED}: adds the product of both low parts"),
    _kda("add_rmsnorm_matmul_v4_psum_split", 0.4014, SAME.format("residual, RMSNorm and matmul, scaled after, split")),
    _kda("bmm_d1_stage_a_g2", 3.8473, SAME.format("batched matmul, 1 row tiles")),
    _kda("bmm_d1_stage_b_g2", 3.8483, SAME.format("batched matmul, 1 row tiles")),
    _kda("bmm_d1_stage_b_g4", 3.8481, SAME.format("batched matmul, 1 row tiles")),
    _kda("bmm_d1_wide1024", 3.8477, SAME.format("batched matmul, 1 row tiles")),
    _kda("bmm_probe_bf16_calib", 1.5592, WRONG),
    _kda("bmm_v2_d2_loadtranspose", 2.0352, SAME.format("batched matmul, 32 row tiles")),
    _kda("bmm_softmax_v2", 3.9250, f"{NOT_SKETCHED}: one more instruction a row tile than 32 row tiles"),
    _kda("bmm_softmax_v3_fused_reduce_reject", 6.8883, "the compiler ran all products and loads twice"),
    _kda("bmm_softmax_v5_norm_scalar", 3.7373, SAME.format("batched matmul and softmax, 16 row tiles")),
    _kda("gqa_full_v4_msub1", 7.7902, SAME.format("grouped attention, scaled by exp, sums divided")),
    _kda("gqa_full_v7b_fused_rowsum", 6.3952, WRONG),
    _kda("mamba_v1", 1.5116, SPILLED),
    _kda("mamba_v2a", 0.8362, f"{NOT_SKETCHED}: the sequence is the innermost loop"),
    _kda("mamba_v4_s4unroll", 0.7164, "`static_range` unrolls the last Mamba row, whose events are the same"),
    _kda("matmul_v2_b16", 26.1879, "its operands that stay are 320 KiB of a partition, which has 208"),
    _kda("matmul_add_rmsnorm_v2_psum_split", 0.7728, SAME.format(_NORMED)),
    _kda("matmul_add_rmsnorm_v3_stationary_reorder", 0.7874, f"{NOT_SKETCHED}: sums of four banks in turn"),
    _kda("matmul_add_rmsnorm_v4_stationary_reorder_2bank", 0.7733, SAME.format(_NORMED)),
    _kda("rmsnorm_matmul_probe_bf16_calib", 0.1458, WRONG),
    _kda("rmsnorm_matmul_probe_loadtranspose", 0.4706, SAME.format("RMSNorm and matmul, scaled before")),
    _kda("rmsnorm_matmul_probe_nctranspose_vector_v2", 0.4813, f"{NOT_SKETCHED}: fp32 transposes of the Vector Engine"),
    _kda("rmsnorm_matmul_v3_stationary_reuse", 0.4723, f"{NOT_SKETCHED}: sums of four banks in turn"),
    _kda("silu_v2_pingpong", 0.5889, "`sequential_range` prefetch: its waits are the compiler's"),
    _kda("silu_v3_s7_nested", 0.2938, "SiLU, 224 chunks, written as two loops: the same events"),
    _kda("tmm_v5_mblk16_nchunk512_masked_tail", 3.7887, f"{NOT_SKETCHED}: a masked last chunk"),
    _kda("tmm_v6_nchunk912", 7.3303, SPILLED),
    _kda("tmm_v7_dbuf_rhs", 3.6256, SPILLED),
    Unrun("baselines of the 14 operators", KDA, None, "their source is in a different repository", 14),
    Unrun("blocks (2, 4, 1)", LABS, None, "its log has no time"),
    Unrun("matmul_expert_aws", LABS, None, WRONG),
    Unrun("conv2d, float32", COURSE, 3832.0, NOT_SKETCHED),
    Unrun("conv2d, float16", COURSE, 824.0, NOT_SKETCHED),
    Unrun("conv2d, pooled, float32", COURSE, 3830.0, NOT_SKETCHED),
    Unrun("conv2d, pooled, float16", COURSE, 825.0, NOT_SKETCHED),
)


def unrun_section(rows: int) -> str:
    """The list as Markdown, with the count of versions published next to the rows that there are."""
    missing = sum(u.count for u in UNRUN)
    lines = [
        f"## Versions without a row\n\n{rows + missing} versions published, {rows} have rows; the other {missing}:\n",
        "| version | record | measured us | why it has no row |",
        "|---|---|---|---|",
        *(f"| {u.name} | {u.record} | {'' if u.us is None else f'{u.us:.1f}'} | {u.why} |" for u in UNRUN),
    ]
    return "\n".join(lines) + "\n"
