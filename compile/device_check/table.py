"""The steps of the device check, cheapest first: what each asks. Nothing is imported here: a bare Python lists them."""

from __future__ import annotations

from dataclasses import dataclass

_HOUR = 3600
# the cases of compile.device_check.kernels, by name
KERNELS = (
    "verify_attention", "verify_attention_paged", "merge_attention", "decode_mlp", "decode_attention",
    "gumbel_noise, uniform", "coupled_sample, weights_above", "accept_drafts", "rejection_sample, accept_rejection",
)  # fmt: skip


@dataclass(frozen=True)
class CheckStep:
    """A name for --only, the question in one line, the function of `steps` and its argument, its limit in seconds.

    A step is not reached where one that it needs did not hold.
    """

    name: str
    what: str
    function: str
    argument: str = ""
    needs: tuple[str, ...] = ()
    seconds: int = _HOUR


# builds of the demo pair whose model.pt is tried with the requests of NxDI's host
BUILDS = {
    "tp 1, batch 2": "does model.pt of one rank give the eager module's tokens, greedy as (1, 1, 1), top-k, top-p",
    "tp 2": "does it on two ranks, whose collectives are literal groups",
    "k 0": "does NxDI's host take one result a step from the model of a target alone",
    "bf16": "does it in bf16, but for near ties",
    "draft groups": "does a draft on one of two ranks, in groups of its own",
}


def _of_build(build: str, what: str) -> tuple[CheckStep, ...]:
    return (
        CheckStep(f"model, {build}", f"does ModelBuilder take the module: {build}", "model", build, ("versions",)),
        CheckStep(f"requests, {build}", what, "requests", build, (f"model, {build}",)),
    )


STEPS = (
    CheckStep("versions", "are the SDK's packages the real ones, and which devices are there", "versions", seconds=120),
    CheckStep("pjrt", "does JAX see the plugin, and does it load what it has serialized", "plugin", seconds=900),
    *(
        CheckStep(f"kernel {name}", f"does {name} give its law's result in fp64", "kernel", name, seconds=900)
        for name in KERNELS
    ),
    CheckStep("neff", "does neuronx-cc take our HLO, as calls of layers or inlined", "neff"),
    CheckStep("graphs", "do the bundle's graphs on the plugin give the CPU's tokens", "graphs", needs=("pjrt",)),
    *(step for build, what in BUILDS.items() for step in _of_build(build, what)),
    CheckStep("warm cache", "does a second build over a warm compiler cache end whole", "warm", "tp 1, batch 2",
              ("model, tp 1, batch 2",)),
    CheckStep("NxDI", "do NxDI's own load() and forward take the bundle", "nxdi", "tp 1, batch 2",
              ("model, tp 1, batch 2",)),
    CheckStep("model, kernels", "does ModelBuilder take the module with the NKI kernels", "model", "kernels",
              ("versions",)),
    CheckStep("requests, kernels", "does model.pt with the NKI kernels give the eager module's tokens", "requests",
              "kernels", ("model, kernels",)),
    CheckStep("times", "what does every kernel take beside its simulated time", "times", seconds=4 * _HOUR),
    CheckStep("full", "do the graphs of Qwen3-32B + Qwen3-1.7B at tp 32 compile", "full", seconds=12 * _HOUR),
)  # fmt: skip
