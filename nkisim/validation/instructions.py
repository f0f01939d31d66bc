"""The published measurements as a table: name, value, range of readings, source, model."""

from __future__ import annotations

from nkisim import command
from nkisim.timeline.chip import DMA_OVERVIEW, KERNEL_OPT, RMSNORM_QUANT
from validation.instruction_models import (
    Measurement,
    instruction,
    kernel_v5_vector_ms,
    load_to_consumer,
    matmul_cold,
    matmul_duration,
    matmul_isolated,
    matmul_pitch,
    mixed_rate,
    queue_rate,
    relative_rate,
    small_chain,
    store,
    table_load,
)

DMA_FIGURE_1 = f"{DMA_OVERVIEW}, figure 1 (relative)"

# throughput relative to rows of 32 KiB, by bytes per partition
RELATIVE = {
    32: 0.014, 64: 0.026, 128: 0.05, 256: 0.103, 512: 0.206, 1024: 0.422,
    2048: 0.813, 4096: 0.966, 8192: 0.983, 16384: 0.990,
}  # fmt: skip


def _row(name: str, unit: str, bounds: tuple[float, float], source: str, model: object) -> Measurement:
    assert callable(model)
    low, high = bounds
    return Measurement(name, unit, (low + high) / 2, low, high, source, model)


def _vector() -> tuple[Measurement, ...]:
    psum, both, sbuf = "psum sbuf", "sbuf psum sbuf", "sbuf sbuf"
    scaled = "psum pointer sbuf sbuf"
    types = "float32 float32 bfloat16 float32"
    op = "scalar_tensor_tensor"
    return (
        _row("tensor_copy PSUM to SBUF, fp32, 512", "ns", (691, 700), KERNEL_OPT,
             lambda: instruction("tensor_copy", 512, psum)),
        _row("tensor_tensor SBUF + PSUM, fp32, 512", "ns", (688, 691), KERNEL_OPT,
             lambda: instruction("tensor_tensor", 512, both)),
        _row("  pitch to the next instruction", "ns", (605, 605), KERNEL_OPT,
             lambda: instruction("tensor_tensor", 512, both, pitch=True)),
        _row("tensor_copy SBUF to SBUF, fp32, 512", "ns", (420, 429), KERNEL_OPT,
             lambda: instruction("tensor_copy", 512, sbuf)),
        _row("  pitch to the next instruction", "ns", (343, 343), KERNEL_OPT,
             lambda: instruction("tensor_copy", 512, sbuf, pitch=True)),
        _row("scalar_tensor_tensor with (P, 1) operand, 512", "ns", (740, 768), RMSNORM_QUANT,
             lambda: instruction(op, 512, scaled, types)),
        _row("  pitch to the next instruction", "ns", (658, 658), RMSNORM_QUANT,
             lambda: instruction(op, 512, scaled, types, pitch=True)),
        _row("tensor_reduce, 16384", "ns", (17250, 17250), RMSNORM_QUANT,
             lambda: instruction("tensor_reduce", 16384, sbuf)),
        _row("tensor_scalar bf16 to fp8, 16384", "ns", (8820, 8820), RMSNORM_QUANT,
             lambda: instruction("tensor_scalar", 16384, sbuf, "bfloat16 float8_e4m3")),
        _row("(P, 1) dependent chain, per instruction", "ns", (160, 220), RMSNORM_QUANT,
             small_chain),
        _row("vector time of the matmul kernel v5", "ms", (3.08, 3.08), KERNEL_OPT,
             kernel_v5_vector_ms),
    )  # fmt: skip


def _tensor() -> tuple[Measurement, ...]:
    return (
        _row("nc_matmul fp32 128x128x512, pitch of one pass", "ns", (429, 430), KERNEL_OPT,
             lambda: matmul_pitch(2)),
        _row("  duration of one pass", "ns", (590, 597), KERNEL_OPT, matmul_duration),
        _row("  pitch of the call (two passes)", "ns", (859, 859), KERNEL_OPT,
             lambda: matmul_pitch(1)),
        _row("  isolated call, load start to end", "ns", (1130, 1130), KERNEL_OPT, matmul_isolated),
        _row("nc_matmul bf16, 512 columns, idle engine: pitch", "ns", (418, 418), RMSNORM_QUANT,
             lambda: matmul_cold(False)),
        _row("  duration", "ns", (583, 640), RMSNORM_QUANT, lambda: matmul_cold(True)),
    )  # fmt: skip


def _scalar() -> tuple[Measurement, ...]:
    return (
        _row("activation, 4096", "ns", (3705, 3705), DMA_OVERVIEW,
             lambda: instruction("activation", 4096, "sbuf sbuf")),
        _row("activation, 128", "ns", (398, 398), DMA_OVERVIEW,
             lambda: instruction("activation", 128, "sbuf sbuf")),
        _row("activation_reduce, 16384", "ns", (13940, 13940), RMSNORM_QUANT,
             lambda: instruction("activation_reduce", 16384, "sbuf sbuf")),
        _row("activation, (P, 1)", "ns", (284, 341), RMSNORM_QUANT,
             lambda: instruction("activation", 1, "sbuf sbuf")),
        _row("function table load", "ns", (1280, 1340), f"{DMA_OVERVIEW}; {RMSNORM_QUANT}",
             table_load),
    )  # fmt: skip


def _dma() -> tuple[Measurement, ...]:
    single = (
        _row("load [4, 4096] bf16: data phase", "ns", (1416, 1416), DMA_OVERVIEW,
             lambda: load_to_consumer(4, 4096, "data")),
        _row("  trigger to consumer start", "ns", (2740, 2740), DMA_OVERVIEW,
             lambda: load_to_consumer(4, 4096, "total")),
        _row("load [128, 128] bf16: trigger to consumer start", "ns", (1500, 1500), DMA_OVERVIEW,
             lambda: load_to_consumer(128, 128, "total")),
        _row("store [128, 128] bf16: trigger to end", "ns", (860, 860), DMA_OVERVIEW, store),
        _row("pipelined loads, 2 KiB rows, per engine", "B/ns", (22.0, 22.2), KERNEL_OPT,
             lambda: queue_rate(2048, "none") / 16),
        _row("pipelined loads, 512 B rows, per engine", "B/ns", (17.4, 17.4), KERNEL_OPT,
             lambda: queue_rate(512, "none") / 16),
        _row("pipelined loads, both mixed, per engine", "B/ns", (20.9, 20.9), KERNEL_OPT,
             mixed_rate),
        _row("two cores load 80 rows of 32 KiB, per core", "B/ns", (252, 252), RMSNORM_QUANT,
             lambda: queue_rate(32768, "none", 80, 2)),
    )  # fmt: skip
    curve = tuple(
        _row(f"one queue, {size} B per partition, throughput", "of max", (value, value),
             DMA_FIGURE_1, lambda size=size: relative_rate(size))
        for size, value in RELATIVE.items()
    )  # fmt: skip
    return single + curve


MEASUREMENTS: tuple[Measurement, ...] = _tensor() + _vector() + _scalar() + _dma()


def table() -> str:
    """The measurements and the model, as a Markdown table."""
    lines = [
        "| what | unit | measured | modelled (simulated) | ratio | source |",
        "|---|---|---|---|---|---|",
    ]
    for row in MEASUREMENTS:
        model = row.model()
        text = f"{row.low:g}" if row.low == row.high else f"{row.low:g} to {row.high:g}"
        name = row.name if row.name[0] != " " else f"... {row.name.strip()}"
        ratio = f"{model / row.measured:.3f}"
        cells = (name, row.unit, text, f"{model:.4g}", ratio, row.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(lambda: print(table()))
