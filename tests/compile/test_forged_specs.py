"""Specs of forged manifests whose models do not fit: `parse_manifest` checks a spec as a build checks its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.errors import UserError
from model.strict import Wrong
from tests.compile.tiny import spec, write_model
from tests.model.heads import write_head
from trnspec.bundle.spec import spec_from_json


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    base = tmp_path_factory.mktemp("forged")
    write_model(base / "target", 1)
    write_model(base / "draft", 2, num_hidden_layers=1)
    write_head(base / "eagle3", base / "target", taps=(0, 1))
    drafts: dict[str, Path] = {name: base / name for name in ("draft", "eagle3")}
    return {name: spec(base, draft=str(path)).bundle.as_json() for name, path in drafts.items()}


FORGED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a tap behind the last layer": ("eagle3", {}, {"taps": [0, 2]}, "reads the inputs of the layers 0, 2"),
    "a tap of no layer": ("eagle3", {}, {"taps": [0, -1]}, r"taps\[1\] is -1"),
    "states of a different width": ("eagle3", {}, {"target_hidden_size": 64}, "reads states of 64 numbers"),
    "more drafted ids than ids": ("eagle3", {}, {"draft_vocab_size": 65}, "has more ids than the target"),
    "a length that no bucket reaches": ("draft", {"max_len": 200}, {}, "max-len 200 cannot be reached by buckets"),
    "a length beyond the positions": ("draft", {"max_len": 1024}, {}, "max-len 1024 is beyond the models' 512"),
    "a different vocabulary": ("draft", {}, {"vocab_size": 96}, "vocabularies of 64 and 96 tokens"),
    "ranks that are no power of two": ("draft", {"tp": 3}, {}, "tp is 3"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_spec_that_does_not_fit_is_refused(specs: dict[str, dict[str, Any]], forged: str) -> None:
    name, changes, of_draft, why = FORGED[forged]
    spec_from_json(specs[name]).check()
    of_bundle = specs[name] | changes | {"draft_config": specs[name]["draft_config"] | of_draft}
    with pytest.raises((UserError, Wrong), match=why):
        spec_from_json(of_bundle).check()
