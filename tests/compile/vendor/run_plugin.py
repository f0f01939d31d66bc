"""`python -m tests.compile.vendor.run_plugin BASE NXDI PLUGIN`: our bundle behind the V1 plugin's loader and runner.

NXDI and PLUGIN are checkouts of neuronx-distributed-inference and of vllm-neuron (0.2); their code runs as it is, over
stand-ins for the SDK and for vLLM. The device is the module of model.pt, run eagerly. Prints what happened as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Names
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from compile.device_check.nxdi_host import Host, Sequence
from compile.device_check.requests import shard_of
from compile.neuron import config
from compile.neuron.eager import EagerRanks
from compile.neuron.flags import nxdi_tag
from compile.neuron.sdk import nxdi_graphs, nxdi_tags, nxdi_tokens
from compile.serve_command import Served, arguments_of_v1, engine_arguments
from compile.spec import BuildSpec
from model.weights import shard_file
from tests.compile.tiny import spec
from tests.compile.vendor.absent import Absent
from trnspec.bundle.plan import make_plan

SDK = ("neuronx_distributed", "torch_xla", "torch_neuronx", "libneuronxla", "neuronxcc", "nkilib", "vllm")
PROMPTS = ((5, 9, 2, 7), (8, 1), (3, 3, 4))
NEW_TOKENS = 14


class Device:
    """What torch.jit.load gives NxDI, with the graphs of model.pt run eagerly; routed by the list of input shapes."""

    def __init__(self, built: BuildSpec) -> None:
        self.plan, self.nxd_model, self.calls = make_plan(built.bundle), self, list[tuple[str, list[float]]]()
        self.routes = {
            str([list(t.shape) for t in (*g.inputs[:5], *[g.inputs[3]] * 2)]): tag
            for tag in nxdi_tags(self.plan)
            for g in nxdi_graphs(self.plan, tag)
        }

    def initialize(self, weights: list[dict[str, torch.Tensor]], start_rank: torch.Tensor) -> None:
        assert start_rank.tolist() == [0]
        self.ranks = EagerRanks(self.plan, nxdi_tags(self.plan), weights)

    def forward(self, inputs: Any) -> list[torch.Tensor]:
        return self(*inputs)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        tag = self.routes[str([list(t.shape) for t in inputs])]
        assert [t.dtype for t in inputs[:5]] == [torch.int32] * 4 + [torch.float32]
        self.calls.append((tag, inputs[4][0].tolist()))
        return self.ranks(tag, inputs)


class Batch:
    """vLLM's InputBatch as far as the runner uses it."""

    def __init__(self, requests: int, length: int) -> None:
        self.req_ids: list[str] = []
        self.num_tokens_no_spec, self.num_tokens = (np.zeros(requests, np.int32) for _ in range(2))
        self.num_computed_tokens_cpu = np.zeros(requests, np.int32)
        self.token_ids_cpu = np.zeros((requests, length), np.int32)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.req_ids)}

    def remove_request(self, name: str) -> None:
        if name in self.req_ids:
            self.req_ids.remove(name)

    def add_request(self, request: Any) -> None:
        self.req_ids.append(request.req_id)

    def condense(self) -> None:
        pass

    def refresh_metadata(self) -> None:
        """Rows moved: their lengths are those of the requests."""
        for row, name in enumerate(self.req_ids):
            self.num_tokens_no_spec[row] = self.lengths[name]

    lengths: dict[str, int]


def plugin(base: Path, nxdi: Path, source: Path, built: BuildSpec, device: Device) -> Any:
    """The plugin's runner with the bundle loaded by the plugin's own loader, method `eagle`."""
    sys.meta_path.insert(0, Absent(*SDK))
    sys.path[:0] = [str(nxdi / "src"), str(source)]
    sys.modules["torch_neuronx.utils"] = Names(get_platform_target=lambda: "trn2")  # type: ignore[assignment]
    wrapper: Any = importlib.import_module("neuronx_distributed_inference.models.model_wrapper").ModelWrapper
    wrapper.is_neuron = lambda self: True
    base_class: Any = importlib.import_module("neuronx_distributed_inference.models.application_base")
    base_class.NeuronApplicationBase.compile = lambda *_: sys.exit("the plugin compiles")
    # older transformers' names
    generation: Any = importlib.import_module("transformers.generation")
    generation.SampleDecoderOnlyOutput = generation.GenerateDecoderOnlyOutput
    # the table of all models imports each of them
    qwen3: Any = importlib.import_module("neuronx_distributed_inference.models.qwen3.modeling_qwen3")
    table: Any = ModuleType("neuronx_distributed_inference.utils.constants")
    table.MODEL_TYPES = {"qwen3": {"causal-lm": qwen3.NeuronQwen3ForCausalLM}}
    sys.modules[table.__name__] = table
    loader: Any = importlib.import_module("vllm_neuron.worker.neuronx_distributed_model_loader")
    runner: Any = importlib.import_module("vllm_neuron.worker.neuronx_distributed_model_runner")
    read = loader.load_pretrained_config
    # where older transformers has it
    loader.load_pretrained_config = lambda path: lambda it: (setattr(it, "rope_theta", 1e6), read(path)(it))
    loader.SamplerOutput = runner.ModelRunnerOutput = runner.CachedRequestState = Names
    runner.MultiModalKwargs = Names(as_kwargs=lambda *_, **__: {})
    runner.make_tensor_with_pad = _padded
    torch.jit.load = lambda *_: device
    served = Served(built.target, built.draft, built.tp, built.batch, built.max_len, built.k)
    asked = arguments_of_v1(engine_arguments(served))
    os.environ["NEURON_COMPILED_ARTIFACTS"] = built.out
    hf = Names(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2, head_dim=8)
    hf.get_text_config = lambda: Names(vocab_size=64)
    length = asked["max_model_len"]
    speculative = asked["speculative_config"]
    vllm = Names(
        model_config=Names(
            hf_config=hf, model=asked["model"], dtype=torch.float32, max_model_len=length, get_vocab_size=lambda: 64
        ),
        cache_config=Names(block_size=length, num_gpu_blocks_override=None, enable_prefix_caching=False),
        parallel_config=Names(tensor_parallel_size=asked["tensor_parallel_size"]),
        scheduler_config=Names(
            max_num_seqs=asked["max_num_seqs"], max_model_len=length, max_num_batched_tokens=131072,
            chunked_prefill_enabled=False,
        ),
        speculative_config=Names(
            method="eagle", num_speculative_tokens=speculative["num_speculative_tokens"],
            draft_model_config=Names(model=speculative["model"]),
        ),
        additional_config=asked["additional_config"],
        lora_config=None, load_config=None, observability_config=None, device_config=None,
    )  # fmt: skip
    worker = runner.NeuronxDistributedModelRunner(vllm, torch.device("cpu"))
    worker.input_batch = Batch(built.batch, length)
    worker.load_model()
    return worker


def _padded(rows: list[list[int]], pad: int, max_len: int, dtype: Any, device: Any) -> torch.Tensor:
    return torch.tensor([[*row, *[pad] * (max_len - len(row))] for row in rows], dtype=dtype, device=device)


def serve(worker: Any, asked: dict[str, tuple[tuple[int, ...], Names, int]]) -> dict[str, list[int]]:
    """Requests through the runner, scheduled as the plugin's scheduler does: a prompt alone, then all of them."""
    waiting, running, ids, finished = list(asked), list[str](), {name: list[int]() for name in asked}, list[str]()
    worker.input_batch.lengths = {name: len(asked[name][0]) for name in asked}
    while waiting or running:
        prompt = waiting.pop(0) if waiting and len(running) < worker.max_num_reqs else ""
        scheduled = [prompt] if prompt else list(running)
        if prompt:
            running.append(prompt)
        new = [
            Names(
                req_id=prompt, prompt_token_ids=list(asked[prompt][0]), mm_features=[], pooling_params=None,
                sampling_params=asked[prompt][1], block_ids=([0],), num_computed_tokens=0, lora_request=None,
            )
        ] if prompt else []  # fmt: skip
        old = [] if prompt else scheduled
        cached = Names(
            req_ids=old, num_computed_tokens=[0] * len(old), new_block_ids=[None] * len(old),
            resumed_from_preemption=[False] * len(old),
        )  # fmt: skip
        output = worker.execute_model(
            Names(
                finished_req_ids=finished, scheduled_new_reqs=new, scheduled_cached_reqs=cached,
                num_scheduled_tokens=dict.fromkeys(scheduled, 1), total_num_scheduled_tokens=len(scheduled),
                scheduled_spec_decode_tokens={}, free_encoder_mm_hashes=[],
            )
        )  # fmt: skip
        finished = []
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            ids[name] += tokens
            worker.input_batch.lengths[name] += len(tokens)
            if len(ids[name]) >= asked[name][2]:
                del ids[name][asked[name][2] :]
                running.remove(name)
                finished.append(name)
    worker.execute_model(
        Names(
            finished_req_ids=finished, scheduled_new_reqs=[], free_encoder_mm_hashes=[], num_scheduled_tokens={},
            scheduled_cached_reqs=Names(req_ids=[]), total_num_scheduled_tokens=0,
        )
    )  # fmt: skip
    return ids


def alone(base: Path, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """The target's own greedy tokens."""
    built = spec(base, k=0)
    plan = make_plan(built.bundle)
    eager = EagerRanks(plan, nxdi_tags(plan), [shard_of(plan, built.checkpoints, 0)])
    graphs = [g for tag in nxdi_tags(plan) for g in nxdi_graphs(plan, tag)]
    sequences = [Sequence(prompt, NEW_TOKENS) for prompt in prompts]

    def run(graph: Any, inputs: Any) -> list[Any]:
        return [r.numpy() for r in eager(nxdi_tag(graph.key, plan.spec), [torch.from_numpy(x) for x in inputs])]

    host = Host(graphs, run, 0, 128)
    host.serve(sequences, 2)
    return [s.ids for s in sequences]


def main(base: Path, nxdi: Path, source: Path) -> None:
    """Write the bundle, load and drive it by the plugin, print the outcome."""
    built = spec(base, "served", k=3)
    plan, folder = make_plan(built.bundle), Path(built.out)
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    save_file(shard_of(plan, built.checkpoints, 0), folder / shard_file(0))
    (folder / "neuron_config.json").write_text(config.render(built.bundle), encoding="utf-8")
    (folder / "model.pt").touch()
    device = Device(built)
    worker = plugin(base, nxdi, source, built, device)
    greedy = Names(top_k=-1, top_p=1.0, temperature=0.0)
    hot = Names(top_k=-1, top_p=1.0, temperature=0.7)
    ids = serve(worker, {str(i): (p, greedy, NEW_TOKENS) for i, p in enumerate(PROMPTS)})
    facts: dict[str, Any] = {"greedy": list(ids.values()), "alone": alone(base, PROMPTS)}
    steps = [call for call in device.calls if call[0] != "context_encoding_model"]
    facts["steps"] = len(steps)
    # the device check's own step, over the same source
    facts["application"] = nxdi_tokens(folder, PROMPTS[1])
    device.calls.clear()
    serve(worker, {"first": (PROMPTS[0], greedy, 4), "second": (PROMPTS[1], hot, 4)})
    facts["prompts_drawn_with"] = [p for tag, p in device.calls if tag == "context_encoding_model"]
    device.calls.clear()
    serve(worker, {"alone": (PROMPTS[1], hot, 4)})
    facts["no_filter_is_asked_as"] = device.calls[0][1]
    try:
        serve(worker, {"long": (tuple(range(1, 60)) * 2, greedy, worker.max_model_len - 118)})
        facts["end"] = ""
    except AssertionError as error:
        facts["end"] = str(error)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
