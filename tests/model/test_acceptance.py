"""A drafter with the target's distribution has all drafts accepted, at each index in a step and each temperature.

Its drafts are rejected if it samples with the noise of a different position or id, filters differently, or has lost a
prompt's state. Emitted ids do not show such errors: they are the target's, whatever the drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from model.config import Qwen3Config
from model.drafter import Drafter
from model.drafters.chain import Chain
from model.drafters.dflash import DFlash, DFlashConfig, DFlashModel
from model.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Model
from model.drafters.parallel import MaskedConfig, Parallel
from model.qwen3 import Qwen3
from model.speculative import Pair
from nki_kernels.limits import SPARE_PAGES
from tests.eager_graphs import EagerGraphs
from trnspec.engine.config import EngineConfig
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result

V, D, SIZE, K, BATCH, LENGTH = 64, 40, 32, 3, 2, 128
SIZES: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": 48, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 32, "vocab_size": V}  # fmt: skip
CONFIG = Qwen3Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=False)
Model = TypeVar("Model", bound=Qwen3)
PARAMS = [Params(), Params(0.7, seed=5), Params(1.3, seed=6), Params(1.2, min_p=0.25, seed=7)]


def _random(module: nn.Module, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dtype == torch.float32:
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data = noise + (parameter.ndim == 1)


def _law() -> tuple[Tensor, Tensor, Tensor]:
    """A hidden row, the logits (V,) after every prefix, and the D ids with a nonzero probability."""
    generator = torch.Generator().manual_seed(1)
    row_E, logits_V = torch.randn(SIZE, generator=generator), 1.5 * torch.randn(V, generator=generator)
    ids_D = torch.randperm(V, generator=generator)[:D].sort().values
    chance_V = torch.zeros(V, dtype=torch.bool)
    chance_V[ids_D] = True
    return row_E, torch.where(chance_V, logits_V, -60.0), ids_D


def _head(row_E: Tensor, logits: Tensor) -> Tensor:
    """The LM head weight that maps the normed row to these logits."""
    normed_E = row_E / row_E.square().mean().sqrt()
    return logits[:, None] * normed_E / normed_E.square().sum()


def _of_one_law(model: Model) -> Model:
    """Gives all ids the same embedding and makes the layers add 0, so that the logits do not depend on the prefix."""
    row_E, logits_V, _ = _law()
    _random(model, 2, 0.1)
    model.embed_tokens.weight.data[:] = row_E
    model.lm_head.weight.data = _head(row_E, logits_V)
    for layer in model.layers:
        layer.self_attn.o_proj.weight.data.zero_()  # type: ignore[union-attr, operator]
        layer.mlp.down_proj.weight.data.zero_()  # type: ignore[union-attr, operator]
    model.norm.weight.data[:] = 1
    return model


def _eagle3() -> Eagle3:
    """A head with a draft vocabulary of D ids; its feature is the target's embedding."""
    row_E, logits_V, ids_D = _law()
    facts: dict[str, Any] = {"draft_vocab_size": D, "target_hidden_size": SIZE, "taps": (0,)}
    model = Eagle3Model(Eagle3Config(**SIZES, **facts, norm_before_residual=False))
    _random(model, 3, 0.1)
    model.fc.weight.data = torch.eye(SIZE)
    model.layers[0].self_attn.o_proj.weight.data.zero_()  # type: ignore[union-attr, operator]
    model.layers[0].mlp.down_proj.weight.data.zero_()  # type: ignore[union-attr, operator]
    model.norm.weight.data[:] = 1
    model.lm_head.weight.data = _head(row_E, logits_V[ids_D])
    model.d2t.data = (ids_D - torch.arange(D)).int()
    return Eagle3(model)


def _block(shifted: bool, rank: int = 0) -> DFlash:
    """A block of K + 1 rows with the target's distribution."""
    facts: dict[str, Any] = {"block_size": K + 1, "mask_id": 9, "taps": (0, 2), "causal": False}
    config = DFlashConfig(**vars(CONFIG), **facts, shifted=shifted, markov_rank=rank)
    model = _of_one_law(DFlashModel(config))
    if rank:
        model.markov_w2.data.zero_()
    return DFlash(model)


Made = tuple[Qwen3, Drafter, tuple[Tensor, ...]]


def _chain() -> Made:
    """The target drafts for itself: drafts depend on the full prefix, so on all rows of its cache."""
    target = Qwen3(CONFIG)
    _random(target, 4, 0.5)
    return target, Chain(copy.deepcopy(target)), (torch.zeros(BATCH, 1, 1, dtype=torch.int32),)


DRAFTERS: dict[str, Callable[[], Made]] = {
    "chain": _chain,
    "parallel": lambda: (
        _of_one_law(Qwen3(CONFIG)),
        Parallel(_of_one_law(Qwen3(MaskedConfig(**vars(CONFIG), mask_id=9)))),
        (torch.zeros(BATCH, K, 1, dtype=torch.int32),),
    ),
    "eagle3": lambda: (_of_one_law(Qwen3(CONFIG)), _eagle3(), (torch.zeros(BATCH, 1, SIZE),)),
    "dflash": lambda: (_of_one_law(Qwen3(CONFIG)), _block(False), ()),
    "dspark": lambda: (_of_one_law(Qwen3(CONFIG)), _block(True, 4), ()),
}


def _engine(drafter: str) -> Engine:
    target, drafting, slots = DRAFTERS[drafter]()
    runner = EagerGraphs(Pair(target, drafting), slots, 1 + BATCH + SPARE_PAGES, BATCH)
    return Engine(runner, EngineConfig((K,), BATCH, LENGTH, (LENGTH,), V, 1 + BATCH, ((LENGTH, LENGTH),)))


def _counts(results: list[Result]) -> tuple[list[int], list[int]]:
    """The numbers of drafted and of accepted tokens by index in the step."""
    drafted, accepted = (
        [sum(tally) for tally in zip(*tallies, strict=True)]
        for tallies in ([r.drafted for r in results], [r.accepted for r in results])
    )
    return drafted, accepted


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "T 0.7", "T 1.3", "min-p"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_that_knows_the_law_has_every_draft_accepted(drafter: str, params: Params) -> None:
    """After prompts of one id and of several; one request more than slots."""
    engine = _engine(drafter)
    prompts = [(3,), (7, 1, 30, 4, 4, 8, 11), (2, 5)]
    requests = [Request(p, replace(params, seed=params.seed + n), 21) for n, p in enumerate(prompts)]
    drafted, accepted = _counts(engine.run(requests))
    assert accepted == drafted
    # the prefill emits one token, then five steps emit four each
    assert drafted == [15, 15, 15]


def test_what_is_accepted_depends_on_the_noise() -> None:
    """Negative control: drafts of the same distribution, sampled with other noise, are rarely accepted."""
    engine = _engine("parallel")
    propose = engine.runner.pair.drafter.propose  # type: ignore[attr-defined]

    def of_others(rows: object, ids: object, params: object, noise_BNV: Tensor, state: object) -> object:
        return propose(rows, ids, params, noise_BNV.flip(2), state)

    engine.runner.pair.drafter.propose = of_others  # type: ignore[attr-defined]
    drafted, accepted = _counts(engine.run([Request((3,), Params(1.3, seed=1), 21)]))
    assert sum(accepted) < sum(drafted) / 2


def test_k_limits_are_per_request() -> None:
    """Requests with and without a limit share steps; the third one reuses the first one's slot."""
    engine = _engine("chain")
    requests = [Request((n, 1), Params(1.0, seed=n), 8 * n, k_limit=1 if n == 2 else None) for n in (1, 2, 3)]
    accepted: dict[int, set[int]] = {}
    numbers = [engine.add(request) for request in requests]
    while engine.busy:
        for event in engine.step():
            if event.drafted:
                accepted.setdefault(event.number, set()).add(event.accepted)
    assert [accepted[number] for number in numbers] == [{K}, {1}, {K}]
