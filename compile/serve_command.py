"""`python -m compile.serve_command DIR`: the commands by which vLLM serves a bundle, on Trainium first, then on a CPU.

Platform neuron runs its NEFFs by nrtpy, with their NKI kernels; pjrt, a smoke test, compiles its graphs by the SDK's
plugin for PJRT.
"""

import json
import shlex
import sys
from pathlib import Path

from model.errors import UserError, command_line, run_cli
from model.nki.launches import LNC
from trnspec.bundle.opening import Bundle, read_bundle

PLATFORMS = ("neuron", "pjrt", "cpu")
# our plugin only, and nothing from a hub
_VARIABLES = "VLLM_PLUGINS=trnspec HF_HUB_OFFLINE=1"


def serve_command(bundle: str | Path, platform: str, port: int = 8000) -> list[str]:
    """The command line of the server."""
    options = json.dumps({"platform": platform})
    return ["vllm", "serve", str(bundle), "--port", str(port), "--additional-config", options]


def refusals(bundle: Bundle) -> dict[str, str]:
    """Platform -> why a bundle cannot be served there; "" where it can."""
    manifest, neuron, pjrt = bundle.manifest, "", ""
    if not manifest.has_weights:
        return dict.fromkeys(PLATFORMS, "it has no weights; build it from checkpoint folders that hold them")
    if manifest.compiler.neff != "neff":
        way = f"run python -m compile.neuron {bundle.path} where neuronx-cc is"
        neuron = manifest.without_kernels or f"it has no NEFFs (neff: {manifest.compiler.neff}); {way}"
    if bundle.spec.kernels != "reference":
        pjrt = "PJRT runs no NKI kernels; build it with --kernels reference"
    return {"neuron": neuron, "pjrt": pjrt, "cpu": ""}


def main(arguments: list[str]) -> None:
    """Print a command for each platform, or why there is none as a comment; with --platform one, or an error."""
    does = "Print the vllm serve command of a bundle for each platform, or why it cannot be served there."
    parser = command_line("compile.serve_command", does, "bundles/demo --platform cpu --port 8080")
    parser.add_argument("bundle", type=Path, help="folder of the bundle on the server")
    parser.add_argument("--platform", choices=PLATFORMS, help="print only this platform's command")
    parser.add_argument("--port", type=int, default=8000, help="the server's port, 1 to 65535 (default: 8000)")
    options = parser.parse_args(arguments)
    if not 1 <= options.port < 1 << 16:
        raise UserError(f"--port is {options.port}; give a number from 1 to 65535")
    bundle, chosen = read_bundle(options.bundle), [options.platform] if options.platform else PLATFORMS
    why = refusals(bundle)
    if all(why[platform] for platform in chosen):
        raise UserError(f"{bundle.path} cannot be served on {' or '.join(chosen)}: {why[chosen[0]]}")
    for platform in chosen:
        lnc = "" if platform == "cpu" else f" NEURON_LOGICAL_NC_CONFIG={LNC}"
        command = shlex.join(serve_command(bundle.path.resolve(), platform, options.port))
        print(f"# {platform}: no, {why[platform]}" if why[platform] else f"{_VARIABLES}{lnc} {command}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
