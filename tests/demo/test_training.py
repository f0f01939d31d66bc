"""The committed text gives the committed tokenizer; two steps of each training give checkpoints that reopen."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from demo.corpus import Prose, load_prose
from demo.learn import Rates, Sampler, top_p_logits
from demo.models import load, save
from demo.tokenizer import save_tokenizer, train_tokenizer
from demo.train import PairPlan, PairRun
from demo.train_drafters import NEW, TRAINED, DrafterPlan, TextPlan, train, write_text

DEMO = Path("demo")


@pytest.fixture(scope="module")
def prose() -> Prose:
    return load_prose()


@pytest.fixture(scope="module")
def target() -> tuple[Qwen3ForCausalLM, Tokenizer]:
    return load(DEMO / "target")


@pytest.fixture(scope="module")
def text_RS(target: tuple[Qwen3ForCausalLM, Tokenizer], prose: Prose) -> torch.Tensor:
    return write_text(*target, prose, TextPlan(batches=3, batch_rows=3, length=48))


def tensors(folder: Path) -> dict[str, object]:
    """Shape and dtype of each weight."""
    return {name: (w.shape, w.dtype) for name, w in load_file(folder / "model.safetensors").items()}


def config(folder: Path) -> dict[str, object]:
    """config.json without the version of transformers that wrote it."""
    read: dict[str, object] = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in read.items() if name != "transformers_version"}


def test_the_committed_text_gives_the_committed_tokenizer(prose: Prose, tmp_path: Path) -> None:
    """Prose and generators are those of the weights: the merges follow from both, byte for byte."""
    assert prose.sha256 == json.loads((DEMO / "run.json").read_text())["pair"]["prose_sha256"]
    save_tokenizer(train_tokenizer(prose, seed=0), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for model in ("target", "draft", "draft_small", "draft_parallel"):
            assert (tmp_path / name).read_bytes() == (DEMO / model / name).read_bytes()


def test_two_steps_of_the_pair(prose: Prose, tmp_path: Path) -> None:
    """Each model learns, is saved as the committed one is, and reopens with its weights."""
    plan = PairPlan(steps=2, draft_steps=1, distil_steps=2, batch=2, length=64, own_batches=2, own_batch_rows=2)
    run = PairRun(plan, prose, Tokenizer.from_file(str(DEMO / "target/tokenizer.json")))
    target = run.target()
    for name, model in {"target": target, **run.drafts(target)}.items():
        save(model, run.tokenizer, tmp_path / name)
        assert config(tmp_path / name) == config(DEMO / name)
        assert tensors(tmp_path / name) == tensors(DEMO / name)
        reopened = load(tmp_path / name)[0].state_dict()
        assert all(torch.equal(reopened[n], w) for n, w in model.state_dict().items())
    points = [(p["model"], p["stage"], p["step"]) for p in run.report()["curve"]]  # type: ignore[attr-defined]
    assert points[:2] == [("target", "corpus", 1), ("target", "corpus", 2)]
    assert points[2:] == [(n, s, k) for s, k in (("corpus", 1), ("distil", 2), ("distil", 3)) for n in
                          ("draft", "draft_small")]  # fmt: skip


@pytest.mark.parametrize("name", list(NEW))
def test_two_steps_of_a_drafter(
    name: str, target: tuple[Qwen3ForCausalLM, Tokenizer], text_RS: torch.Tensor, tmp_path: Path
) -> None:
    assert text_RS.shape == (9, 48)
    drafter = NEW[name](DEMO, target[0], text_RS)
    before = {n: w.detach().clone() for n, w in drafter.named_parameters()}
    plan = DrafterPlan(steps=2, rates=Rates(1e-3, 1e-3), batch=2, every=1)
    folder = tmp_path / f"draft_{name}"
    report = train(drafter, target[0], text_RS, plan, folder)
    assert [point["step"] for point in report["curve"]] == [1, 2]  # type: ignore[attr-defined]
    learned = [not torch.equal(w, before[n]) for n, w in drafter.named_parameters()]
    assert learned == [w.requires_grad for w in drafter.parameters()]
    assert config(folder) == config(DEMO / folder.name)
    assert tensors(folder) == tensors(DEMO / folder.name)
    assert all(weight.isfinite().all() for weight in TRAINED[name](tmp_path, target[0]).parameters())


def test_top_p_keeps_the_least_ids_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert top_p_logits(logits, 0.79).isfinite().tolist() == [[True, True, False, False]]
    assert top_p_logits(logits, 0.81).isfinite().tolist() == [[True, True, True, False]]
    assert torch.equal(top_p_logits(logits, 1.0), logits)


def test_a_sampler_draws_only_what_top_p_keeps() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(64, -1)
    ids = Sampler(torch.Generator().manual_seed(0), temperature=1.0, top_p=0.79)(logits)
    assert set(ids.flatten().tolist()) == {0, 1}
