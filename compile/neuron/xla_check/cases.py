"""The builds to lower: the demo pair on one and two ranks, and the shapes of Qwen3-32B with Qwen3-1.7B on 32."""

from __future__ import annotations

from pathlib import Path

from compile.spec import BuildSpec, Recipe

_DEMO = Path(__file__).resolve().parents[3] / "demo"
_PAIR = {"target": str(_DEMO / "target"), "draft": str(_DEMO / "draft"), "batch": 2, "max_len": 128, "dtype": "fp32"}


def spec(**changes: object) -> BuildSpec:
    """A spec of the demo pair, or of the full one where `target` is given."""
    return BuildSpec(**changes)  # type: ignore[arg-type]


# the demo pair runs too; the full shapes are lowered in their smallest bucket
CASES: dict[str, BuildSpec] = {
    "demo-tp1": spec(**_PAIR, tp=1, k="3"),
    "demo-tp2": spec(**_PAIR, tp=2, k="3"),
    "full-k7": spec(tp=32, k="7", max_len=128),
    "full-k0": spec(tp=32, k="0", max_len=128),
    "full-groups": spec(tp=32, k="7", recipe=Recipe(draft_tp=4), max_len=128),
}
RUN = ("demo-tp1", "demo-tp2")
