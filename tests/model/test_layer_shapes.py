"""Shapes of a layer by arithmetic are those that weights are cut to, for every preset, tp and packing."""

import pytest

from model.bundle.layer_shapes import differences
from model.bundle.weights import local_shapes, names
from model.config import PRESETS
from model.draft_config import DraftConfig, MedusaConfig
from model.nki.backing import backing_of
from model.packing import Packing
from model.parallel import check_tp


def _stored(config: DraftConfig, tp: int, packing: Packing) -> dict[str, list[int]]:
    stored = names("target_model", config, packing, alone=False)
    return {stored[f"target_model.{ours}"]: list(shape) for ours, shape in local_shapes(config, tp, packing).items()}


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("model", PRESETS)
def test_they_are_those_that_weights_are_cut_to(model: str, tp: int) -> None:
    config = PRESETS[model]
    check_tp(config, tp, "target")
    raw = vars(config)
    for packing in {Packing(), backing_of("nki").packing(config, tp)}:
        shapes = _stored(config, tp, packing)
        assert list(differences("chain", shapes, "target_model.", raw, tp)) == []
        for name in [n for n in shapes if ".layers.1." in n]:
            for wrong in ([*shapes[name][:-1], shapes[name][-1] + 1], shapes[name][1:], None):
                edited = {n: s for n, s in (shapes | {name: wrong}).items() if s is not None}
                clause = next(differences("chain", edited, "target_model.", raw, tp), "")
                # without a packed weight the half is taken for one that is not packed
                assert name in clause or ("packed" in name and "_proj.weight has shape None" in clause)


@pytest.mark.parametrize("shared", [True, False])
def test_heads_shapes_are_those_that_weights_are_cut_to(shared: bool) -> None:
    config = MedusaConfig(5120, 151936, 3, 2, shared)
    shapes = _stored(config, 32, Packing())
    assert shapes["target_model.blocks.2.layers.1.weight"] == [160, 5120]
    assert list(differences("medusa", shapes, "target_model.", vars(config), 32)) == []
    for name in shapes:
        for wrong in ([5120, 5120], None):
            edited = {n: s for n, s in (shapes | {name: wrong}).items() if s is not None}
            assert name in next(differences("medusa", edited, "target_model.", vars(config), 32))
