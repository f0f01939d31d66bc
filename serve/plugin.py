"""The entry point that vLLM asks for a platform: ours if the command names a bundle, else none."""

from __future__ import annotations

import os
import sys

from serve.folder import BUNDLE_VARIABLE, meant_bundle


def platform() -> str | None:
    """The path of our platform's class, or None. Several processes ask, the first one finds the bundle."""
    bundle = meant_bundle(sys.argv[1:])
    if bundle is None:
        return None
    os.environ[BUNDLE_VARIABLE] = str(bundle)
    # the worker has no model runner of vLLM's, of either version
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return "serve.platform.BundlePlatform"
