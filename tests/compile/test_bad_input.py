"""Bad input gets one sentence before anything is paid; beside each, the allowed case builds."""

import errno
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile.build import build
from compile.spec import BuildSpec, Recipe, parse
from model.errors import UserError, guarded
from model.packing import Packing
from tests.compile.tiny import shard_of, spec, write_model, write_pair
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.engine.request import Params, Request, Shape, check
from trnspec.engine.text import read_prompt

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the tiny pair."""
    write_pair(tmp_path)
    return tmp_path


def _refused(work: object, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        work()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"k": "-1"}, "k is -1"), ({"k": "0", "draft": "Qwen/Qwen3-0.6B"}, "--draft was given"), ({"k": "x"}, "not a k"),
     ({"k": "32"}, "k is 32"), ({"tp": 3}, "power of two"), ({"tp": 128}, "64 logical cores"),
     ({"kernels": "x"}, "reference"), ({"drafter": "x"}, "one of auto"), ({"batch": 10**6}, "4096"),
     ({"recipe": Recipe(compiler_flags={"x": ""})}, "context_encoding_model"),
     ({"max_len": 1000}, "1024"),
     ({"max_len": 65536}, "40960"), ({"dtype": "int4"}, "bf16"), ({"target": "Qwen/Nothing"}, "Qwen/Nothing"),
     ({"batch": 0}, "batch"), ({"recipe": Recipe(draft_tp=3)}, "draft_tp is 3"),
     *(({"recipe": Recipe(chunks=c)}, "multiples of 16 up to 128") for c in ((24,), (144,), (64, 48), (1 << 14,))),
     ({"recipe": Recipe(chunks=(48, 128)), "kernels": "nki"}, "multiples of 128 up to 128")],
    ids=str,
)  # fmt: skip
def test_specs(changes: dict, word: str) -> None:
    BuildSpec().check()
    BuildSpec(recipe=Recipe(chunks=(48, 96, 128, 512))).check()
    _refused(lambda: BuildSpec(**changes).check(), word)


@pytest.mark.parametrize(
    ("changes", "tp", "said"),
    [({"hidden_size": 40}, 16, "hidden_size 40 does not divide by tp 16; choose a smaller tp"),
     ({"intermediate_size": 50}, 4, "intermediate_size 50 does not divide by tp 4"),
     ({"vocab_size": 66}, 4, "vocab_size 66 does not divide by tp 4"),
     ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 kv heads, which tp 2 neither divides nor")],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_for_target_and_draft(
    tmp_path: Path, changes: dict, tp: int, said: str
) -> None:
    write_model(tmp_path / "odd", 1, **changes)
    write_model(tmp_path / "even", 1, vocab_size=changes.get("vocab_size", 64))
    for what, pair in (("target", ("odd", "even")), ("draft", ("even", "odd"))):
        target, draft = (str(tmp_path / name) for name in pair)
        BuildSpec(target=target, draft=draft, tp=1, max_len=128).check()
        # a vocabulary is shared: there the target is named first
        named = "target" if "vocab_size" in changes else what
        wrong = BuildSpec(target=target, draft=draft, tp=tp, max_len=128)
        _refused(wrong.check, f"the {named}", said)


def test_pair_must_share_vocabulary_and_tokenizer(base: Path) -> None:
    spec(base).check()
    write_model(base / "small", 3, vocab_size=32)
    _refused(spec(base, draft=str(base / "small")).check, "vocab")
    _refused(spec(base, draft="Qwen/Qwen3-0.6B").check, "vocab")
    file = base / "draft" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("w63", "zzz"), encoding="utf-8")
    _refused(lambda: spec(base).check(), "tokenizers")


INDICES = {
    "index of nothing": "{}", "index that is no JSON": "{", "index of a list": '{"weight_map": ["a"]}',
    "index of a number": '{"weight_map": {"a": 7}}', "index of a path": '{"weight_map": {"a": "../b"}}',
    "index of a lost file": '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
}  # fmt: skip


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "nan", "truncated", "garbage", "absent", *INDICES])
def test_checkpoints(base: Path, fault: str) -> None:
    file = base / "target" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        tensors["model.layers.7.surprise"] = torch.zeros(1)
    elif fault == "shape":
        tensors[name] = tensors[name][:3].contiguous()
    elif fault == "nan":
        tensors[name][1, 1] = float("nan")
    save_file(tensors, file)
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "garbage":
        file.write_bytes(b"\xff" * 200)
    elif fault == "absent":
        file.unlink()
    elif fault in INDICES:
        (base / "target" / "model.safetensors.index.json").write_text(INDICES[fault], encoding="utf-8")

    def read() -> None:
        shard_of(Checkpoint(base / "target", spec(base).bundle.target_config), 0, 1, torch.float32, Packing())

    word = {"missing": name, "extra": "surprise", "shape": name, "nan": name}.get(fault, "model")
    _refused(read, word)


def test_weights_come_with_both_folders_or_with_none(base: Path) -> None:
    """A folder with config.json alone is built without; one of each is refused."""
    assert spec(base).checkpoints == {"target": base / "target", "draft": base / "draft"}
    (base / "draft/model.safetensors").unlink()
    _refused(spec(base).check, "target holds weights", "draft holds none")
    (base / "target/model.safetensors").unlink()
    spec(base).check()
    assert spec(base).checkpoints == {}


RECIPES = {
    "{": "not a recipe", "[]": "it is a list", '{"draft_tp": "2"}': "draft_tp is '2'", '{"tp": 2}': "tp is no field",
    '{"kv_shard": "sequence"}': "kv_shard is no field",
    '{"toolchain": "gpu"}': "auto, cpu",
    '{"compiler_flags": {"context_encoding_model": 3}}': "compiler_flags", "[" * 100_000: "not a recipe",
}  # fmt: skip


@pytest.mark.parametrize(("text", "said"), RECIPES.items(), ids=lambda v: v[:30])
def test_a_recipe_is_read_strictly(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "recipe.json"
    file.write_text('{"draft_tp": 4, "compiler_flags": "-O3"}', encoding="utf-8")
    recipe = parse(["--recipe", str(file)]).recipe
    assert (recipe.draft_tp, set(recipe.compiler_flags.values())) == (4, {"-O3"})
    file.write_text(text, encoding="utf-8")
    _refused(lambda: parse(["--recipe", str(file)]), said)
    _refused(lambda: parse(["--recipe", str(tmp_path / "none")]), "none cannot be read")


@pytest.mark.parametrize("out", ["/", "loop"])
def test_an_out_that_no_folder_can_have_is_a_sentence(base: Path, out: str) -> None:
    (base / "loop").symlink_to("loop")
    _refused(lambda: build(spec(base, out=str(base / out))), "folder")


def test_another_architecture(base: Path) -> None:
    file = base / "target" / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8")) | {"model_type": "llama"}
    file.write_text(json.dumps(raw), encoding="utf-8")
    _refused(lambda: spec(base).check(), "llama", "Qwen3")


def test_folders_and_disks(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "strange").mkdir()
    (base / "strange" / "letter.txt").write_text("mine", encoding="utf-8")
    _refused(lambda: build(spec(base, "strange")), "not empty")
    assert (base / "strange" / "letter.txt").read_text(encoding="utf-8") == "mine"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    _refused(lambda: build(spec(base)), "MB free")

    def full() -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    _refused(lambda: guarded(full, "out"), "full", "run the command again")


SHAPE = Shape((3,), 2, 128, (128,), 64, 3)


@pytest.mark.parametrize(
    ("request_", "word"),
    [(Request(()), "empty"), (Request((1,) * 128), "128"), (Request((1,), Params(temperature=-1)), "temperature"),
     (Request((1,), Params(top_p=0)), "top-p"), (Request((1,), Params(top_p=1.1)), "top-p"),
     (Request((1,), Params(min_p=2)), "min-p"), (Request((1,), Params(seed=-1)), "seed"),
     (Request((1,), k_limit=4), "k-limit"), (Request((1,), max_new_tokens=0), "max-new-tokens")],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_requests(request_: Request, word: str) -> None:
    check(SHAPE, Request((1,) * 127, Params(1.0, 5, 1.0, 1.0, 2**64 - 1), k_limit=3))
    _refused(lambda: check(SHAPE, request_), word)


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"caf\xe9")
    (tmp_path / "good").write_bytes("café".encode())
    assert read_prompt(None, str(tmp_path / "good")) == "café"
    _refused(lambda: read_prompt(None, str(tmp_path / "bad")), "UTF-8")
    _refused(lambda: read_prompt("", None), "empty")


def test_a_user_sees_a_sentence_and_no_traceback() -> None:
    command = [sys.executable, "-m", "compile.build", "--k", "32"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: k is 32")
    assert "Traceback" not in ran.stderr
