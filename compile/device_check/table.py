"""The steps of the device check, cheapest first, each with its question. A bare Python can import this file."""

from __future__ import annotations

from dataclasses import dataclass

_HOUR = 3600
# the cases of compile.device_check.kernels, shortest programs first, each with its case of bench.kernels
KERNELS = {
    "accept_drafts": "accept_drafts_kernel/M32-B4-N8",
    "merge_attention": "merge_attention_kernel/M4-R64-D128-fp32",
    "gumbel_noise": "gumbel_noise_kernel/R4-V4748-fp32",
    "coupled_sample, weights_above": "coupled_sample_kernel/R4-V4748-fp32",
    "decode_mlp": "decode_mlp_kernel/1.7B-tp32-B4-N1",
    "decode_attention": "decode_attention_kernel/1.7B-tp32-B4-N1-S1024",
    "verify_attention": "verify_attention_kernel/B4-H2-G1-S1024-N8-D128-bf16",
    "verify_attention_paged": "verify_attention_paged_kernel/B4-H2-G1-S8192-N8-D128-bf16",
    "prompt_attention": "prompt_attention_kernel/C2048-S2048-H2-G1-D128-bf16",
}


@dataclass(frozen=True)
class CheckStep:
    """A name for --only, a question, a function of `steps` with its argument, and a limit in seconds.

    A step is not reached if one that it needs did not hold.
    """

    name: str
    what: str
    function: str
    argument: str = ""
    needs: tuple[str, ...] = ()
    seconds: int = _HOUR


# builds of the demo pair whose model.pt gets the requests of NxDI's host, the smallest first
BUILDS = {
    "k 0": "does NxDI's host take one result a step from the model of a target without a draft",
    "tp 1, batch 2": "does model.pt of one rank give the eager module's tokens, greedy as (1, 1, 1), top-k, top-p",
    "bf16": "does model.pt give the eager module's tokens in bf16, except near ties",
    "tp 2": "does model.pt of two ranks, with collectives of literal groups, give the eager module's tokens",
    "draft groups": "does model.pt with a draft on one of two ranks give the eager module's tokens",
}


def _of_build(build: str, what: str) -> tuple[CheckStep, ...]:
    return (
        CheckStep(f"model, {build}", f"does ModelBuilder take the module: {build}", "model", build, ("versions",)),
        CheckStep(f"requests, {build}", what, "requests", build, (f"model, {build}",)),
    )


def _of_kernel(name: str, case: str) -> tuple[CheckStep, ...]:
    law = CheckStep(f"kernel {name}", f"does {name} give its law's result in fp64", "kernel", name, seconds=900)
    asked = f"how long does {case.partition('_kernel')[0]} take beside its simulated time"
    return law, CheckStep(f"time {name}", asked, "time", case, (law.name,), 900)


STEPS = (
    CheckStep("versions", "are the SDK's packages the real ones, and which devices are there", "versions", seconds=120),
    *(step for name, case in KERNELS.items() for step in _of_kernel(name, case)),
    CheckStep("pjrt", "does JAX see the plugin, and does it load what it has serialized", "plugin", seconds=900),
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
    CheckStep("times", "how long does every benchmark case take beside its simulated time", "times", seconds=4 * _HOUR),
    CheckStep("full", "do the graphs of Qwen3-32B + Qwen3-1.7B at tp 32 compile", "full", seconds=12 * _HOUR),
)  # fmt: skip
