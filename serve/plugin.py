"""The entry point from which vLLM gets a platform: ours if the command names a bundle."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import EntryPoint, entry_points

from model.errors import UserError
from serve.folder import BUNDLE_VARIABLE, METRICS_PREFIX, METRICS_VARIABLE, find_bundle_arg, no_bundle
from serve.startup import install_excepthook


def platform() -> str | None:
    """The path of our platform class, or None. Every process of a server calls it; the first one finds the bundle."""
    arguments = sys.argv[1:]
    try:
        bundle = find_bundle_arg(arguments)
        only_ours = bundle is None and _is_only_platform()
        if only_ours and arguments[:1] == ["serve"] and not {"-h", "--help"} & {a.split("=")[0] for a in arguments}:
            raise no_bundle(arguments)
        if bundle is not None and (other := next(filter(_is_active, _other_plugins()), None)):
            raise UserError(
                f"{bundle} needs the platform trnspec, and the plugin {other.name} ({other.module}) is active as well; "
                "set VLLM_PLUGINS=trnspec"
            )
    except UserError as error:
        # vLLM passes over a plugin that raises an Exception, and would serve a different model
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if bundle is None:
        return "serve.platform.NullPlatform" if only_ours else None
    os.environ[BUNDLE_VARIABLE] = str(bundle)
    # the worker has no model runner of vLLM's, of either version
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    _share_metrics()
    install_excepthook()
    return "serve.platform.BundlePlatform"


def _other_plugins() -> list[EntryPoint]:
    """The platform plugins of other packages that vLLM may load here."""
    points = [point for point in entry_points(group="vllm.platform_plugins") if point.name != "trnspec"]
    return [p for p in points if p.name in os.environ.get("VLLM_PLUGINS", p.name).split(",")]


def _is_active(point: EntryPoint) -> bool:
    """Whether a plugin offers a platform here; vLLM passes over one that raises."""
    try:
        return point.load()() is not None
    except Exception:
        return False


def _is_only_platform() -> bool:
    """Whether no other platform of vLLM's could serve a model on this machine."""
    # vLLM tries its built-in platforms first, so their module is imported
    from vllm.platforms import builtin_platform_plugins  # noqa: PLC0415

    return not _other_plugins() and not any(ask() for ask in builtin_platform_plugins.values())


def _share_metrics() -> None:
    """Let /metrics, which the API process answers, show the counters of the worker's process."""
    if METRICS_VARIABLE not in os.environ:
        folder, owner = tempfile.mkdtemp(prefix=METRICS_PREFIX), os.getpid()
        os.environ[METRICS_VARIABLE] = folder
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
