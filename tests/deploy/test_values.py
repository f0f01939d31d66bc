"""Values are refused where they are read, each family of wrong values in one sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from compile.neuron.flags import LNC
from deploy import values as module
from deploy.render import main
from deploy.values import DEFAULTS, INSTANCES, check, load_values
from model.drafters.registry import DRAFTERS
from model.errors import UserError
from tests.deploy.rendered import FILLED, OURS, SET, values_of

DRAFTS = {
    "chain": "Qwen/Qwen3-1.7B",
    "parallel": "amd/PARD-Qwen3-0.6B",
    "eagle3": "RedHatAI/Qwen3-32B-speculator.eagle3",
    "dflash": "chutesai/Qwen3-32B-FP8-DFLASH",
    "ngram": "none",
}
KEY = "RW" + "Ab3+/" * 10 + "Abcd"

# key -> values that a cluster, a registry, AWS or compile.build would refuse or take for something different
ODD = {
    "name": "Qwen_3|1abc|a-|-a|kube-x|default|" + "a" * 31,
    "namespace": "kube-system|default|Team|a.b|" + "a" * 41,
    "region": "us west|us-west|us-west-\uff12|us-west-0|US-WEST-2|us-west-2a",
    "kubernetes": "v1.34|1.34.2|1.20|1.33|1.2|2.0|1.\u0663\u0664|1.340|latest",
    "instance_type": "m5.large|x' or true or 'y|trn2",
    "public_key": f"{KEY[:-1]}|{KEY}=|AA{KEY[2:]}|team.pub|RW",
    "storage.bucket": "x|s3://bucket|Bucket|a..b|192.168.1.1|xn--bucket|bucket-s3alias|bucket/|your-bucket|a_b",
    "storage.prefix": "/a|a/|.|..|a/../b|a//b|a b|...|é",
    "storage.uid": "0|99999999999|-1|1.5|true|0o17|017|1_000|1:30|root",
    "images.tools": "tools:1|reg/tools|reg/tools:latest|host:5000/tools|a b/c:1|reg/a@sha256:zz|reg/T:1|reg/a:é"
    "|https://reg/a:1|reg/a@sha256:0",
    "model.target": "Qwen/NotAModel|Qwen/Qwén3-32B|./checkpoint",
    "model.draft": "none|amd/PARD-Qwen3-0.6B|../x",
    "model.target_folder": "../x|/mnt/x|x/",
    "model.draft_folder": "none|checkpoints/Qwen3-32B|../x",
    "model.drafter": "lookup|none|auto|ngram|eagle3",
    "model.k": "0|32|-1|7.0|seven|0,3,7|",
    "model.tp": "0|2|24|65|128",
    "model.batch": "0|100000",
    "model.max_len": "1000|0|99999999|128000000000",
    "model.dtype": "int4|BF16|fp8",
    "server.engine": "vllm|trnspec|NXDI",
    "server.replicas": "0|-1|100000",
    "server.port": "80|70000|http|2:13:20",
    "server.api_key_secret": "My Secret|a/b|-x",
    "server.clients_namespace": "*|a b|",
    "server.prometheus_namespace": "*|a b|",
    "server.cpu": "0|193|90m|1e3",
    "server.memory_gib": "128|2049|640Gi",
    "server.shm_gib": "640|0",
    "server.disk_gib": "0|100000",
    "server.startup_seconds": "1|30m|100000000",
    "router.kind": "nginx|gateway",
    "router.gateway": "A b|your-gateway",
    "router.gateway_namespace": "a.b|*",
    "router.picker": "Picker|a/b",
    "router.picker_label": "a b|/x|-x",
    "compile.cpu": "0|193",
    "compile.deadline_seconds": "1|8h",
    "load_test.prompts": "/x.json|../x.json|hub: x",
    "load_test.requests": "0|-1|9999999999",
    "load_test.max_tokens": "1017|1024",
    "quality.tasks": "gsm8k --x|gsm8k,|,|a b",
    "quality.max_gen_toks": "1017|0",
}


@pytest.mark.parametrize("key", ODD)
def test_odd_values_are_refused(key: str) -> None:
    assert values_of() == load_values(DEFAULTS, FILLED)
    for value in ODD[key].split("|"):
        with pytest.raises(UserError) as caught:
            pytest.fail(f"taken: {value} {values_of(f'{key}={value}')['name']}")
        assert "\n" not in str(caught.value)


def leaves(raw: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(raw, dict):
        return {at: raw}
    return {k: v for name, value in raw.items() for k, v in leaves(value, f"{at}.{name}".strip(".")).items()}


@pytest.mark.parametrize("wrong", [None, True, 1.5, [], {}, "", "\n", "${name}", "<name>", "a\0b", "x" * 300, math.inf])
def test_no_key_takes_a_value_of_a_wrong_kind(wrong: Any) -> None:
    for key in leaves(values_of()):
        raw: Any = load_values(DEFAULTS, FILLED)
        *outer, last = key.split(".")
        part = raw
        for name in outer:
            part = part[name]
        part[last] = wrong
        with pytest.raises(UserError):
            check(raw)


GOOD = {
    "name": "a|a1-b",
    "region": "eu-central-1|us-gov-west-1|cn-north-1",
    "kubernetes": "1.34|1.37",
    "public_key": f"none|{KEY}",
    "storage.bucket": "abc|my.bucket-1",
    "storage.prefix": "a/b|team_1",
    "images.tools": "localhost:5000/a:1|reg/a/b-c@sha256:" + "0" * 64,
    "model.k": "1|15",
    "model.tp": "4|16|64",
    "model.draft": "Qwen/Qwen3-0.6B",
    "router.picker_label": "app|example.org/app",
    "server.memory_gib": "129|2048",
}


@pytest.mark.parametrize("key", GOOD)
def test_values_beside_them_are_taken(key: str) -> None:
    for value in GOOD[key].split("|"):
        assert str(leaves(values_of(f"{key}={value}"))[key]) == value


@pytest.mark.parametrize("drafter", DRAFTS)
def test_every_drafter_is_a_value_and_the_vendors_engine_loads_chains_only(drafter: str) -> None:
    assert {*DRAFTS, "none"} == DRAFTERS.keys()
    folder = "checkpoints/drafter" if DRAFTERS[drafter].has_model else "none"
    model = (f"model.drafter={drafter}", f"model.draft={DRAFTS[drafter]}", f"model.draft_folder={folder}")
    values_of(*OURS, *model)
    if drafter != "chain":
        with pytest.raises(UserError, match=f"cannot load the drafter {drafter}"):
            values_of(*model)
    if limit := DRAFTERS[drafter].limit:
        with pytest.raises(UserError, match=f"drafts at most {limit} in a step"):
            values_of(*OURS, *model, f"model.k={limit + 1}")


def test_devices_follow_from_tp_and_the_instance() -> None:
    assert {tp: values_of(f"model.tp={tp}").devices for tp in (4, 16, 32, 64)} == {4: 1, 16: 4, 32: 8, 64: 16}
    with pytest.raises(UserError, match=r"needs 8 devices and a trn2.3xlarge has 1"):
        values_of("instance_type=trn2.3xlarge", "server.cpu=8", "compile.cpu=8")
    with pytest.raises(UserError, match=r"server.cpu is 90 and a trn2.3xlarge has 12"):
        values_of("instance_type=trn2.3xlarge", "model.tp=4")
    assert all(devices * 8 // LNC <= 64 for devices, *_ in INSTANCES.values())


FILES = {
    "unknown": ("k: 7", "k: 7\n  kk: 8", "model.kk is no field"),
    "missing": ("instance_type: trn2.48xlarge\n", "", "instance_type is missing"),
    "text for a number": ("tp: 32", "tp: '32'", "model.tp is '32', expected a whole number"),
    "flag": ("k: 7", "k: true", "model.k is True"),
    "octal": ("port: 8000", "port: 017500", "server.port is '017500'"),
    "base 60": ("port: 8000", "port: 2:13:20", "server.port is '2:13:20'"),
    "not a map": ("storage:\n", "storage: 8\nother:\n", "other is no field"),
    "doubled": ("k: 7", "k: 7\n  k: 8", "k is given twice"),
    "doubled outside": ("region:", "region: eu-west-1\nregion:", "region is given twice"),
    "yaml": ("region:", "region: [", "cannot be read as YAML"),
    "a list for all": ("", "- 1\n#", "cannot be read as YAML|expected an object"),
    "code": ("k: 7", "k: !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_values_file_is_read_strictly(name: str, tmp_path: Path) -> None:
    old, new, said = FILES[name]
    text = DEFAULTS.read_text(encoding="utf-8").replace("your-", "my-")
    assert old in text
    (tmp_path / "v.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        load_values(tmp_path / "v.yaml")


@pytest.mark.parametrize("content", [b"[" * 20000, b"\xff\xfe\x00", b"", b"a: &a [*a]", b"7", b"? [1]\n: 2"])
def test_a_file_that_holds_no_values_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_bytes(content)
    for path in (tmp_path / "v.yaml", tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError):
            load_values(path)


def test_unfilled_values_are_not_rendered(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="looks unfilled"):
        main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["name", "nope=1", "model.nope=1", "model=1", "a.b.c=1", "model.k.x=1", "=1", "."])
def test_a_change_that_names_no_value_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        main([*SET, "--set", change, "--out", str(tmp_path / "out")])


def test_the_version_follows_what_a_bundle_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    same = ["server.replicas=2", "load_test.requests=9", "images.lm_eval=reg/x:2", "namespace=other"]
    other = ["model.k=5", "model.target_folder=x", "images.tools=reg/x:2", "model.batch=2"]
    first = values_of()
    assert {values_of(change).version for change in same} == {first.version}
    assert len({first.version, *(values_of(change).version for change in other)}) == 5
    assert first.bundle("speculative") == f"qwen3-32b-qwen3-1.7b-tp32-b4-s1024-bf16-k7-{first.version}"
    assert first.bundle("baseline") == f"qwen3-32b-tp32-b4-s1024-bf16-{first.version}"
    monkeypatch.setattr(module, "LNC", 1)
    assert values_of("model.tp=64").version != values_of("model.tp=32").version
