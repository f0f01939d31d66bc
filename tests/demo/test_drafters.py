"""The drafters of the demo: training shows what inference shows, and checkpoints are of their public formats."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, Qwen3ForCausalLM

from demo.drafter import TargetPass, target_pass
from demo.models import load
from demo.parallel import Layout, Parallel, conditional_drop, layout_logits, layout_of

DEMO = Path("demo")
TEXT = "Count from 1 to 100: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18"


@pytest.fixture(scope="module")
def target() -> tuple[Qwen3ForCausalLM, Tokenizer]:
    return load(DEMO / "target")


@pytest.fixture(scope="module")
def seen(target: tuple[Qwen3ForCausalLM, Tokenizer]) -> TargetPass:
    model, tokenizer = target
    return target_pass(model, torch.tensor([tokenizer.encode(TEXT).ids]))


@pytest.fixture(scope="module")
def parallel() -> Parallel:
    return Parallel(*load(DEMO / "draft_parallel"))


@torch.no_grad()
def one_pass_drafts(model: Qwen3ForCausalLM, kept_ids: list[int], k: int) -> torch.Tensor:
    """Logits (k, V) of the k drafts as inference makes them: a plain causal pass, no mask of our own."""
    masked = [model.config.pard_token] * (k - 1)
    return model(torch.tensor([kept_ids + masked]), use_cache=False).logits[0, -k:]


class SeesTooMuch(Layout):
    """The fault: mask rows see the token after their anchor."""

    def mask_RR(self) -> torch.Tensor:
        return super().mask_RR() | ((self.offset_R == 0) & (self.anchor_R <= self.anchor_R[:, None] + 1))


@pytest.mark.parametrize(("kind", "same"), [(Layout, True), (SeesTooMuch, False)], ids=["shown", "fault"])
def test_training_shows_a_mask_row_what_inference_shows_it(
    parallel: Parallel, seen: TargetPass, kind: type[Layout], same: bool
) -> None:
    length, k = seen.ids_BS.shape[1], 6
    layout = layout_of(length, conditional_drop(length, k, torch.Generator().manual_seed(1)))
    layout = kind(layout.anchor_R, layout.offset_R)
    with torch.no_grad():
        logits_RV = layout_logits(parallel.model, seen.ids_BS, layout, parallel.pard_token)[0]
    ids, equal = seen.ids_BS[0].tolist(), []
    for row in (layout.offset_R > 0).nonzero().flatten().tolist():
        anchor, offset = int(layout.anchor_R[row]), int(layout.offset_R[row])
        drafts_KV = one_pass_drafts(parallel.model, ids[: anchor + 1], k)
        equal.append(torch.allclose(logits_RV[row], drafts_KV[offset], atol=1e-4))
    assert len(equal) > length
    assert all(equal) is same


def test_all_anchors_at_once_are_the_drafts_of_inference(parallel: Parallel, seen: TargetPass) -> None:
    anchors_A = torch.tensor([3, 17, 40])
    logits_AKV = parallel.draft_logits(seen, anchors_A, 16)
    for anchor, logits_KV in zip(anchors_A.tolist(), logits_AKV, strict=True):
        alone = one_pass_drafts(parallel.model, seen.ids_BS[0, : anchor + 1].tolist(), 16)
        torch.testing.assert_close(logits_KV, alone, atol=1e-4, rtol=0)


def test_conditional_drop_keeps_a_mask_row_only_after_the_one_before() -> None:
    dropped = [set(a.tolist()) for a in conditional_drop(64, 16, torch.Generator().manual_seed(0))]
    assert all(later <= earlier for earlier, later in itertools.pairwise(dropped))
    assert all(anchor + i < 64 for i, anchors in enumerate(dropped, 1) for anchor in anchors)
    assert len(dropped[0]) == 44
    assert len(dropped[-1]) < 10


def test_the_parallel_draft_is_a_plain_qwen3_checkpoint_with_a_mask_token(parallel: Parallel) -> None:
    opened: Any = Qwen3ForCausalLM.from_pretrained(DEMO / "draft_parallel", output_loading_info=True)
    model, report = opened
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoConfig.from_pretrained(DEMO / "draft_parallel").model_type == "qwen3"
    chain, weights = (load_file(DEMO / name / "model.safetensors") for name in ("draft", "draft_parallel"))
    assert {n: (w.shape, w.dtype) for n, w in weights.items()} == {n: (w.shape, w.dtype) for n, w in chain.items()}
    assert model.config.pard_token == parallel.pard_token < model.config.vocab_size
    # its bytes are no text
    assert parallel.tokenizer.decode([parallel.pard_token]) == "\N{REPLACEMENT CHARACTER}"
    assert parallel.pard_token not in parallel.tokenizer.encode("\u00ff " + "".join(map(chr, range(0x7FF)))).ids
