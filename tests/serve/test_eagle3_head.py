"""Our EAGLE-3 head against vLLM's own module with the same weights: the demo's, and small random ones.

vLLM's module is run as it is but for attention, whose backends need a device: rows see themselves and those before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

from model.cache import Placement, empty_caches
from model.config import load_config
from model.drafters.eagle3 import KIND, Eagle3Config, Eagle3Draft
from model.drafters.registry import load_draft
from model.parallel import ONE_RANK
from model.weights import Packing
from tests.compile.tiny import shard_of, write_model
from tests.model.heads import write_head
from trnspec.bundle.checkpoint import Checkpoint

vllm = pytest.importorskip("vllm", reason="vLLM is in the serve environment alone")
ROWS, DRAFTS, LENGTH = 9, 3, 128


class PlainAttention(nn.Module):
    """Causal attention of one sequence, in place of vLLM's."""

    def __init__(self, heads: int, head_dim: int, scale: float, num_kv_heads: int, **_: Any) -> None:
        super().__init__()
        self.head_dim, self.scale, self.group = head_dim, scale, heads // num_kv_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.group, 0) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(0, 1).flatten(1)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A tensor-parallel group of one rank, which vLLM's layers ask for."""
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.distributed import (  # noqa: PLC0415
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with set_current_vllm_config(_config(LlamaConfig())):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def _config(head: LlamaConfig) -> Any:
    """vLLM's configuration, as far as a head's module reads it."""
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig  # noqa: PLC0415

    config = VllmConfig(device_config=DeviceConfig(device="cpu"), compilation_config=CompilationConfig(mode=0))
    config.speculative_config = SimpleNamespace(  # type: ignore[assignment]
        draft_model_config=SimpleNamespace(hf_config=head, dtype=torch.float32), parallel_drafting=False
    )
    config.model_config = SimpleNamespace(  # type: ignore[assignment]
        dtype=torch.float32, hf_config=head, is_moe=False, max_model_len=LENGTH, head_dtype=torch.float32,
        get_total_num_hidden_layers=lambda: 8, get_vocab_size=lambda: head.vocab_size,
    )  # fmt: skip
    return config


def _theirs(folder: Path) -> Any:
    """vLLM's module with a folder's weights."""
    import vllm.model_executor.models.llama_eagle3 as eagle3  # noqa: PLC0415
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.model_executor.custom_op import CustomOp  # noqa: PLC0415
    from vllm.model_executor.models import llama  # noqa: PLC0415
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig  # noqa: PLC0415

    raw = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" in raw:
        raw = SpeculatorsConfig.extract_transformers_pre_trained_config(raw)
    config = _config(LlamaConfig(**raw))
    with (
        set_current_vllm_config(config),
        mock.patch.object(llama, "Attention", PlainAttention),
        mock.patch.object(eagle3, "get_draft_quant_config", return_value=None),
    ):
        module = eagle3.Eagle3LlamaForCausalLM(vllm_config=config)
        for part in module.modules():
            if isinstance(part, CustomOp):
                part._forward_method = part.forward_native
        module.load_weights(load_file(folder / "model.safetensors").items())
        return module.eval()


def _ours(folder: Path, target: Path) -> Eagle3Draft:
    config = load_draft(KIND, str(folder), load_config(str(target)))
    assert isinstance(config, Eagle3Config)
    draft = Eagle3Draft(config)
    draft.load_state_dict(shard_of(Checkpoint(folder, config), 0, 1, torch.float32, Packing()))
    return draft.eval()


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Folders of heads and of their targets."""
    folder = tmp_path_factory.mktemp("heads")
    target = write_model(folder / "target", 1, num_hidden_layers=8)
    normed = write_head(folder / "normed", target)
    plain = write_head(folder / "plain", target, adds_normed=False)
    demo = Path("demo")
    return {"normed": (normed, target), "plain": (plain, target), "demo": (demo / "draft_eagle3", demo / "target")}


@pytest.mark.parametrize("name", ["normed", "plain", "demo"])
@torch.no_grad()
def test_logits_are_those_of_vllms_module(group: None, heads: dict[str, tuple[Path, Path]], name: str) -> None:
    """Of rows with the target's states, then of rows that chain; ids that the draft lacks are impossible there."""
    folder, target = heads[name]
    theirs, ours = _theirs(folder), _ours(folder, target)
    ids = torch.randint(64, (ROWS + DRAFTS,), generator=torch.Generator().manual_seed(1))
    states = torch.randn(ROWS, ours.fc.weight.shape[1], generator=torch.Generator().manual_seed(2))
    caches = empty_caches(ours.config, ONE_RANK, 1, LENGTH, torch.float32)
    x_SE, x_1NE = theirs.combine_hidden_states(states), ours.feature(states[None])
    keys, rows = torch.arange(LENGTH, dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32)[None]
    for n in range(DRAFTS + 1):
        out, chained = theirs(ids[: ROWS + n], torch.arange(ROWS + n), x_SE)
        x_1NE, caches = ours.hidden(ids[None, rows[0]], x_1NE, caches, Placement(rows, keys))
        expected, logits = theirs.compute_logits(out)[rows[0]], ours.logits(x_1NE)[0]
        own = torch.isfinite(expected[0]).nonzero()[:, 0]
        assert torch.equal(own, ours.target_ids_D)
        assert torch.allclose(logits, expected[:, own], atol=1e-4, rtol=0)
        # a chained row's feature is the last one's output; the others keep theirs
        x_SE, x_1NE = torch.cat((x_SE, chained[-1:])), x_1NE[:, -1:]
        rows = rows[:, -1:] + 1
