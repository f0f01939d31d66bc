"""The questions that only a device can answer, each with the choice made without an answer and the way to check it.

`python -m compile.device_check --page` prints docs/device_checks.md from these rows. Nothing is imported that a bare
Python lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HELD, FAILED, NOT_REACHED = "held", "FAILED", "not reached"
_HEAD = """# What a trn2 machine must check

Printed by `python -m compile.device_check --page`. The documents do not decide these points, or nothing here can try
them. Each choice is safe under either answer. Where a row names a step, `make device-check` answers it; its report ends
with all rows: held, failed, not reached.

| part | question | how to check | chosen |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Question:
    """A question about a part. `step` answers it: every step of that name, or of a name that begins with it; without
    one it is answered by hand."""

    part: str
    question: str
    chosen: str
    how: str = ""
    step: str = ""

    @property
    def check(self) -> str:
        """How to check it, in words."""
        named = f"step `{self.step}`" if self.step else ""
        return "; ".join(part for part in (named, self.how) if part)

    def states(self, states: Mapping[str, str]) -> list[str]:
        """The states of the steps that answer it."""
        return [
            s for name, s in states.items() if name == self.step or name.startswith((f"{self.step} ", f"{self.step},"))
        ]

    def answer(self, states: Mapping[str, str]) -> str:
        """Held if all of its steps held, failed if one failed."""
        if not self.step:
            return f"{NOT_REACHED}: by hand"
        reached = self.states(states)
        if FAILED in reached:
            return FAILED
        return HELD if reached and set(reached) == {HELD} else NOT_REACHED


def page() -> str:
    """docs/device_checks.md."""
    return _HEAD + "".join(f"| {q.part} | {q.question} | {q.check} | {q.chosen} |\n" for q in QUESTIONS)


def table(states: Mapping[str, str]) -> list[str]:
    """Lines of Markdown: every question and its answer by the states of the steps."""
    rows = [f"| {q.part} | {q.question} | {q.answer(states)} | {q.check} |" for q in QUESTIONS]
    return ["| part | question | answer | how |", "|---|---|---|---|", *rows]


QUESTIONS = (
    Question("deploy", "does the V0 engine load a bundle from a read-only folder, and fail instead of recompiling "
             "when it may not write", "a read-only mount, and an init container that refuses first",
             how="apply `base/`, read the server's log; delete `model.pt` from a copy and start again"),
    Question("deploy", "is `num_speculative_tokens` NxDI's `speculation_length` (k + 1 verified rows), as its "
             "loader's source says", "k + 1", how="compare the loaded `neuron_config.json`, count rows in the graph's "
             "input"),
    Question("deploy", "is `NEURON_LOGICAL_NC_CONFIG` harmless beside a claim's `NeuronConfig`",
             "both are set, from one value", how="`neuron-ls` in the pod, start with and without the variable"),
    Question("deploy", "is the attribute's name `resource.aws.com/devicegroup<n>_id` for n = 1, 4, 8, 16 on the "
             "driver's version in use", "as documented", how="`kubectl get resourceslices -o yaml`"),
    Question("deploy", "does the mounted bucket show `bundles/` and `checkpoints/` to uid 1000 with these mount "
             "options", "`read-only`, `allow-other`, `uid`, `gid`, `prefix`", how="`ls` in the init container"),
    Question("deploy", "which of vLLM's speculation counters does the engine offer on Neuron, if any",
             "none: with `nxdi` the dashboard has no panel of drafts", how="`curl /metrics` on the speculative server"),
    Question("verify_attention", "is a product of 0 and a finite number added exactly, wherever it stands in a sum of "
             "128 partitions", "assumed: hidden slots weigh 0", how="`tests/nki_kernels/attention/test_verify.py` on "
             "the device"),
    Question("verify_attention", "may one `range_select` read 1024 fp32 columns over two PSUM banks",
             "yes above 64 rows, two of 512 otherwise", how="N = 32: compile, compare"),
    Question("verify_attention", "does the compiler let a product wait for a run-time copy into a different part of "
             "its key tile", "nkisim compares the bytes that are written", how="profile S = 1024: first product "
             "against the copy of new keys"),
    Question("verify_attention", "does the Tensor Engine read weights with a stride of 16 bytes at full rate",
             "an eighth of it, as the vendor's kernels show; strided turns, no copy before",
             how="profile `nc_transpose` of a tile with stride 8"),
    Question("verify_attention", "may `nc_transpose` take its rows from partitions 32 to 63 or 64 to 127",
             "yes, as the start partition rule says", how="compile, compare"),
    Question("verify_attention", "how far does the Tensor Engine slow down between bursts at S = 1024",
             "half clock until 0.7 of the rows were busy for 3 us, full clock until less than half", how="profile"),
    Question("verify_attention", "do transfers that the Scalar Engine triggers delay its instructions",
             "after the pack's last exponentials", how="profile the append of keys"),
    Question("verify_attention", "does the compiler call a function that it takes out of a tuple",
             "the language guide allows functions as values", step="kernel verify_attention"),
    Question("verify_attention", "what does a gather of 128 rows of 2 KiB cost on the GpSimd queue",
             "0.67 us for descriptors and 1.2 us for the row indices, measured on other kernels", how="profile"),
    Question("verify_attention", "does a scatter with `oob_mode.skip` drop the rows whose index is behind the "
             "pool", "yes, as the manual says", step="kernel verify_attention"),
    Question("decode_mlp, decode_attention", "is GpSimd's rsqrt (`tensor_scalar`) as precise as fp32, and how long "
             "does a (R, 1) tile take", "GpSimd: no table of the Scalar Engine, documented as more precise",
             how="compare with fp64, profile"),
    Question("decode_mlp, decode_attention", "does the Tensor Engine keep its full clock at 60 to 65 % use by weights "
             "that stream", "once 0.7 of the rows were busy for 3 us, while half of them are",
             how="profile a layer of 32B at TP 32"),
    Question("decode_mlp", "is the Scalar Engine's silu table within 2 bf16 units", "`activation(silu)`",
             how="compare with fp64"),
    Question("decode_attention", "is a product of fp32 numbers with a permutation of zeros and ones exact",
             "yes: both passes of fp32 add up to the number", how="compare bits"),
    Question("decode_mlp, decode_attention", "may `nc_matmul` tile the array's columns (`tile_size` (128, 32)), which "
             "its text allows and its parameter list does not", "yes, as the vendor's own kernels do",
             how="compile, compare"),
    Question("stream_weights", "what rate do transfers of 8 KiB rows reach while small transfers share the engines",
             "26 B/ns per engine, 9 ns per row", how="profile, bytes per time"),
    Question("model/on_device", "does torch see what a kernel writes to a cache that it takes but does not return",
             "in place; if not, the kernels return the caches too", step="requests, kernels"),
    Question("gumbel_noise, coupled_sample", "does the device read a uint16 view of a uint32 tile, and a run-time "
             "offset of an activation's input, as nkisim does", "low half first, offset in elements",
             how="`tests/nki_kernels/sampling/test_noise.py` on the device", step="kernel gumbel_noise"),
    Question("gumbel_noise", "do bitwise instructions on uint32 and uint16 tiles of the Vector Engine keep all bits",
             "as the manual says", step="kernel gumbel_noise"),
    Question("coupled_sample", "how far do the engine's log, exp and reciprocal lie from the definitions",
             "the definitions", how="compare noise and tokens over 10^6 draws"),
    Question("coupled_sample", "does the compiler overlap `gumbel_noise` with the layers, which do not need it",
             "two kernels, noise first", how="profile the fused graph"),
    Question("nkisim: access patterns", "does the compiler refuse or split a compute instruction over five free "
             "dimensions that do not merge, or a step of 32768 elements", "refused", how="compile a copy of each"),
    Question("nkisim: rand_set_state", "do the GpSimd lanes of a tile that starts at partition 32 count from 0 or "
             "from 32", "from 0, the tile's first partition", how="set, draw and read back at two starts"),
    Question("nkisim: NKI 0.7, scalars", "what do `scalar_load`, `scalar_store` and `+`, `-`, `*` of scalars cost, "
             "and do they wait for a queue", "the time of a register's load and store", how="profile a loop of each"),
    Question("nkisim: NKI 0.7, scalars", "is `scalar == None` decided in Python by identity, or traced",
             "refused, as every comparison with anything but an integer; `is None` works", how="trace a kernel that "
             "tests one"),
    Question("nkisim: NKI 0.7, grids", "what is `element_shape` where an integer took a leading dimension, "
             "`is_remainder` of several cells, and `data` of several rows of tiles in SBUF", "without that dimension; "
             "whether one of them is short; refused", how="print them in a kernel"),
    Question("nkisim: NKI 0.7, grids", "may `nl.ndarray` take 256 rows of SBUF, as the page of `NkiBlockGrid` writes",
             "refused; `nl.alloc_tiles` packs them", how="compile the page's example"),
    Question("nkisim: NKI 0.7, collectives", "how much of a collective's time is its metadata, which a `_prepare` "
             "takes ahead", "the trigger takes all of it", how="profile both forms at 4 ranks"),
    Question("nkisim: NKI 0.7, sendrecv_compute", "what does its reduction add to `sendrecv`, and which dtypes and "
             "operators does it take", "nothing; fp32 inside; sum, maximum, minimum", how="profile both, compare bits "
             "in bf16"),
    Question("nkisim: NKI 0.7, launch", "what is `program_ndim()` on two cores that `NEURON_LOGICAL_NC_CONFIG` gave",
             "refused", how="print it"),
    Question("nkisim: NKI 0.7, reduction registers", "does `scalar_tensor_tensor`, whose `reduce_cmd` is "
             "`reset_reduce` by default, change the registers where it gives no result, and what does `reduce_res` "
             "hold", "the registers are lost; a result is refused", how="read them after one"),
    Question("nkisim: NKI 0.7, topk", "which way does `topk(sorted=True)` sort", "refused", how="sort 64 numbers"),
    Question("toolchain", "does neuronx-cc accept protos that jax wrote, with ids renumbered and layers as calls",
             "layers stay calls", step="neff"),
    Question("hlo", "does neuronx-cc read replica groups from the old field (49) or the new (87) of an instruction",
             "both are written, and equal", how="compile at tp 2, look at the NEFF's collectives"),
    Question("toolchain", "does ModelBuilder give every bucket of a tag the same module, with `bucket_config=None`",
             "yes, as its source says", step="model"),
    Question("toolchain", "is the work folder `{tag}/_tp0_bk{i}/` with `log-neuron-cc.txt` and `model/graph.hlo` "
             "there for every bucket", "as its source says; a missing log is one line in its place", step="model"),
    Question("toolchain", "does a kernel's in-place write to a cache reach the tensor that it took, inside a traced "
             "graph", "the tensor that it took is returned", step="requests, kernels"),
    Question("kernels", "does nki trace a kernel on two cores with `program_ndim()` above 0, without a grid",
             "launched as kernel[2]; if it is 0, both cores do all of it", how="print it while specialising"),
    Question("kernels", "does nki's private seam give a kernel that returns its caches the aliases that its call "
             "declares",
             "caches are returned and aliased; a build compares both", how="build with `--kernels nki` beside nki"),
    Question("kernels", "does neuronx-cc take a launch of layers that sums over ranks inside, and are the ranks of a "
             "`ReplicaGroup` there those of the graph's replica groups", "yes: `\"layers\": 1` in a recipe sums in the "
             "graph", how="build with `--kernels nki --tp 2` beside nki, generate"),
    Question("kernels", "does neuronx-cc find a kernel's IR below its working folder after it was moved there",
             "`<digest>/<file>`, as NCC_EVRF059 says", how="build with `--kernels nki` beside nki"),
    Question("hlo", "do a NEFF's tensors have the names of the attributes `neff_input_names` and "
             "`neff_output_names`, and does the compiler keep `.must_alias_input`", "names as nkipy writes them",
             how="read `input_tensors_info` of a NEFF with nrtpy"),
    Question("toolchain", "does neuronx-cc compile the StableHLO twin, and in which time", "HLO is the input",
             how="build with the recipe `{\"compiler_input\": \"stablehlo\"}`"),
    Question("compile.neuron.module", "does the compiler take int64 indices and shifts of int32 tensors",
             "torch_xla lowers both; `view(dtype)` is not used", step="requests"),
    Question("compile.neuron.module", "does NxDI start a model whose shards hold no "
             "`layers.i.self_attn.rank_util.rank`, and route seven inputs to it", "yes: our graphs read "
             "`rank_util.rank` only", how="the command of `compile.serve_command`", step="NxDI"),
    Question("compile.graph.trace", "may a scatter write one place twice with the same bits, as a row beyond a cache "
             "does now", "yes: nothing is written outside", how="a request to the context's end", step="graphs"),
    Question("pjrt", "are the first 32 devices of the plugin the logical cores of eight neighbouring chips, in order",
             "rank r runs on device r of the plugin's list", how="`neuron-ls` beside `jax.devices()`, profile a "
             "collective"),
    Question("pjrt", "does the plugin's compiler read `NEURON_CC_FLAGS` at each compilation, and the LNC from "
             "`NEURON_LOGICAL_NC_CONFIG` alone", "both are set before each; the bundle's flags, or the documented ones",
             how="look at the compiler's command in its log"),
    Question("nrt", "which names have the inputs and outputs of a NEFF from our HLO, and does it keep inputs that "
             "nothing reads", "the plan's, in place with `.must_alias_input` behind it or without; an unread one may "
             "be missing", step="nrt, tp 1"),
    Question("nrt", "does an execution write a cache in place whose tensor is input and output", "yes, as in NKIPy's "
             "models", step="nrt, tp 1"),
    Question("nrt", "is core 0 of a process whose `NEURON_RT_VISIBLE_CORES` is one number that logical core, and must "
             "`NEURON_LOGICAL_NC_CONFIG` be the build's when a NEFF is loaded", "yes; it is set", step="nrt, tp 1"),
    Question("nrt", "do ranks in processes of their own meet by `NEURON_RT_ROOT_COMM_ID` alone", "yes, as NKIPy's "
             "guide says", step="nrt, tp 2"),
    Question("nrt", "does nrtpy run in a process that has torch (for the plan) and not jax, beside other processes of "
             "the same Python that have", "yes", step="nrt, tp 1"),
    Question("nrt", "does the death of a rank end the executions of the others, and with which error",
             "the runner kills them", how="kill a rank while step `nrt, tp 2` runs"),
    Question("nrt", "what does a call cost at 1, 4 and 32 ranks, and a change of the NEFF between two calls",
             "one call a step, buckets and filters are NEFFs of their own", how="profile"),
    Question("nrt", "how long does it take to write 2 GB of weights to a core, and how much memory of the host",
             "a rank reads and checks its own file; all ranks at once", how="measure a start at tp 32"),
    Question("nrt, pjrt", "do a NEFF by nrtpy and the same graph by the plugin give equal bits", "ids are judged, "
             "not bits", how="compare the logits of step `nrt, tp 1` and `graphs, tp 1`"),
    Question("pjrt", "does the plugin compile our StableHLO and run it with caches donated", "yes, as a CPU's does",
             step="pjrt"),
    Question("compile.neuron.module", "does NxDI's host take one result (B,) a step from the model of a target alone, "
             "as its source says", "one result before the caches", step="requests, k 0"),
    Question("device_check", "do torch 2.13 and jax 0.10 work beside the SDK, which brings torch 2.9, in one "
             "environment", "torch 2.9 is enough for the package", how="install with the SDK first, run `make "
             "device-check`"),
    Question("sharding: draft groups", "what does an all-reduce of 4 or 8 consecutive ranks cost beside one of 32, "
             "and do its groups lie on one chip", "nkisim counts hops between chips; the default is all ranks",
             how="profile a fused graph built with and without `draft_tp` 4, `NEURON_LOGICAL_NC_CONFIG=2`"),
    Question("sharding: collectives", "does the tracer keep the replica groups of torch_xla's `all_reduce` and "
             "`all_gather`, and the compiler take graphs with groups of several sizes",
             "literal groups, `pin_layout=False`", how="build with `draft_tp` 2, read `logs/*.hlo`, "
             "generate", step="requests, draft groups"),
)  # fmt: skip
