"""`python -m compile.serve_command DIR`: the commands by which vLLM serves a bundle, on Trainium first, then on a CPU.

Platform nrt runs the bundle's NEFFs by nrtpy, with their NKI kernels; neuron compiles its graphs by the SDK's plugin
for PJRT when the server starts; cpu is XLA's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from model.errors import UserError, run_cli
from model.nki.launches import LNC
from trnspec.bundle.opening import Bundle, read_bundle

PLATFORMS = ("nrt", "neuron", "cpu")


def serve_command(bundle: str | Path, platform: str, port: int = 8000) -> list[str]:
    """The server's process for a bundle's folder."""
    options = [] if platform == "cpu" else ["--additional-config", json.dumps({"platform": platform})]
    return ["vllm", "serve", str(bundle), "--port", str(port), *options]


def environment(platform: str) -> dict[str, str]:
    """The server's variables: our plugin only, nothing from a hub, and the cores of a logical core."""
    lnc = {} if platform == "cpu" else {"NEURON_LOGICAL_NC_CONFIG": str(LNC)}
    return {"VLLM_PLUGINS": "trnspec", "HF_HUB_OFFLINE": "1"} | lnc


def refusals(bundle: Bundle) -> dict[str, str]:
    """Platform -> why a bundle cannot be served there; "" where it can."""
    manifest, nrt, neuron = bundle.manifest, "", ""
    if not manifest.has_weights:
        why = "it has no weights; build it from checkpoint folders that hold them"
        return dict.fromkeys(PLATFORMS, why)
    if manifest.compiler.neff != "neff":
        nrt = manifest.without_kernels or (
            f"it has no NEFFs (neff: {manifest.compiler.neff}); run python -m compile.neuron {bundle.path} where "
            "neuronx-cc is"
        )
    if bundle.spec.kernels != "reference":
        neuron = "PJRT runs no NKI kernels; build it with --kernels reference"
    return {"nrt": nrt, "neuron": neuron, "cpu": ""}


def main(arguments: list[str]) -> None:
    """Print a command for each platform, or why there is none as a comment; with --platform one, or an error."""
    parser = argparse.ArgumentParser(prog="python -m compile.serve_command", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder of the bundle, on the server's machine")
    parser.add_argument("--platform", choices=PLATFORMS, help="print the command for this platform only")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    bundle = read_bundle(options.bundle)
    why, folder = refusals(bundle), bundle.path.resolve()
    chosen = [options.platform] if options.platform else PLATFORMS
    if all(why[platform] for platform in chosen):
        raise UserError(f"{bundle.path} cannot be served on {' or '.join(chosen)}: {why[chosen[0]]}")
    for platform in chosen:
        variables = [f"{name}={value}" for name, value in environment(platform).items()]
        command = shlex.join(serve_command(folder, platform, options.port))
        print(f"# {platform}: no, {why[platform]}" if why[platform] else " ".join([*variables, command]))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
