"""The entry point from which vLLM gets a platform: ours if the command names a bundle, else none."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

from model.errors import UserError
from serve.folder import BUNDLE_VARIABLE, METRICS_PREFIX, METRICS_VARIABLE, meant_bundle


def platform() -> str | None:
    """The path of our platform's class, or None. Every process of a server calls it; the first one finds the bundle."""
    arguments = sys.argv[1:]
    try:
        bundle = meant_bundle(arguments)
    except UserError as error:
        # vLLM passes over a plugin that raises an Exception, and would serve a different model
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if bundle is None:
        return None
    sys.argv[1:] = arguments
    os.environ[BUNDLE_VARIABLE] = str(bundle)
    # the worker has no model runner of vLLM's, of either version
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    _share_metrics()
    return "serve.platform.BundlePlatform"


def _share_metrics() -> None:
    """Let /metrics, which the first process answers, show the counters of the worker's process."""
    if METRICS_VARIABLE not in os.environ:
        folder, owner = tempfile.mkdtemp(prefix=METRICS_PREFIX), os.getpid()
        os.environ[METRICS_VARIABLE] = folder
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
