"""`python -m compile.serve_command DIR`: the command and environment with which vLLM loads this bundle on Trainium.

By default our own plugin runs the bundle's graphs through the SDK's plugin for PJRT: it needs neither NEFFs nor
model.pt. With `--engine nrt` it runs the bundle's NEFFs on nrtpy, with their NKI kernels. The other engines are those
of NxDI, which has no support on trn2 from SDK 2.34 on: flags and variables of its loaders in vLLM's V0 engine and, for
a target alone, in its V1 engine. They compare nothing that they load with their flags, and recompile for hours when
they find no artifact: such faults are refused here. These engines run one k: of a bundle with several, the largest.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError, run_cli
from model.nki.launches import LNC
from model.weights import shard_file
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.bundle.shards import shard_header

MODEL, CONFIG = "model.pt", "neuron_config.json"
_NOT = "cannot be loaded on Trainium"
# why an engine cannot load a pair's bundle; empty where it can
ENGINES = {
    "plugin": "",
    "nrt": "",
    "v0": "",
    "v1": "it refuses the method draft_model, and under the method eagle a request at its longest ends the engine",
}
# switches of NxDI that change the layout of the weights or the caches
_LAYOUT_SWITCHES = (
    "fused_qkv", "qkv_kernel_enabled", "qkv_nki_kernel_enabled", "attn_block_tkg_nki_kernel_enabled",
    "attn_block_tkg_nki_kernel_cache_update", "mlp_kernel_enabled", "quantized_mlp_kernel_enabled",
    "out_proj_kernel_enabled", "quantized", "kv_cache_quant", "k_cache_transposed", "flash_decoding_enabled",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A server: folders of the checkpoints on its machine, sizes; k drafts a step, 0 without speculation."""

    target: str
    draft: str
    tp: int
    batch: int
    max_len: int
    k: int


def speculation_length(k: int) -> int:
    """NxDI's word for k drafts a step: the rows that the target verifies; 0 without speculation."""
    rows = k + 1
    return rows if k else 0


def engine_arguments(served: Served) -> dict[str, Any]:
    """The engine's arguments by their names in Python; the flags have hyphens.

    num_speculative_tokens becomes NxDI's speculation_length as it is, and that counts the verified
    rows, one more than the draft tokens. NxDI's host raises, which ends the engine, for a sequence whose
    next step would write past the cache: the longest sequence is shorter than the cache by the drafts.
    """
    longest = served.max_len - served.k
    asked: dict[str, Any] = {
        "model": served.target, "tensor_parallel_size": served.tp, "max_num_seqs": served.batch,
        "max_model_len": longest, "override_neuron_config": {"save_sharded_checkpoint": True},
    }  # fmt: skip
    if served.k:
        asked["override_neuron_config"] |= {"enable_fused_speculation": True}
        asked["speculative_config"] = {
            "model": served.draft, "num_speculative_tokens": speculation_length(served.k), "max_model_len": longest,
        }  # fmt: skip
    return asked


def arguments_of_v1(asked: dict[str, Any]) -> dict[str, Any]:
    """The same for the V1 engine, whose plugin takes its own settings in one object."""
    named = {name: value for name, value in asked.items() if name != "override_neuron_config"}
    return named | {"additional_config": {"override_neuron_config": asked["override_neuron_config"]}}


def engine_environment(artifacts: str, lnc: int, v1: bool = False) -> dict[str, str]:
    """The engine and its artifacts, named rather than left to the image; nothing is fetched from a hub."""
    return {
        "VLLM_USE_V1": str(int(v1)),
        "VLLM_NEURON_FRAMEWORK": "neuronx-distributed-inference",
        "NEURON_COMPILED_ARTIFACTS": artifacts,
        "NEURON_LOGICAL_NC_CONFIG": str(lnc),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def engine_command(asked: dict[str, Any], name: str, port: int) -> list[str]:
    """The server's process; `name` is the model's name for clients."""
    named = dict(asked)
    flags = ["vllm", "serve", named.pop("model"), "--served-model-name", name, "--port", str(port)]
    for key, value in named.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += ["--" + key.replace("_", "-"), text]
    return flags


def neuron_fields(tp: int, batch: int, max_len: int, k: int, lnc: int) -> dict[str, Any]:
    """The fields of NxDI's neuron_config that follow from a server's sizes; NxDI counts the verified rows."""
    return {
        "tp_degree": tp, "batch_size": batch, "max_batch_size": batch, "seq_len": max_len, "max_length": max_len,
        "logical_nc_config": lnc, "save_sharded_checkpoint": True, "enable_fused_speculation": k > 0,
        "speculation_length": speculation_length(k),
    }  # fmt: skip


def plugin_command(bundle: Bundle, port: int, platform: str) -> tuple[dict[str, str], list[str]]:
    """Environment and process of our plugin's server; a second plugin for Neuron in one environment stays out."""
    environment = {"VLLM_PLUGINS": "trnspec", "NEURON_LOGICAL_NC_CONFIG": str(LNC), "HF_HUB_OFFLINE": "1"}
    options = json.dumps({"platform": platform})
    return environment, [
        "vllm",
        "serve",
        str(bundle.path.resolve()),
        "--port",
        str(port),
        "--additional-config",
        options,
    ]


def routes(bundle: Bundle) -> dict[str, str]:
    """Each way to run a whole bundle on Trainium, the shortest first, and why this one cannot; empty where it can."""
    found = {}
    for engine in ENGINES:
        try:
            check_loadable(bundle, engine)
            found[engine] = ""
        except UserError as error:
            found[engine] = str(error).removeprefix(f"{bundle.path} {_NOT}: ")
    return found


def _refused(bundle: Bundle, why: str) -> UserError:
    return UserError(f"{bundle.path} {_NOT}: {why}")


def check_loadable(bundle: Bundle, engine: str) -> int:
    """The bundle's cores per logical core; UserError says in one sentence why no engine on Trainium can load it."""
    spec, compiler = bundle.spec, bundle.manifest.compiler
    if why := bundle.manifest.without_kernels:
        raise _refused(bundle, why)
    if engine == "plugin":
        if spec.kernels != "reference":
            raise _refused(bundle, "PJRT runs no NKI kernels; build it with --kernels reference, or run its NEFFs")
        _check_files(bundle)
        return LNC
    if engine == "nrt":
        if compiler.neff != "neff":
            why = f"it holds no NEFF of each graph (neff: {compiler.neff})"
            raise _refused(bundle, f"{why}; run python -m compile.neuron {bundle.path} where neuronx-cc is")
        _check_files(bundle)
        return LNC
    if ENGINES[engine] and spec.k:
        raise UserError(f"the {engine} engine cannot load a bundle with a draft model: {ENGINES[engine]}; use v0")
    if spec.host_drafts:
        raise _refused(bundle, "its drafts come from the host, and NxDI's loader has none; build it with a draft model")
    if spec.k and spec.drafter != "chain":
        raise _refused(
            bundle,
            f"its drafter is {spec.drafter}, and NxDI's loaders bring plain chains alone; build it with a plain draft "
            "and --drafter chain, or serve it with this package's own plugin",
        )
    if compiler.neff == "none":
        raise _refused(
            bundle,
            f"it was built without the Neuron SDK (neff: none) and has no {MODEL}; run the same compile.build "
            "on a machine with the SDK",
        )
    if compiler.neff != MODEL:
        raise _refused(
            bundle,
            f"it was compiled by neuronx-cc alone and has no {MODEL}, which is all that the engine loads; run the same "
            "compile.build on a machine with the whole SDK",
        )
    _check_files(bundle)
    return _check_config(bundle)


def _check_files(bundle: Bundle) -> None:
    if not bundle.manifest.has_weights:
        raise _refused(bundle, "it has no weights; build it from checkpoint folders that hold them")
    for name, entry in bundle.files.items():
        file = bundle.path / name
        if not file.is_file() or file.stat().st_size != entry.bytes:
            raise _refused(bundle, f"{name} is missing or cut short; pull or build it again")
    for rank in range(bundle.spec.tp):
        header = shard_header(bundle.plan, rank)
        with (bundle.path / shard_file(rank)).open("rb") as shard:
            if shard.read(len(header)) != header:
                raise _refused(bundle, f"{shard_file(rank)} was cut for another model, rank or layout; build it again")


def _check_config(bundle: Bundle) -> int:
    file, spec = bundle.path / CONFIG, bundle.spec
    try:
        written = json.loads(bundle.read(CONFIG))
        found, fused = written["neuron_config"], written.get("fused_spec_config") or {}
        drafts = fused["draft_config"]["neuron_config"] if fused else {}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}); build the bundle again") from error
    if bool(fused) != bool(spec.k):
        of = "no draft" if spec.k else "a draft"
        raise _refused(bundle, f"{CONFIG} has {of} and its k is {spec.k}; build it again")
    lnc = bundle.manifest.compiler.lnc
    _compare(bundle, found, spec.k, lnc)
    if fused:
        _compare(bundle, drafts, 0, lnc, " for the draft")
    return lnc


def _compare(bundle: Bundle, found: dict[str, Any], k: int, lnc: int, whose: str = "") -> None:
    sizes = neuron_fields(bundle.spec.tp, bundle.spec.batch, bundle.spec.max_len, k, lnc)
    for name, value in (sizes | dict.fromkeys(_LAYOUT_SWITCHES, False)).items():
        # a file that lacks a switch has it off
        if found.get(name, False) != value:
            raise _refused(
                bundle,
                f"{CONFIG} has {name} {found.get(name)!r}{whose} and the bundle was built for {value!r}; "
                "build it again",
            )


def main(arguments: list[str]) -> None:
    """Print the command, or a JSON object with environment and command."""
    parser = argparse.ArgumentParser(prog="python -m compile.serve_command", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle, on the server's machine")
    parser.add_argument("--target", help="folder of the target's checkpoint (default: /models/ and its name)")
    parser.add_argument("--draft", help="folder of the draft's checkpoint (default: /models/ and its name)")
    parser.add_argument("--engine", choices=ENGINES, default="plugin", help="whose engine (default: our plugin's)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    lnc, spec = check_loadable(bundle, options.engine), bundle.spec
    if platform := {"plugin": "neuron", "nrt": "nrt"}.get(options.engine):
        _say(*plugin_command(bundle, options.port, platform), options.json)
        return
    if len(spec.ks) > 1:
        listed = ", ".join(map(str, (0, *spec.ks)))
        print(f"{MODEL} drafts {spec.k}: NxDI takes one k of this bundle's {listed}", file=sys.stderr)
    names = spec.target, spec.draft
    target, draft = (f"/models/{Path(name).name}" for name in names)
    sizes = (spec.tp, spec.batch, spec.max_len, spec.k)
    served = Served(options.target or target, options.draft or draft, *sizes)
    v1 = options.engine == "v1"
    environment = engine_environment(str(bundle.path.resolve()), lnc, v1)
    asked = engine_arguments(served)
    command = engine_command(arguments_of_v1(asked) if v1 else asked, names[0], options.port)
    _say(environment, command, options.json)


def _say(environment: dict[str, str], command: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"environment": environment, "command": command}, indent=1))
    else:
        print(" \\\n".join([*(f"{k}={shlex.quote(v)}" for k, v in environment.items()), shlex.join(command)]))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
