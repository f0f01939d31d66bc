"""A spec that cannot be built gets one sentence before anything is read or made; with each, the allowed case."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile.build import checked_plan
from compile.recipes import ROOT
from compile.spec import BuildSpec, parse
from model.config import load_config
from model.errors import UserError
from model.strict import ValidationError
from tests.compile.tiny import refused, spec, write_model
from tests.model.heads import write_head
from trnspec.bundle.spec import spec_from_json

ALLOWED = ["", "--max-len 40960 --batch 1", '--recipe {"chunks":[128,1024],"blocks":11}', *(
    f"--target Qwen/Qwen3-{sizes} --draft Qwen/Qwen3-0.6B --kernels nki"
    for sizes in ("8B --tp 1", "8B --tp 2 --dtype fp32", "32B --tp 4")
)]  # fmt: skip
REFUSED = {
    "--k -1": "ks[0] is -1", "--k x": "--k is 'x'; give a number", "--k 32": "ks[0] is 32", "--tp 3": "power of two",
    "--k 0 --draft Qwen/Qwen3-0.6B": "--draft was given", "--tp 128": "tp is 128", "--kernels x": "reference",
    "--drafter ngram --draft Qwen/Qwen3-0.6B": "the drafter ngram has no model, and --draft was given",
    "--drafter ngram --k 0": "k is 0 and the drafter ngram", "--drafter none --k 3": "k is 3 and the drafter none",
    "--drafter parallel --draft Qwen/Qwen3-0.6B --k 3": "--drafter parallel needs a checkpoint's folder",
    "--drafter x": "one of auto", "--batch 1000000": "4096", "--batch 0": "batch", "--dtype int4": "bf16",
    "--max-len 1000": "use 896 or 1024", "--max-len 65536": "40960", "--target Qwen/Nothing": "Qwen/Nothing",
    "--out s3://bucket/x": "give a local folder, and push it", "--out s3:/bucket/x": "give a local folder",
    '--recipe {"compiler_flags":{"x":""}}': "prefill, step", '--recipe {"blocks":10}': "give at least 11",
    '--kernels reference --recipe {"layers":4}': "kernels reference has no launches",
    '--recipe {"without":["softmax"]}': "without is softmax; name kernels of a build with --kernels nki: accept_drafts",
    '--kernels reference --recipe {"without":["accept_drafts"]}': "without is accept_drafts",
    **{f'--recipe {{"context_buckets":{c}}}': "give rising multiples of 1024 that end with max-len 1024"
       for c in ("[512,1024]", "[1024,2048]")},
    "--batch 3000 --max-len 8192": "at most 16384 fit SBUF: lower the batch or max-len, or use --kernels",
    **{f'--recipe {{"chunks":{c}}}': "chunks" for c in ("[32]", "[192]", "[256,128]", "[16384]")},
    "--target Qwen/Qwen3-14B --tp 4 --dtype fp32 --kernels nki":
        "rows have 5120 fp32 numbers on a rank, and kernels for prompts support 40",
    "--target Qwen/Qwen3-14B --tp 1 --k 0 --kernels nki": "inner rows have 17408 bf16 numbers",
    "--target Qwen/Qwen3-32B --tp 1 --k 0 --kernels nki": "rows of heads have 8192 bf16 numbers",
    "--tp 4 --k 7 --batch 16 --max-len 32768":
        "weights 16.38, draft 1.02, caches 49.43, code 3.02, rings 7.99, scratch 0.33, fixed 0.14 (code, rings,",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED)
def test_flags(flags: str) -> None:
    refused(lambda: checked_plan(parse(flags.split())), REFUSED[flags])


def test_allowed_flags() -> None:
    for flags in ALLOWED:
        parse(flags.split()).check()


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [({"intermediate_size": 50}, 4, "intermediate_size 50 is not divisible by tp 4; lower tp"),
     ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 kv heads, tp is 2; tp must divide")],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, changes: dict[str, Any], tp: int, message: str) -> None:
    write_model(tmp_path / "odd", 1, **changes)
    write_model(tmp_path / "even", 1)
    for what, pair in (("target", ("odd", "even")), ("draft", ("even", "odd"))):
        target, draft = (str(tmp_path / name) for name in pair)
        BuildSpec(target=target, draft=draft, tp=1, max_len=128).check()
        refused(BuildSpec(target=target, draft=draft, tp=tp, max_len=128).check, f"the {what}", message)


def _replace(old: dict[str, str], new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


def _template(count: int) -> dict[str, Any]:
    parts = [{"Sequence": {"id": "A", "type_id": 0}}] * count
    return {"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": {}}


_Z, _NFC = {"String": "z"}, {"type": "NFC"}
# changes of a tokenizer.json, and whether they can lengthen a text
GROWTHS: list[tuple[dict[str, Any], bool]] = [
    ({"normalizer": _replace(_Z, "y")}, False), ({"normalizer": _replace(_Z, "zz")}, True),
    ({"normalizer": {"type": "Sequence", "normalizers": [_NFC] + [_replace(_Z, "z" * 60)] * 4}}, True),
    ({"normalizer": _replace({"Regex": ""}, "z")}, True), ({"post_processor": _template(1)}, False),
    ({"post_processor": _template(99)}, True), ({"decoder": _replace(_Z, "z" * 40)}, True),
]  # fmt: skip


def test_a_pair_shares_vocabulary_and_tokenizer(fresh: Path) -> None:
    spec(fresh).check()
    write_model(fresh / "small", 3, vocab_size=32)
    refused(spec(fresh, draft=str(fresh / "small")).check, "vocab")
    file = fresh / "draft" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("w63", "zzz"), encoding="utf-8")
    refused(spec(fresh).check, "tokenizers")
    file.unlink()
    refused(spec(fresh).check, "draft has no tokenizer.json")


def test_a_tokenizer_that_the_model_cannot_use_is_refused(fresh: Path) -> None:
    """Also without a draft."""
    file, bare = fresh / "target/tokenizer.json", spec(fresh, k=0)
    refused(spec(fresh, k=0, target=str(write_model(fresh / "small", 3, vocab_size=32))).check, "has the id 63")
    plain = json.loads(file.read_text(encoding="utf-8"))
    for change, growth in GROWTHS:
        file.write_text(json.dumps(plain | change), encoding="utf-8")
        if growth:
            refused(bare.check, "can lengthen a text")
        else:
            bare.check()
    for content in ("{", '{"model": {"type": "Magic"}}'):
        file.write_text(content, encoding="utf-8")
        refused(bare.check, "cannot be used")
    file.unlink()
    refused(bare.check, "has no tokenizer.json")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("tokenizer_config.json", b"[1]", "is not a JSON object"), ("tokenizer_config.json", b"\xff", "read as JSON"),
    ("chat_template.jinja", b"\xff", "is not text"), ("generation_config.json", b"[1]", "is not a JSON object"),
    ("generation_config.json", b'{"eos_token_id": [1, "x"]}', "has eos_token_id 'x'"),
])  # fmt: skip
def test_other_files_that_a_server_cannot_read_are_refused(
    fresh: Path, name: str, content: bytes, message: str
) -> None:
    (fresh / "target" / name).write_bytes(content)
    refused(spec(fresh).check, name, message)


def test_weights_come_with_both_folders_or_with_none(fresh: Path) -> None:
    assert spec(fresh).checkpoints == {"target": fresh / "target", "draft": fresh / "draft"}
    (fresh / "draft/model.safetensors").unlink()
    refused(spec(fresh).check, "target holds weights", "draft holds none")
    (fresh / "target/model.safetensors").rename(fresh / "target/model-00001-of-00002.safetensors")
    assert spec(fresh, k=0).checkpoints, "weights that are not read are no folder without weights"
    (fresh / "target/model-00001-of-00002.safetensors").unlink()
    spec(fresh).check()
    assert spec(fresh).checkpoints == {}
    assert "has no weights" in spec(fresh).notes()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model_type": "llama"}, "llama"), ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights (fp8)"),
     ({"compression_config": {"quant_method": "int4"}}, "quantized weights (int4)"), ({"head_dim": 127}, "127"),
     ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "has rope_theta and a different value in"),
     ({"rope_theta": None}, "has no rope_theta"), ({"eos_token_id": "x"}, "has eos_token_id 'x'"),
     ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128},
       "rope_parameters": {"rope_type": "default"}}, "has rope_scaling and a different value in")],
    ids=str,
)  # fmt: skip
def test_configurations(fresh: Path, changes: dict[str, Any], message: str) -> None:
    file = fresh / "target/config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    theta = {"rope_parameters": {"rope_theta": raw["rope_theta"], "rope_type": "default"}}
    file.write_text(json.dumps(raw | theta), encoding="utf-8")
    assert load_config(str(fresh / "target")).rope_theta == raw["rope_theta"]
    file.write_text(json.dumps(raw | changes), encoding="utf-8")
    refused(lambda: spec(fresh).check(), message)


RECIPES = {
    "{": "not a recipe", "[]": "it is a list", '{"blocks": "2"}': "blocks is '2'", '{"tp": 2}': "tp is not a field",
    '{"draft_tp": 2}': "draft_tp is not a field", '{"toolchain": "gpu"}': "auto, cpu",
    '{"compiler_flags": {"prefill": 3}}': "compiler_flags", "[" * 100_000: "not a recipe",
}  # fmt: skip


def test_a_recipe_is_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text('{"blocks": 40, "compiler_flags": "-O3"}', encoding="utf-8")
    recipe = parse(["--recipe", str(file)]).recipe
    assert (recipe.blocks, set(recipe.compiler_flags.values())) == (40, {"-O3"})
    for text, message in RECIPES.items():
        file.write_text(text, encoding="utf-8")
        refused(lambda: parse(["--recipe", str(file)]), message)
    refused(lambda: parse(["--recipe", str(tmp_path / "none")]), "none is not a file; give an existing one")


# a manifest's spec is checked as a build checks its own: draft, changes of the spec and of the draft's configuration
FORGED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *(("draft", {"ks": ks}, {}, r"the largest last|ks\[\d\] is") for ks in ([7, 3], [0, 3], [3, 3], [3, 32])),
    ("eagle3", {}, {"taps": [0, 2]}, "reads the inputs of layers 0, 2"),
    ("eagle3", {}, {"taps": [0, -1]}, r"taps\[1\] is -1"),
    ("eagle3", {}, {"target_hidden_size": 64}, "the draft reads hidden states of size 64"),
    ("eagle3", {}, {"draft_vocab_size": 65}, "has a larger vocabulary than the target"),
    ("draft", {"max_len": 200}, {}, "max-len 200 is not a multiple of 128; use 128 or 256"),
    ("draft", {"max_len": 1024}, {}, "max-len 1024 exceeds the 512 positions of the models; lower it"),
    ("draft", {"max_len": 513}, {}, "max-len 513 is not a multiple of 128; use 512"),
    ("draft", {}, {"vocab_size": 96}, "vocabularies of 64 and 96 ids; give a --draft"),
    ("draft", {"tp": 3}, {}, "tp is 3"),
]


@pytest.mark.parametrize(("draft", "changes", "of_draft", "why"), FORGED, ids=str)
def test_a_forged_spec_that_does_not_fit_is_refused(
    fresh: Path, draft: str, changes: dict[str, Any], of_draft: dict[str, Any], why: str
) -> None:
    write_head(fresh / "eagle3", fresh / "target", taps=(0, 1))
    value = spec(fresh, draft=str(fresh / draft)).bundle.as_json()
    for allowed in (value, value | {"ks": [3, 7]}):
        spec_from_json(allowed).check()
    with pytest.raises((UserError, ValidationError), match=why):
        spec_from_json(value | changes | {"draft_config": value["draft_config"] | of_draft}).check()


def test_a_folder_of_the_hub_s_cache_is_named_after_its_model(fresh: Path) -> None:
    folder = fresh / "models--Qwen--Qwen3-32B/snapshots/9216db5781bf21249d130ec9da846c4624c16137"
    shutil.copytree(fresh / "target", folder)
    assert spec(fresh, target=str(folder), k=0).bundle.target == "Qwen/Qwen3-32B"


def test_a_user_sees_a_sentence_and_no_traceback() -> None:
    command = [sys.executable, "-m", "compile.build", "--k", "32"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ks[0] is 32")
    assert "Traceback" not in ran.stderr
