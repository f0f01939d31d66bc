"""The server's engine is a value: each renders its command, variables, rights and end; what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile.serve_command import engine_command
from deploy.render import render
from deploy.server import nxdi_arguments
from deploy.values import Values
from model.errors import UserError
from tests.deploy.rendered import changed, container, environment, flags, manifests, one

IMAGE = "registry.internal/specdec-server:0.1.0"
TRNSPEC: dict[str, Any] = {"images": {"server": IMAGE}, "server": {"engine": "trnspec"}}
VARIANTS = ("baseline", "speculative")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trnspec")
    render(changed(**TRNSPEC), folder)
    return folder


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> tuple[Values, Path]:
    folder, values = tmp_path_factory.mktemp("nxdi"), changed()
    render(values, folder)
    return values, folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_trnspec_serves_the_bundle_that_was_fetched(ours: Path, variant: str) -> None:
    server = container(ours, f"-{variant}", "server")
    fetched = container(ours, f"-{variant}", "fetch")["command"][4]
    assert server["image"] == IMAGE
    assert server["command"][:3] == ["vllm", "serve", fetched]
    assert flags(server["command"]) == {
        "served-model-name": "Qwen/Qwen3-32B",
        "port": "8000",
        "shutdown-timeout": "60",
    }
    assert fetched.startswith(next(m["mountPath"] for m in server["volumeMounts"] if m["name"] == "bundle") + "/")


@pytest.mark.parametrize("variant", VARIANTS)
def test_trnspec_needs_nothing_of_nxdi_and_no_rights(ours: Path, variant: str) -> None:
    server = container(ours, f"-{variant}", "server")
    assert not [name for name in environment(server) if "NEURON" in name or name == "VLLM_USE_V1"]
    assert environment(server)["HOME"] in {m["mountPath"] for m in server["volumeMounts"]}
    assert server["securityContext"]["runAsNonRoot"] is True
    assert server["securityContext"]["readOnlyRootFilesystem"] is True
    assert "bucket" not in {m["name"] for m in server["volumeMounts"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nxdi_is_the_command_of_serve_command(vendor: tuple[Values, Path], variant: str) -> None:
    values, out = vendor
    server = container(out, f"-{variant}", "server")
    assert server["command"] == engine_command(nxdi_arguments(values, variant), values.model.target, 8000)
    assert environment(server)["VLLM_USE_V1"] == "0"


def test_a_server_leaves_the_routers_then_drains_then_ends(ours: Path) -> None:
    for variant in VARIANTS:
        spec = one(ours, "Deployment", variant)["spec"]["template"]["spec"]
        (server,) = spec["containers"]
        leave = server["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = int(flags(server["command"])["shutdown-timeout"])
        assert leave > 0
        assert spec["terminationGracePeriodSeconds"] > leave + drain
        assert {p: server[p]["httpGet"]["path"] for p in ("startupProbe", "readinessProbe")} == {
            "startupProbe": "/health",
            "readinessProbe": "/health",
        }


def test_the_engine_changes_the_servers_alone(ours: Path, vendor: tuple[Values, Path]) -> None:
    def others(out: Path) -> list[dict[str, Any]]:
        return [m for m in manifests(out) if m["kind"] != "Deployment"]

    assert others(ours) == others(vendor[1])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"server": {"engine": "vllm"}}, "must be nxdi or trnspec"),
        ({"server": {"engine": "trnspec"}}, "lacks our plugin"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        changed(**change)
