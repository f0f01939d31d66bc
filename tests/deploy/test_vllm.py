"""The manifests against the installed vLLM: flags of its commands, its variables, our plugin's options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.serving import __main__ as bench
from bench.serving.servers import Endpoint
from tests.serve.server import NO_VLLM

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture
def cli() -> Any:
    """vLLM's command line, whose import takes seconds."""
    return pytest.importorskip("vllm.entrypoints.launchers.cli_args", reason=NO_VLLM)


def test_vllm_takes_the_flags_and_variables_of_a_server(cli: Any) -> None:
    platform = pytest.importorskip("serve.platform", reason=NO_VLLM)
    envs = pytest.importorskip("vllm.envs", reason=NO_VLLM)
    text = "".join((DEPLOY / name).read_text(encoding="utf-8") for name in ("Dockerfile", "base/server.yaml"))
    names = {"VLLM_PLUGIN", *re.findall(r"VLLM_\w+", text)}
    assert names - envs.environment_variables.keys() == {"VLLM_PLUGIN"}
    server = yaml.safe_load((DEPLOY / "base/server.yaml").read_text(encoding="utf-8").split("\n---\n")[0])
    part = server["spec"]["template"]["spec"]["containers"][0]
    baseline = (DEPLOY / "overlays/baseline/kustomization.yaml").read_text(encoding="utf-8")
    parser = cli.make_arg_parser(cli.FlexibleArgumentParser())
    for arguments in (part["args"], re.findall(r"'(--additional-config=.*)'", baseline)):
        actual = parser.parse_args(words := [*part["command"][2:], *arguments])
        options = platform.read(platform.Options, actual.additional_config, "additional-config")
        assert (options.platform, options.speculation) == ("neuron", arguments == part["args"])
        with pytest.raises(SystemExit):
            parser.parse_args([word.replace("--shutdown-timeout", "--shutdown-seconds") for word in words])


def test_vllm_bench_serve_takes_the_flags_of_the_benchmark(tmp_path: Path) -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve", reason=NO_VLLM)
    serve.add_cli_args(parser := serve.FlexibleArgumentParser())
    options = bench._options(["--baseline", "http://a", "--speculative", "http://b", "--vllm", "/bin/sh"])
    words = bench.client(Endpoint("http://a", "m"), tmp_path, tmp_path, 4, options)[3:]
    assert parser.parse_args(words).percentile_metrics == "ttft,tpot,itl,e2el"
    with pytest.raises(SystemExit):
        parser.parse_args([*words, "--skip-template"])
