"""A spec that cannot be built gets one sentence before anything is read or made; beside each, the allowed case."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile.build import checked_plan
from compile.spec import BuildSpec, Recipe, parse
from model.config import load_config
from model.errors import UserError
from model.strict import Wrong
from tests.compile.tiny import spec, write_model, write_pair
from tests.model.heads import write_head
from trnspec.bundle.spec import spec_from_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the tiny pair."""
    write_pair(tmp_path)
    return tmp_path


def _refused(work: Any, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        work()
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"k": "-1"}, "ks[0] is -1"), ({"k": "0", "draft": "Qwen/Qwen3-0.6B"}, "--draft was given"),
     ({"k": "x"}, "not a k"), ({"k": "32"}, "ks[0] is 32"), ({"tp": 3}, "power of two"), ({"tp": 128}, "tp is 128"),
     ({"kernels": "x"}, "reference"), ({"drafter": "x"}, "one of auto"), ({"batch": 10**6}, "4096"),
     ({"recipe": Recipe(compiler_flags={"x": ""})}, "prefill, step"), ({"max_len": 1000}, "use 896 or 1024"),
     ({"max_len": 65536}, "40960"), ({"dtype": "int4"}, "bf16"), ({"target": "Qwen/Nothing"}, "Qwen/Nothing"),
     ({"batch": 0}, "batch"), ({"recipe": Recipe(layers=4)}, "kernels reference has no launches"),
     ({"recipe": Recipe(blocks=8)}, "give at least 9"), ({"out": "s3://bucket/x"}, "give a local folder, and push it"),
     ({"out": "s3:/bucket/x"}, "give a local folder"),
     *(({"recipe": Recipe(chunks=c)}, "chunks") for c in ((32,), (192,), (256, 128), (1 << 14,)))],
    ids=str,
)  # fmt: skip
def test_flags(changes: dict[str, Any], word: str) -> None:
    BuildSpec().check()
    BuildSpec(recipe=Recipe(chunks=(128, 1024), blocks=9)).check()
    _refused(BuildSpec(**changes).check, word)


@pytest.mark.parametrize("ks", [(7, 3), (0, 3), (3, 3), (3, 32)])
def test_a_set_of_k_that_is_none_is_refused(ks: tuple[int, ...]) -> None:
    bundle = BuildSpec().bundle
    replace(bundle, ks=(3, 7)).check()
    with pytest.raises((UserError, Wrong), match=r"the largest last|ks\[\d\] is"):
        spec_from_json(replace(bundle, ks=ks).as_json()).check()


@pytest.mark.parametrize(
    ("changes", "tp", "said"),
    [({"hidden_size": 40}, 16, "hidden_size 40 does not divide by tp 16; choose a smaller tp"),
     ({"intermediate_size": 50}, 4, "intermediate_size 50 does not divide by tp 4"),
     ({"vocab_size": 66}, 4, "vocab_size 66 does not divide by tp 4"),
     ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 kv heads, which tp 2 neither divides nor")],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_for_target_and_draft(
    tmp_path: Path, changes: dict[str, Any], tp: int, said: str
) -> None:
    write_model(tmp_path / "odd", 1, **changes)
    write_model(tmp_path / "even", 1, vocab_size=changes.get("vocab_size", 64))
    for what, pair in (("target", ("odd", "even")), ("draft", ("even", "odd"))):
        target, draft = (str(tmp_path / name) for name in pair)
        BuildSpec(target=target, draft=draft, tp=1, max_len=128).check()
        # a vocabulary is shared: the target is named first
        named = "target" if "vocab_size" in changes else what
        _refused(BuildSpec(target=target, draft=draft, tp=tp, max_len=128).check, f"the {named}", said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [("Qwen/Qwen3-14B --tp 4 --dtype fp32", "rows have 5120 numbers of fp32 on a rank, and a prompt's kernels hold 40"),
     ("Qwen/Qwen3-14B --tp 1 --k 0", "inner rows have 17408 numbers of bf16"),
     ("Qwen/Qwen3-32B --tp 1 --k 0", "rows of heads have 8192 numbers of bf16")],
)  # fmt: skip
def test_rows_that_a_prompt_s_kernels_cannot_hold_are_refused(flags: str, said: str) -> None:
    _refused(parse(["--target", *flags.split(), "--kernels", "nki"]).check, said)
    for allowed in ("Qwen/Qwen3-8B --tp 1", "Qwen/Qwen3-8B --tp 2 --dtype fp32", "Qwen/Qwen3-32B --tp 4"):
        parse(["--target", *allowed.split(), "--draft", "Qwen/Qwen3-0.6B", "--kernels", "nki"]).check()


def test_a_rank_that_cannot_hold_its_part_is_refused_with_the_sum() -> None:
    wanted = parse(["--tp", "4", "--k", "7", "--batch", "16", "--max-len", "32768"])
    _refused(lambda: checked_plan(wanted), "17.4 GB of weights and 49.4 GB of caches, together 66.8 GB", "raise --tp")


def test_a_pair_shares_vocabulary_and_tokenizer(base: Path) -> None:
    spec(base).check()
    write_model(base / "small", 3, vocab_size=32)
    _refused(spec(base, draft=str(base / "small")).check, "vocab")
    file = base / "draft" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("w63", "zzz"), encoding="utf-8")
    _refused(spec(base).check, "tokenizers")
    file.unlink()
    _refused(spec(base).check, "draft has no tokenizer.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "cannot be read"), ('{"model": {"type": "Magic"}}', "cannot be read"), (None, "has the id 63")],
    ids=["cut", "of no kind", "of more ids"],
)
def test_a_tokenizer_that_the_model_cannot_use_is_refused(base: Path, content: str | None, said: str) -> None:
    """Also without a draft; without any a build says so."""
    file, alone = base / "target/tokenizer.json", spec(base, k=0)
    alone.check()
    assert alone.notes() == []
    if content is None:
        write_model(base / "small", 3, vocab_size=32)
        alone = replace(alone, target=str(base / "small"))
    else:
        file.write_text(content, encoding="utf-8")
    _refused(alone.check, said)
    file.unlink()
    lacking = spec(base, k=0)
    lacking.check()
    assert lacking.notes() == [f"{base / 'target'} has no tokenizer.json: this bundle cannot take text"]


def test_weights_come_with_both_folders_or_with_none(base: Path) -> None:
    assert spec(base).checkpoints == {"target": base / "target", "draft": base / "draft"}
    (base / "draft/model.safetensors").unlink()
    _refused(spec(base).check, "target holds weights", "draft holds none")
    (base / "target/model.safetensors").rename(base / "target/model-00001-of-00002.safetensors")
    assert spec(base, k=0).checkpoints, "weights that are not read are no folder without weights"
    (base / "target/model-00001-of-00002.safetensors").unlink()
    spec(base).check()
    assert spec(base).checkpoints == {}
    assert "has no weights" in spec(base).notes()[0]


# what is in a config.json, and what a sentence says of it
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "of another model": ({"model_type": "llama"}, "llama"),
    "of two thetas": ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta 1000000.0 and 10000.0"),
    "of quantized weights": ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights (fp8)"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(base: Path, case: str) -> None:
    changes, said = CONFIGS[case]
    file = base / "target/config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    theta = {"rope_parameters": {"rope_theta": raw["rope_theta"], "rope_type": "default"}}
    file.write_text(json.dumps(raw | theta), encoding="utf-8")
    assert load_config(str(base / "target")).rope_theta == raw["rope_theta"]
    file.write_text(json.dumps(raw | changes), encoding="utf-8")
    _refused(lambda: spec(base).check(), said)


RECIPES = {
    "{": "not a recipe", "[]": "it is a list", '{"blocks": "2"}': "blocks is '2'", '{"tp": 2}': "tp is no field",
    '{"draft_tp": 2}': "draft_tp is no field", '{"toolchain": "gpu"}': "auto, cpu",
    '{"compiler_flags": {"prefill": 3}}': "compiler_flags", "[" * 100_000: "not a recipe",
}  # fmt: skip


@pytest.mark.parametrize(("text", "said"), RECIPES.items(), ids=lambda v: v[:30])
def test_a_recipe_is_read_strictly(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "recipe.json"
    file.write_text('{"blocks": 40, "compiler_flags": "-O3"}', encoding="utf-8")
    recipe = parse(["--recipe", str(file)]).recipe
    assert (recipe.blocks, set(recipe.compiler_flags.values())) == (40, {"-O3"})
    file.write_text(text, encoding="utf-8")
    _refused(lambda: parse(["--recipe", str(file)]), said)
    _refused(lambda: parse(["--recipe", str(tmp_path / "none")]), "none cannot be read")


# a manifest's spec is checked as a build checks its own: draft, changes of the spec and of the draft's configuration
FORGED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a tap behind the last layer": ("eagle3", {}, {"taps": [0, 2]}, "reads the inputs of the layers 0, 2"),
    "a tap of no layer": ("eagle3", {}, {"taps": [0, -1]}, r"taps\[1\] is -1"),
    "states of a different width": ("eagle3", {}, {"target_hidden_size": 64}, "the draft reads states of 64 numbers"),
    "more drafted ids than ids": ("eagle3", {}, {"draft_vocab_size": 65}, "has more ids than the target"),
    "a length that no bucket reaches": ("draft", {"max_len": 200}, {}, "max-len 200 is no multiple of 128"),
    "a length beyond the positions": ("draft", {"max_len": 1024}, {}, "max-len 1024 is beyond the models' 512"),
    "a different vocabulary": ("draft", {}, {"vocab_size": 96}, "vocabularies of 64 and 96 tokens"),
    "ranks that are no power of two": ("draft", {"tp": 3}, {}, "tp is 3"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_spec_that_does_not_fit_is_refused(base: Path, forged: str) -> None:
    name, changes, of_draft, why = FORGED[forged]
    write_head(base / "eagle3", base / "target", taps=(0, 1))
    value = spec(base, draft=str(base / name)).bundle.as_json()
    spec_from_json(value).check()
    with pytest.raises((UserError, Wrong), match=why):
        spec_from_json(value | changes | {"draft_config": value["draft_config"] | of_draft}).check()


def test_a_folder_of_the_hub_s_cache_is_named_after_its_model(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-32B/snapshots/9216db5781bf21249d130ec9da846c4624c16137"
    shutil.copytree(base / "target", folder)
    assert spec(base, target=str(folder), k=0).bundle.target == "Qwen/Qwen3-32B"


def test_a_user_sees_a_sentence_and_no_traceback() -> None:
    command = [sys.executable, "-m", "compile.build", "--k", "32"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ks[0] is 32")
    assert "Traceback" not in ran.stderr
