"""The entry point from which vLLM gets a platform: that of a bundle if the command names one."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from model.errors import UserError
from serve.folder import BUNDLE_VARIABLE, METRICS_PREFIX, METRICS_VARIABLE, meant_bundle, no_bundle
from serve.sentence import end_in_a_sentence


def platform() -> str | None:
    """The path of a class of ours, or None. Every process of a server calls it; the first one finds the bundle."""
    arguments = sys.argv[1:]
    try:
        bundle = meant_bundle(arguments)
        alone = bundle is None and _alone()
        if alone and arguments[:1] == ["serve"] and not _help(arguments):
            raise no_bundle(arguments)
        if bundle is not None:
            _only_ours(bundle)
    except UserError as error:
        # vLLM passes over a plugin that raises an Exception, and would serve a different model
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if bundle is None:
        return "serve.bare.BarePlatform" if alone else None
    sys.argv[1:] = arguments
    os.environ[BUNDLE_VARIABLE] = str(bundle)
    # the worker has no model runner of vLLM's, of either version
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    _share_metrics()
    end_in_a_sentence()
    return "serve.platform.BundlePlatform"


def _help(arguments: list[str]) -> bool:
    return any(argument.split("=")[0] in ("-h", "--help") for argument in arguments)


def _others() -> list[EntryPoint]:
    """The platforms of other packages that vLLM asks for on this machine."""
    chosen = os.environ.get("VLLM_PLUGINS")
    points = [point for point in entry_points(group="vllm.platform_plugins") if point.module != __name__]
    return points if chosen is None else [point for point in points if point.name in chosen.split(",")]


def _answers(point: EntryPoint) -> bool:
    """Whether a package offers a platform here; vLLM passes over one that raises."""
    try:
        return point.load()() is not None
    except Exception:
        return False


def _only_ours(bundle: Path) -> None:
    """UserError where another package offers a platform too: vLLM takes none of two."""
    for point in filter(_answers, _others()):
        raise UserError(
            f"{bundle} needs the platform trnspec, and {point.module} offers {point.name!r} on this machine, of which "
            "vLLM takes only one; set VLLM_PLUGINS=trnspec"
        )


def _alone() -> bool:
    """Whether no other platform of vLLM's could serve a model on this machine."""
    # vendor seam: vLLM asks its own platforms first, so its module is there
    from vllm.platforms import builtin_platform_plugins  # noqa: PLC0415

    return not _others() and not any(ask() for ask in builtin_platform_plugins.values())


def _share_metrics() -> None:
    """Let /metrics, which the first process answers, show the counters of the worker's process."""
    if METRICS_VARIABLE not in os.environ:
        folder, owner = tempfile.mkdtemp(prefix=METRICS_PREFIX), os.getpid()
        os.environ[METRICS_VARIABLE] = folder
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
