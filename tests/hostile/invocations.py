"""Wrong invocations of the commands: each row of a table ends in one sentence and exit code 2."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from compile.store import push
from tests.compile.tiny import BASE, flip
from tests.hostile.series import Series, refusal
from trnspec.bundle.manifest import MANIFEST

# (command, words before each row, rows between commas); {tmp} has the files of `furnish`, {bundle} is a tiny pair's,
# {target} one without a drafter; "-" is a command without words
TABLE: tuple[tuple[str, str, str], ...] = (
    ("compile.build", "--out {tmp}/new --target {tmp}/target --k 0 --tp 1 --max-len 128 ", """
        --k 32, --k -1, --k x, --k 1.5, --k=-1;3, --k 0;x, --k, --k 7 --draft Qwen/No, --draft {tmp}/target,
        --recipe {tmp}/nothing, --recipe {tmp}/file, --recipe {tmp}/binary, --recipe {tmp}/config-list/config.json,
        --recipe {tmp}/config-deep/config.json, --recipe {tmp}/config-llama/config.json, --recipe {{"draft_tp":2}},
        --recipe {{"toolchain":"gpu"}} --dry-run, --recipe {{"compiler_flags":{{"x":"1"}}}}, --tp 3, --tp 0, --tp -1,
        --tp 128, --tp 1000000000, --tp x, --tp 64, --batch 0, --batch -1, --batch x, --max-len 0, --max-len 100,
        --max-len -128, --max-len 1000, --max-len 65536, --max-len x, --dtype int4, --dtype, --kernels x, --drafter x,
        --drafter chain, --out {tmp}/file, --out {tmp}/mine, --out {tmp}/file/below, --out /, --out {tmp}/loop,
        --out {tmp}/loop/below, --out s3://bucket/x, --out s3:x, --out {tmp}/strange, --nonsense, stray
    """),
    ("compile.build", "--out {tmp}/new --k 0 --tp 1 --max-len 128 --dry-run --target {tmp}/", """
        nothing, empty, file, config-list, config-null, config-number, config-text, config-deep, config-llama,
        config-half, config-binary, hidden_size--192, hidden_size-text, hidden_size-0, hidden_size-true,
        hidden_size-32.5, num_hidden_layers-0, num_hidden_layers-huge, num_attention_heads-0, num_attention_heads--4,
        num_key_value_heads-0, num_key_value_heads-3, intermediate_size-null, intermediate_size-0, vocab_size-0,
        vocab_size-huge, vocab_size-text, head_dim-0, head_dim-text, rope_theta-nan, rope_theta-text, rope_theta-0,
        rms_norm_eps-0, rms_norm_eps-text, max_position_embeddings-0, eos_token_id-text, eos_token_id--1,
        eos_token_id-listed, tie_word_embeddings-text, rope_parameters-list, rope_parameters-theta, rope_scaling-yarn,
        attention_bias-true, use_sliding_window-true, hidden_act-gelu, bos_token_id-text, quantization_config-yarn
    """),
    ("compile.doctor", "", """
        -, {tmp}/nothing, {tmp}/file, {tmp}/empty, {tmp}/mine, {tmp}/forged, {bundle} {bundle}, --json,
        {bundle} --nonsense, {tmp}/cut, {tmp}/flipped, {tmp}/missing, {tmp}/sparse
    """),
    ("compile.serve_command", "", """
        -, {tmp}/nothing, {tmp}/file, {tmp}/empty, {tmp}/forged, {bundle} --platform x, {target} --platform neuron,
        {bundle} --port x, {bundle} {bundle}
    """),
    ("compile.neuron.__main__", "", "-, {tmp}/nothing, {tmp}/forged, {bundle}, {bundle} --jobs x"),
    ("compile.store", "", """
        -, nonsense, push, push {bundle}, push {bundle} relative, push {bundle} gs://a/b, push {bundle} s3://,
        push {bundle} s3://bucket, push {bundle} s3:/one/slash/name, push {bundle} {tmp}/objects,
        push {bundle} {tmp}/file/below/name, push {tmp}/nothing {tmp}/s/x, push {tmp}/forged {tmp}/s/x,
        push {tmp}/cut {tmp}/s/x, push {tmp}/flipped {tmp}/s/x, push {tmp}/mine {tmp}/s/x, push {tmp}/file {tmp}/s/x,
        push {tmp}/sparse {tmp}/s/x, push {bundle} {tmp}/huge-store/one, pull, pull {tmp}/s/none {tmp}/new2,
        pull {tmp}/nothing/x {tmp}/new2, pull {tmp}/forged {tmp}/new2, pull {tmp}/huge-store/one {tmp}/new2,
        pull {tmp}/s/pair {tmp}/mine, pull {tmp}/s/pair {tmp}/file, pull {tmp}/s/pair {target},
        pull relative {tmp}/new2, pull {tmp}/s/pair {tmp}/new2 --public-key nonsense,
        verify {tmp}/s/pair --public-key {tmp}/file, ls, ls '',
        ls /, ls {tmp}/nothing, ls {tmp}/file, ls gs://a/b, ls s3:/a, ls {tmp}/forged-store, ls {tmp}/huge-store,
        verify, verify {tmp}/s/none, verify {tmp}/forged, verify relative, verify {tmp}/s/pair extra,
        verify {tmp}/s/pair --deep, sign {bundle}, sign {bundle} --key {tmp}/nothing, sign {bundle} --key {tmp}/file,
        sign {tmp}/nothing --key {tmp}/file
    """),
    ("model.generate", "--bundle {bundle} ", """
        --prompt '', --prompt \udcff, --prompt a --temperature -1, --prompt a --temperature nan,
        --prompt a --temperature inf, --prompt a --temperature x, --prompt a --top-p 0, --prompt a --top-p 1.5,
        --prompt a --top-p nan, --prompt a --top-k -1, --prompt a --top-k 1.5, --prompt a --top-k 99999999,
        --prompt a --min-p 2, --prompt a --min-p -1, --prompt a --min-p nan, --prompt a --seed -9223372036854775809,
        --prompt a --seed 18446744073709551616, --prompt a --seed 1.5, --prompt a --seed x,
        --prompt a --max-new-tokens 0, --prompt a --max-new-tokens -1, --prompt a --max-new-tokens x,
        --prompt a --k-limit 9, --prompt a --k-limit -1, --prompt a --nonsense
    """),
    ("model.generate", "", """
        -, --prompt a, --bundle {bundle}, --bundle {tmp}/nothing --prompt a, --bundle {tmp}/file --prompt a,
        --bundle {tmp}/empty --prompt a, --bundle {tmp}/mine --prompt a, --bundle {tmp}/forged --prompt a,
        --bundle {tmp}/cut --prompt a, --bundle {tmp}/flipped --prompt a, --bundle {tmp}/missing --prompt a,
        --bundle {tmp}/sparse --prompt a, --bundle {target} --prompt a --compare
    """),
)  # fmt: skip
# invalid configurations of a target: the folder's name has the field and its value
_VALUES: dict[str, Any] = {
    "text": "x", "true": True, "null": None, "huge": 10**12, "nan": "nan", "listed": ["x"], "list": [1],
    "yarn": {"a": 1}, "gelu": "gelu", "theta": {"rope_theta": 5e5, "rope_type": "default"},
}  # fmt: skip
_CONTENTS = {
    "config-list": b"[]", "config-null": b"null", "config-number": b"7", "config-text": b'"x"', "config-half": b'{"a":',
    "config-deep": b"[" * 100_000, "config-binary": b"\xff\xfe\x00", "config-llama": b'{"model_type": "llama"}',
}  # fmt: skip


def _rows(text: str) -> list[str]:
    return [row.strip().replace(";", ",") for row in text.replace("\n", " ").split(",") if row.strip()]


def furnish(tmp: Path, bundle: Path) -> None:
    """Write the files that the table's rows name."""
    for folder in ("empty", "mine", "target", "huge-store/one"):
        (tmp / folder).mkdir(parents=True)
    (tmp / "file").write_text("nothing of ours\n", encoding="utf-8")
    (tmp / "mine/letter").write_text("mine", encoding="utf-8")
    (tmp / "loop").symlink_to("loop")
    (tmp / "binary").write_bytes(bytes(range(128, 256)))
    base = BASE | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    (tmp / "target/config.json").write_text(json.dumps(base), encoding="utf-8")
    for folder in (f for f in _rows(TABLE[1][2]) if f != "nothing" and not (tmp / f).exists()):
        (tmp / folder).mkdir()
        name, _, value = folder.partition("-")
        fields = {} if folder in _CONTENTS else {name: _VALUES[value] if value in _VALUES else json.loads(value)}
        content = _CONTENTS.get(folder, json.dumps(base | fields).encode())
        (tmp / folder / "config.json").write_bytes(content)
    manifest, shard = (bundle / MANIFEST).read_bytes(), "weights/tp0_sharded_checkpoint.safetensors"
    for name in ("forged", "cut", "flipped", "missing", "sparse", "strange"):
        shutil.copytree(bundle, tmp / name, ignore=shutil.ignore_patterns(".build"))
    (tmp / "strange/notes.txt").write_text("a user's", encoding="utf-8")
    (tmp / "forged" / MANIFEST).write_bytes(manifest.replace(b'"batch": ', b'"batch": 1', 1))
    (tmp / "cut" / shard).write_bytes((bundle / shard).read_bytes()[:-9])
    flip(tmp / "flipped" / shard)
    next((tmp / "missing/hlo").iterdir()).unlink()
    for huge in ("sparse" / Path(shard), "sparse/manifest.json.minisig", "huge-store/one/manifest.json"):
        with (tmp / huge).open("ab") as file:
            file.truncate(1 << 40)
    (tmp / "forged-store/one").mkdir(parents=True)
    (tmp / "forged-store/one" / MANIFEST).write_bytes(b"{}")


def invocations(tmp: Path, bundle: Path, target: Path) -> Series:
    """Run every row of the table in this process."""
    # no row reaches a network
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    series = Series("wrong invocations refused")
    furnish(tmp, bundle)
    push(bundle, str(tmp / "s/pair"))
    for command, before, rows in TABLE:
        main = importlib.import_module(command).main
        for row in (f"{before}{row}" for row in _rows(rows)):
            given = [] if row == "-" else row.split()
            words = [word.strip("'").format(tmp=tmp, bundle=bundle, target=target) for word in given]
            series.count(f"{command} {row}", refusal(partial(main, words)))
    return series
