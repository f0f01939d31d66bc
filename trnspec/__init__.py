"""trnspec: speculative decoding of Qwen3 on AWS Trainium2. These names are its public interface.

    from trnspec import LLM, Params

    llm = LLM("bundles/demo")
    print(llm.generate("Count from 1 to 10:", Params(temperature=0.8, seed=7)).text)

`build(BuildSpec(...))` returns the folder of a new bundle; `verify(folder)` is the doctor's check. A user's mistake
raises `UserError` with one sentence.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile.build import build
    from compile.doctor import verify
    from compile.spec import BuildSpec
    from model.errors import UserError
    from trnspec.engine.request import Params
    from trnspec.llm import LLM, Output

__all__ = ["LLM", "BuildSpec", "Output", "Params", "UserError", "build", "verify"]
# imported when needed: a command without torch does not wait for it
_HOMES = {
    "LLM": "trnspec.llm",
    "Output": "trnspec.llm",
    "Params": "trnspec.engine.request",
    "UserError": "model.errors",
    "BuildSpec": "compile.spec",
    "build": "compile.build",
    "verify": "compile.doctor",
}
_ROOT = Path(__file__).resolve().parent.parent


def shadowed() -> str:
    """A sentence if Python would import a package that only has the name of one of ours; empty if all are ours."""
    for name in ("model", "compile", "nki_kernels", "nkisim", "serve"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        # nkisim has a src layout in a checkout
        if origin not in (_ROOT / name / "__init__.py", _ROOT / name / "src" / name / "__init__.py"):
            return (
                f"Python finds the package {name!r} at {origin}, and trnspec needs the one in {_ROOT}; "
                "start from a different folder, or take the other one off PYTHONPATH"
            )
    return ""


def platform() -> str | None:
    """vLLM's entry point: the server's platform. A command that names no bundle is left as it is if one is shadowed."""
    if not (sentence := shadowed()):
        return importlib.import_module("serve.plugin").platform()
    _refuse_bundle(sentence)
    return None


def check_target_device() -> None:
    """vLLM's entry point for plugins of any kind: it loads no platform for the target device cpu."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        _refuse_bundle("VLLM_TARGET_DEVICE is cpu, for which vLLM loads no platform plugin; unset it to serve a bundle")


def _refuse_bundle(sentence: str) -> None:
    """End a command that names a bundle with this sentence; other tools write a manifest.json, too."""
    manifests = (Path(argument.partition("=")[2] or argument) / "manifest.json" for argument in sys.argv[1:])
    if any(file.is_file() and b"trnspec-bundle" in file.read_bytes() for file in manifests):
        print(f"error: {sentence}", file=sys.stderr)
        raise SystemExit(2)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"trnspec has no {name!r}; it has {', '.join(__all__)}")
    if sentence := shadowed():
        raise ImportError(sentence)
    globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return globals()[name]
