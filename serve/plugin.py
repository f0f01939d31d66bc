"""The entry point that vLLM asks for a platform: ours if the command names a bundle, else none."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

from serve.folder import BUNDLE_VARIABLE, meant_bundle


def platform() -> str | None:
    """The path of our platform's class, or None. Several processes ask, the first one finds the bundle."""
    bundle = meant_bundle(sys.argv[1:])
    if bundle is None:
        return None
    if BUNDLE_VARIABLE not in os.environ:
        os.environ[BUNDLE_VARIABLE] = str(bundle)
        _share_metrics()
    # the worker has no model runner of vLLM's, of either version
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return "serve.platform.BundlePlatform"


def _share_metrics() -> None:
    """Let the worker's metrics be seen at the server's /metrics: both processes keep theirs in one folder."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        folder = os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="trnspec-metrics-")
        owner = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
