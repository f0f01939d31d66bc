"""Everything rendered is valid, agrees with itself, and comes from the values alone."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.serving.options import parse as parse_serving
from compile.neuron import config as neuron_config
from compile.neuron.flags import LNC
from compile.spec import parse as parse_build
from compile.store import split
from deploy.render import main, render
from deploy.schema import validate
from deploy.values import Values, load_values
from model.errors import UserError
from tests.deploy import rendered
from tests.deploy.rendered import SET, VALUES, changed, container, containers, environment, flags, manifests, one, pods

CASES: dict[str, dict[str, Any]] = {
    "as-shipped": {},
    "k5-tp64-lnc2": {"model": {"k": 5, "tp": 64}},
    "k3-tp4-b1": {"model": {"k": 3, "tp": 4, "batch": 1, "max_len": 2048}},
    "v1beta1-port-replicas": {"claim_api": "v1beta1", "server": {"port": 9000, "replicas": 2}},
    "small-draft": {"model": {"draft": "Qwen/Qwen3-0.6B", "draft_folder": "hub/0.6B"}, "storage": {"prefix": "a/b"}},
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Values, Path]:
    values, out = changed(**CASES[request.param]), tmp_path_factory.mktemp("out")
    render(values, out)
    return values, out


def test_every_manifest_fits_the_strict_schema_of_its_version(case: tuple[Values, Path]) -> None:
    values, out = case
    found = manifests(out)
    assert len(found) == 24
    for manifest in found:
        validate(manifest, values.kubernetes)


def wrong(manifest: dict[str, Any], *path: str | int, value: Any) -> dict[str, Any]:
    spoiled = copy.deepcopy(manifest)
    at: Any = spoiled
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return spoiled


def test_the_schema_refuses_an_unknown_field_a_wrong_type_and_the_other_api(tmp_path: Path) -> None:
    render(changed(), tmp_path)
    claim, server = one(tmp_path, "ResourceClaimTemplate"), one(tmp_path, "Deployment", "speculative")
    devices = ("spec", "spec", "devices")
    spoiled = [
        wrong(claim, *devices, "requests", 0, "count", value=8),
        wrong(claim, *devices, "config", 0, "opaque", "param", value={}),
        wrong(claim, "apiVersion", value="resource.k8s.io/v1beta1"),
        wrong(server, "spec", "template", "spec", "containers", 0, "command", value="vllm serve"),
        wrong(server, "spec", "replica", value=1),
        wrong(one(tmp_path, "PersistentVolumeClaim"), "metadata", "nmy-pvcame", value="x"),
    ]
    for manifest in spoiled:
        with pytest.raises(UserError, match="does not fit Kubernetes"):
            validate(manifest, "1.34")
    with pytest.raises(UserError, match="has no"):
        validate(claim, "1.30")
    with pytest.raises(UserError, match="no schemas"):
        validate(claim, "1.99")


def shape_of(out: Path, variant: str) -> dict[str, list[Any]]:
    """k, tp, batch, length and LNC, each from every place that states it for a variant."""
    server, fetched = container(out, f"-{variant}", "server"), container(out, f"-{variant}", "fetch")
    served, fetch = flags(server["command"]), flags(fetched["command"])
    claim = one(out, "ResourceClaimTemplate")["spec"]["spec"]["devices"]
    request = claim["requests"][0].get("exactly", claim["requests"][0])
    lnc = claim["config"][0]["opaque"]["parameters"]["logicalNeuronCore"]
    name = re.search(
        r"tp(\d+)-b(\d+)-s(\d+)-bf16(?:-k(\d+))?-[0-9a-f]{8}$", environment(server)["NEURON_COMPILED_ARTIFACTS"]
    )
    assert name is not None
    load = flags(container(out, "load-test", "load-test")["command"])
    found: dict[str, list[Any]] = {
        "tp": [served["tensor-parallel-size"], fetch["tp"], name[1], request["count"] * 8 / lnc],
        "batch": [served["max-num-seqs"], fetch["batch"], name[2]],
        # the engine's sequences are shorter than the cache by the drafts
        "max_len": [int(served["max-model-len"]) + int(load["k"]), fetch["max-len"], name[3]],
        "lnc": [lnc, fetch["lnc"], environment(server)["NEURON_LOGICAL_NC_CONFIG"]],
    }
    build = parse_build(container(out, f"compile-{variant}", "build")["command"][3:])
    found["tp"].append(build.tp)
    found["batch"].append(build.batch)
    found["max_len"].append(build.max_len)
    found["lnc"].append(LNC)
    found["k"] = [fetch["k"], build.k, name[4] or 0]
    if variant == "speculative":
        draft = json.loads(served["speculative-config"])
        found["max_len"].append(draft["max_model_len"] + int(name[4]))
        found["k"] += [
            draft["num_speculative_tokens"] - 1,
            load["k"],
            flags(container(out, "quality", "equality")["command"])["k"],
        ]
    return found


@pytest.mark.parametrize("variant", ["baseline", "speculative"])
def test_k_tp_batch_length_and_lnc_agree_everywhere(case: tuple[Values, Path], variant: str) -> None:
    values, out = case
    shape = shape_of(out, variant)
    wanted = {
        "tp": values.model.tp,
        "batch": values.model.batch,
        "max_len": values.model.max_len,
        "lnc": values.device.lnc,
        "k": values.model.k if variant == "speculative" else 0,
    }
    assert {name: {int(v) for v in found} for name, found in shape.items()} == {n: {v} for n, v in wanted.items()}


def test_paths_agree_from_the_compile_job_to_the_server(case: tuple[Values, Path]) -> None:
    values, out = case
    csi = one(out, "PersistentVolume")["spec"]
    prefix = next(o for o in csi["mountOptions"] if o.startswith("prefix=")).removeprefix("prefix=").rstrip("/")
    bucket = csi["csi"]["volumeAttributes"]["bucketName"]
    for variant in ("baseline", "speculative"):
        pushed_from, pushed_to = container(out, f"compile-{variant}", "push")["command"][3:5]
        stored, local = container(out, f"-{variant}", "fetch")["command"][3:5]
        server = container(out, f"-{variant}", "server")
        mounts = {m["name"]: m["mountPath"] for m in server["volumeMounts"]}
        assert environment(server)["NEURON_COMPILED_ARTIFACTS"] == local
        assert local.startswith(mounts["bundle"] + "/")
        assert pushed_to == f"s3://{bucket}/{prefix}" + stored.removeprefix(mounts["bucket"])
        assert split(pushed_to)[1] == split(local)[1] == split(pushed_from)[1]
        folder = server["command"][2]
        assert folder == f"{mounts['bucket']}/{values.model.target_folder}"
        build = parse_build(container(out, f"compile-{variant}", "build")["command"][3:])
        assert build.out == pushed_from
        assert build.checkpoint == folder
    assert build.draft_checkpoint == rendered.speculative_config(out)["model"]


def test_the_compile_jobs_differ_in_the_draft_alone(case: tuple[Values, Path]) -> None:
    """Both bundles come from compile.build on the same machine with the same flags, and take the same way."""
    _, out = case
    jobs = {v: one(out, "Job", f"compile-{v}")["spec"] for v in ("baseline", "speculative")}
    asked = {v: flags(container(out, f"compile-{v}", "build")["command"]) for v in jobs}
    assert set(asked["speculative"]) - set(asked["baseline"]) == {"drafter", "draft", "draft-checkpoint"}
    assert {n for n in asked["baseline"] if asked["baseline"][n] != asked["speculative"][n]} == {"k", "out"}
    for spec in jobs.values():
        spec["template"]["metadata"]["labels"].pop("app.kubernetes.io/component")
        for named in containers(spec["template"]["spec"]):
            # what comes after the module is compared above, or is the bundle's name and shape
            named["command"] = named["command"][:3]
    assert jobs["baseline"] == jobs["speculative"]


def counts_agree(out: Path) -> bool:
    """The engine hands num_speculative_tokens to NxDI as speculation_length, one to one, and that counts rows."""
    found = []
    for variant in ("baseline", "speculative"):
        build = parse_build(container(out, f"compile-{variant}", "build")["command"][3:])
        whole = json.loads(neuron_config.render(build))
        served = flags(container(out, f"-{variant}", "server")["command"])
        asked = json.loads(served.get("speculative-config", "{}")).get("num_speculative_tokens", 0)
        fused = json.loads(served["override-neuron-config"]).get("enable_fused_speculation", False)
        built = whole["neuron_config"]
        found.append((built["speculation_length"], built["enable_fused_speculation"]) == (asked, fused))
    return all(found)


def test_the_server_asks_for_the_rows_that_the_bundle_verifies(case: tuple[Values, Path]) -> None:
    values, out = case
    assert counts_agree(out)
    assert rendered.speculative_config(out)["num_speculative_tokens"] == values.model.k + 1


def test_a_server_that_counts_drafts_is_found(tmp_path: Path) -> None:
    render(changed(), tmp_path)
    file = tmp_path / "base/speculative.yaml"
    text = file.read_text(encoding="utf-8")
    assert '"num_speculative_tokens": 8' in text
    file.write_text(text.replace('"num_speculative_tokens": 8', '"num_speculative_tokens": 7'), encoding="utf-8")
    assert not counts_agree(tmp_path)


def test_commands_are_ones_that_our_own_parsers_take(case: tuple[Values, Path]) -> None:
    _, out = case
    for variant in ("baseline", "speculative"):
        build = parse_build(container(out, f"compile-{variant}", "build")["command"][3:])
        dataclasses.replace(build, checkpoint="", draft_checkpoint="").check()
    for owner, name in (("load-test", "load-test"), ("quality", "equality")):
        command = container(out, owner, name)["command"]
        options = parse_serving(command[command.index("bench.serving") + 1 :])
        options.check()
        assert options.temperature == 0
        for variant, url in options.endpoints.items():
            service = one(out, "Service", variant)
            name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
            assert url == f"http://{name}.{service['metadata']['namespace']}.svc.cluster.local:{port}"


def test_every_name_that_is_used_is_made_here(case: tuple[Values, Path]) -> None:
    values, out = case
    made = {(m["kind"], m["metadata"]["name"]) for m in manifests(out)}
    assert len(made) == len(manifests(out))
    for owner, spec in pods(out):
        assert ("ServiceAccount", spec["serviceAccountName"]) in made, owner
        for claim in spec.get("resourceClaims", []):
            assert ("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in made, owner
        volumes = {v["name"]: v for v in spec["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in made
        for found in containers(spec):
            assert {m["name"] for m in found.get("volumeMounts", [])} <= volumes.keys(), f"{owner} {found['name']}"
            asked = {c["name"] for c in found["resources"].get("claims", [])}
            assert asked <= {c["name"] for c in spec.get("resourceClaims", [])}
    volume, claim = one(out, "PersistentVolume"), one(out, "PersistentVolumeClaim")
    assert volume["spec"]["claimRef"] == {"namespace": values.namespace, "name": claim["metadata"]["name"]}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert all(m["metadata"].get("namespace") == values.namespace for m in manifests(out) if m["kind"] not in CLUSTER)


CLUSTER = ("Namespace", "PersistentVolume")


def test_the_base_is_a_whole_kustomization(case: tuple[Values, Path]) -> None:
    _, out = case
    base = yaml.safe_load((out / "base/kustomization.yaml").read_text(encoding="utf-8"))
    assert (base["apiVersion"], base["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    assert set(base) == {"apiVersion", "kind", "labels", "resources"}
    assert sorted(base["resources"]) == sorted(
        p.name for p in (out / "base").iterdir() if p.name != "kustomization.yaml"
    )


def test_disk_volumes_fit_into_what_the_containers_may_write(case: tuple[Values, Path]) -> None:
    _, out = case
    for owner, spec in pods(out):
        sizes = [v["emptyDir"] for v in spec["volumes"] if "emptyDir" in v]
        disk = sum(int(s["sizeLimit"].removesuffix("Gi")) for s in sizes if "medium" not in s)
        memory = sum(int(s["sizeLimit"].removesuffix("Gi")) for s in sizes if "medium" in s)
        allowed = [c["resources"]["limits"] for c in spec["containers"]]
        assert disk <= sum(int(a["ephemeral-storage"].removesuffix("Gi")) for a in allowed), owner
        held = [
            c["resources"]["limits"] for c in containers(spec) if any(m["name"] == "shm" for m in c["volumeMounts"])
        ]
        assert all(memory < int(a["memory"].removesuffix("Gi")) for a in held), owner


def test_no_account_id_placeholder_or_credential_is_rendered(case: tuple[Values, Path]) -> None:
    _, out = case
    text = rendered.every_text(out)
    assert not re.search(r"(?<!\d)\d{12}(?!\d)", text)
    assert not re.search(r"YOUR_|your-|changeme|example\.com|<[^>\n]+>|\$\{|\bTODO\b|\bmy-", text, re.IGNORECASE)
    assert not re.search(r"SECRET|ACCESS_KEY|SESSION_TOKEN|AKIA|PASSWORD", text)
    assert not [m for m in manifests(out) if m["kind"] == "Secret"]


UNFILLED = {
    "account": ({"storage": {"bucket": "x"}}, "the bucket's name alone"),
    "placeholder": ({"storage": {"bucket": "your-bucket"}}, "looks unfilled"),
    "latest": ({"images": {"tools": "specdec-tools:latest"}}, "may change"),
    "no-tag": ({"images": {"server": "host:5000/server"}}, "may change"),
    "lnc": ({"device": {"lnc": 4}}, "logical cores of 1 or 2"),
    "lnc-1": ({"device": {"lnc": 1}, "model": {"tp": 64}}, "compile.build compiles for 2 alone"),
    "devices": ({"model": {"tp": 24}}, "connected sets"),
    "half-a-device": ({"model": {"tp": 2}}, "connected sets"),
    "claim-api": ({"claim_api": "v1alpha3"}, "must be v1 or v1beta1"),
    "path": ({"storage": {"prefix": "/a/"}}, "without a slash"),
    "up": ({"model": {"target_folder": "../x"}}, "without a slash"),
    "name": ({"name": "Qwen_3"}, "lower-case"),
    "shm": ({"server": {"shm_gib": 700}}, "counts against"),
    "zero": ({"model": {"k": 0}}, "at least 1"),
    "k": ({"model": {"k": 40}}, "model cannot be built: k is 40"),
    "dtype": ({"model": {"dtype": "int4"}}, "model cannot be built: dtype"),
    "model": ({"model": {"target": "Qwen/NotAModel"}}, "model.target is"),
    "accent": ({"model": {"target": "Qwen/Qwén3-32B"}}, "model.target is"),
    "length": ({"model": {"max_len": 1000}}, "model cannot be built: max-len"),
    "batch": ({"model": {"batch": 0}}, "at least 1"),
    "port": ({"server": {"port": 70000}}, "1024 to 65535"),
    "low-port": ({"server": {"port": 80}}, "1024 to 65535"),
    "digit-first": ({"name": "1abc"}, "a letter first"),
    "long-name": ({"name": "a" * 31}, "up to 30"),
    "uid": ({"storage": {"uid": 99999999999}}, "storage.uid"),
    "image-space": ({"images": {"server": "a b:c"}}, "no image's name"),
    "image-digest": ({"images": {"server": "reg/a@sha256:zz"}}, "no image's name"),
    "image-registry": ({"images": {"tools": "specdec-tools:0.1.0"}}, "names no registry"),
    "prompts": ({"load_test": {"prompt_set": "nope"}}, "no prompt set"),
    "startup": ({"server": {"startup_seconds": 1}}, "startup_seconds"),
    "instance": ({"device": {"instance_type": "m5.large"}}, "instance_type"),
    "cel": ({"device": {"instance_type": "x' || true || 'y"}}, "instance_type"),
    "small-instance": ({"device": {"instance_type": "trn2.3xlarge"}}, "needs 8 devices"),
    "prefix-dot": ({"storage": {"prefix": "."}}, "without a slash"),
    "partition": ({"partition": "*"}, "aws-us-gov"),
    "metrics": ({"load_test": {"cloudwatch_namespace": "*"}}, "cloudwatch_namespace"),
    "metrics-aws": ({"load_test": {"cloudwatch_namespace": "AWS/EC2"}}, "not AWS/"),
    "region": ({"region": "us west"}, "a region such as"),
    "kubernetes": ({"kubernetes": "v1.34"}, "a version such as"),
    "secret": ({"server": {"api_key_secret": "My Secret"}}, "the name of a Secret"),
    "tasks": ({"quality": {"tasks": "gsm8k --x"}}, "names of lm-eval's tasks"),
    "no-room": ({"load_test": {"max_tokens": 1024}}, "no room"),
}


@pytest.mark.parametrize("name", UNFILLED)
def test_a_value_that_cannot_be_deployed_is_refused(name: str) -> None:
    change, part = UNFILLED[name]
    with pytest.raises(UserError, match=part):
        changed(**change)


FILES = {
    "unknown": ("k: 7", "k: 7\n  kk: 8", "model.kk is no value"),
    "missing": ("  lnc: 2\n", "", "device.lnc is missing"),
    "type": ("tp: 32", "tp: '32'", "must be of type int"),
    "flag": ("k: 7", "k: true", "must be of type int"),
    "not-a-map": ("device:\n", "device: 8\nother:\n", "device is 8|other is no value|device\\. is 8"),
    "doubled": ("k: 7", "k: 7\n  k: 8", "k is given twice"),
    "doubled-outside": ("region:", "region: eu-west-1\nregion:", "region is given twice"),
    "yaml": ("region:", "region: [", "cannot be read as YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_values_file_is_read_strictly(name: str, tmp_path: Path) -> None:
    old, new, part = FILES[name]
    text = VALUES.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "v.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError, match=part):
        load_values(tmp_path / "v.yaml")


def test_a_values_file_of_great_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("[" * 20000, encoding="utf-8")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        load_values(tmp_path / "v.yaml")


def test_what_the_values_file_leaves_open_is_not_rendered(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="looks unfilled"):
        main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["name", "nope=1", "model.nope=1", "model=1", "a.b.c=1", "model.k=[", "model.k=x"])
def test_a_wrong_change_is_one_sentence(change: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        main([*SET, "--set", change, "--out", str(tmp_path / "out")])


def test_an_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="is a file"):
        main([*SET, "--out", str(tmp_path / "file")])


def test_the_command_renders_replaces_and_spares_strangers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main([*SET, "--out", str(out)])
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    first = rendered.every_text(out)
    (out / "jobs/old.yaml").write_text("kind: Old\n", encoding="utf-8")
    main(["--values", str(VALUES), *SET, "--out", str(out)])
    assert rendered.every_text(out) == first
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="something else"):
        main([*SET, "--out", str(tmp_path / "mine")])
    assert (tmp_path / "mine/file").is_file()
