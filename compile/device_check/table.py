"""The steps of the device check, cheapest first, each with its question. A bare Python can import this file."""

from __future__ import annotations

from dataclasses import dataclass

_HOUR = 3600
# the cases of compile.device_check.kernels, shortest programs first, each with its case of bench.kernels
KERNELS = {
    "accept_drafts": "accept_drafts_kernel/M32-B4-N8",
    "gumbel_noise": "gumbel_noise_kernel/R4-V4748-fp32",
    "coupled_sample, weights_above": "coupled_sample_kernel/R4-V4748-fp32",
    "decode_mlp": "decode_mlp_kernel/1.7B-tp32-B4-N1",
    "prompt_mlp, prompt_product": "prompt_mlp_kernel/32B-tp32-C128",
    "decode_attention": "decode_attention_kernel/1.7B-tp32-B4-N1-S1024",
    "decode_layers": "decode_layers_kernel/1.7B-tp32-B4-N1-S1024-L4-alone-lnc2",
    "decode_layers, 4 layers": "decode_layers_kernel/32B-tp32-B4-N8-S1024-L4-alone-lnc2",
    "verify_attention": "verify_attention_kernel/B4-H2-G1-S1024-N8-D128-bf16",
    "append_rows, prompt_attention": "prompt_attention_kernel/C2048-S2048-H2-G1-D128-bf16",
}


@dataclass(frozen=True)
class CheckStep:
    """A name for --only, a question, a function of `steps`, or of the module before its dot, with its argument, and a
    limit in seconds.

    A step is not reached if one that it needs did not hold.
    """

    name: str
    what: str
    function: str
    argument: str = ""
    needs: tuple[str, ...] = ()
    seconds: int = _HOUR


# builds of the demo pair, the smallest first: two buckets, batch 4, k 7. Each route answers the same requests, one to
# the context's end, prompts beyond the first bucket, every way of drawing, every id of the vocabulary
MODELS = ("k 0", "tp 1", "bf16", "tp 2", "tp 4", "draft groups")
GRAPHS = ("tp 1", "bf16", "tp 2", "tp 4")
_IDS = "are all ids of the requests the target's own draws, except near ties"


def _of_model(build: str) -> tuple[CheckStep, ...]:
    of_model = CheckStep(f"model, {build}", f"does ModelBuilder take the module: {build}", "routes.model", build,
                         ("NxD",))  # fmt: skip
    return of_model, CheckStep(
        f"requests, {build}", f"by NxDI's host, {build}: {_IDS}", "routes.requests", build, (of_model.name,)
    )


def _of_kernel(name: str, case: str) -> tuple[CheckStep, ...]:
    law = CheckStep(f"kernel {name}", f"does {name} give its law's result in fp64", "kernel", name, seconds=900)
    asked = f"how long does {case.partition('_kernel')[0]} take beside its simulated time"
    return law, CheckStep(f"time {name}", asked, "time", case, (law.name,), 900)


STEPS = (
    # the compiler alone, no device
    CheckStep("neff", "does neuronx-cc take our HLO, as calls of layers or inlined", "neff"),
    *(CheckStep(f"neff, {build}", f"does neuronx-cc take every graph: {build}", "routes.neffs", build, ("neff",),
                4 * _HOUR) for build in GRAPHS),
    CheckStep("devices", "which devices are there", "devices", seconds=120),
    *(step for name, case in KERNELS.items() for step in _of_kernel(name, case)),
    *(CheckStep(f"nrt, {build}", f"by nrtpy, {build}: {_IDS}", "routes.nrt", build, (f"neff, {build}", "devices"))
      for build in GRAPHS),
    CheckStep("pjrt", "does JAX see the plugin, and does it load what it has serialized", "plugin", seconds=900),
    *(CheckStep(f"graphs, {build}", f"by the plugin, {build}: {_IDS}", "routes.graphs", build, ("pjrt",), 4 * _HOUR)
      for build in GRAPHS),
    CheckStep("NxD", "are the packages that model.pt needs the real ones", "versions", seconds=120),
    *(step for build in MODELS for step in _of_model(build)),
    CheckStep("warm cache", "does a second build over a warm compiler cache end whole", "routes.warm", "tp 1",
              ("model, tp 1",)),
    CheckStep("NxDI", "do NxDI's own load() and forward take the bundle", "routes.nxdi", "tp 1", ("model, tp 1",)),
    *_of_model("kernels"),
    CheckStep("times", "how long does every benchmark case take beside its simulated time", "times", seconds=4 * _HOUR),
    CheckStep("full", "do the graphs of Qwen3-32B + Qwen3-1.7B at tp 32 compile", "full", seconds=12 * _HOUR),
)  # fmt: skip
