"""`python -m deploy.render --values V --out DIR`: the manifests of deploy/templates with the values filled in.

DIR/base/      the objects that run all the time
DIR/jobs/      the objects that run once: compile-baseline, compile-speculative, evaluate
DIR/iam/       policy documents of the roles, and the trust policy
DIR/grafana/   a dashboard of the servers' metrics, to import
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from compile import serve_command
from compile.neuron.flags import LNC
from deploy.values import DEFAULTS, NONE, Values, load_values
from model.drafters.registry import DRAFTERS
from model.errors import UserError, run_cli
from trnspec.bundle.signature import VARIABLE

VARIANTS = ("baseline", "speculative")
_TEMPLATES = Path(__file__).with_name("templates")
_FOLDERS = ("base", "jobs", "iam", "grafana")
# marks a folder that a later render may replace
_MARK = ".rendered"
_NAME = re.compile(r"\$\{([A-Za-z0-9_.]+)\}")
# custom resources, of which the package of Kubernetes' schemas has none
_CUSTOM = ("InferencePool", "HTTPRoute")


def fill(template: Any, scope: dict[str, Any]) -> Any:
    """A parsed template with each ${name} replaced: by the value itself where it is the whole text, by its text inside
    of a longer one. Values are never read as YAML. A list in a list is joined to it, the key << merges objects."""
    if isinstance(template, dict):
        merged = fill([template.get("<<", [])], scope)
        own = {fill(key, scope): fill(value, scope) for key, value in template.items() if key != "<<"}
        return {key: value for part in (*merged, own) for key, value in part.items()}
    if isinstance(template, list):
        filled = [fill(item, scope) for item in template]
        return [part for item in filled for part in (item if isinstance(item, list) else [item])]
    if not isinstance(template, str):
        return template
    if name := _NAME.fullmatch(template):
        return _look(name[1], scope)
    return _NAME.sub(lambda name: str(_look(name[1], scope)), template)


def _look(name: str, scope: dict[str, Any]) -> Any:
    value: Any = scope
    for key in name.split("."):
        value = value[key]
    return value


def _template(name: str, scope: dict[str, Any]) -> list[Any]:
    return [fill(part, scope) for part in yaml.safe_load_all((_TEMPLATES / name).read_text(encoding="utf-8"))]


def scope_of(values: Values, variant: str = "speculative") -> dict[str, Any]:
    """Every name of the templates."""
    m, key = values["model"], values["public_key"]
    k, drafter = (m["k"], m["drafter"]) if variant == "speculative" else (0, NONE)
    target, draft = (f"/mnt/bucket/{m[name]}" for name in ("target_folder", "draft_folder"))
    has_draft = DRAFTERS[drafter].has_model
    scope = values | {
        "variant": variant,
        "bundle": values.bundle(variant),
        "version": values.version,
        "partition": {"cn": "aws-cn", "us-gov": "aws-us-gov"}.get(values["region"].rsplit("-", 2)[0], "aws"),
        "devices": values.devices,
        "lnc": LNC,
        "k": k,
        "drafter": drafter,
        "draft_flags": [f"--drafter={drafter}", *([f"--draft={draft}"] if has_draft else [])] if k else [],
        # a draft that is no chain has a shape of its own
        "checkpoints": [
            f"{m['target']}={target}",
            *([f"{m['draft'] if drafter == 'chain' else drafter}={draft}"] if has_draft else []),
        ],
        # an empty variable would require no signature: without a key there is no variable
        "key_environment": [] if key == NONE else [{"name": VARIABLE, "value": key}],
        # a pod's volumes count against its containers' disk; /tmp has 2 GiB
        "server_disk_gib": values["server"]["disk_gib"] + 2,
        "compile_disk_gib": values["compile"]["disk_gib"] + 2,
        "startup_probes": -(-values["server"]["startup_seconds"] // 10),
        "progress_seconds": values["server"]["startup_seconds"] + 600,
    } | _nxdi(values, variant, k)  # fmt: skip
    scope |= _template("parts.yaml", scope)[0]
    routed = values["router"]["kind"] == "gateway"
    routers = [scope["gateways"], {"podSelector": scope["picker"]}] if routed else []
    return scope | {"engine": scope[values["server"]["engine"]], "routers": routers}


def _nxdi(values: Values, variant: str, k: int) -> dict[str, Any]:
    """Command and variables of the NxDI loader of vLLM's V0 engine."""
    m = values["model"]
    target, draft = (f"/mnt/bucket/{m[name]}" for name in ("target_folder", "draft_folder"))
    served = serve_command.Served(target, draft, m["tp"], m["batch"], m["max_len"], k)
    # the baseline ends its sequences where the speculative server must
    arguments = serve_command.engine_arguments(served) | {"max_model_len": m["max_len"] - m["k"]}
    variables = serve_command.engine_environment(f"/bundle/{values.bundle(variant)}", LNC)
    return {
        "nxdi_command": serve_command.engine_command(arguments, m["target"], values["server"]["port"]),
        "nxdi_environment": [{"name": name, "value": value} for name, value in variables.items()],
    }


def manifests(values: Values) -> dict[str, list[Any]]:
    """The Kubernetes objects by the file that holds them."""
    scope, files = scope_of(values), {}
    for name in ("namespace", "cluster", "network", *(["router"] if scope["routers"] else [])):
        files[f"base/{name}.yaml"] = _template(f"base/{name}.yaml", scope)
    for variant in VARIANTS:
        of_variant = scope_of(values, variant)
        files[f"base/{variant}.yaml"] = _template("base/server.yaml", of_variant)
        files[f"jobs/compile-{variant}.yaml"] = _template("jobs/compile.yaml", of_variant)
    return files | {"jobs/evaluate.yaml": _template("jobs/evaluate.yaml", scope)}


def render(values: Values, out: Path) -> list[Path]:
    """Write everything; each manifest is validated first, and nothing of an earlier render stays.

    Raises UserError when a manifest does not fit its schema or the folder holds other files.
    """
    files, scope = {}, scope_of(values)
    for name, objects in manifests(values).items():
        for manifest in objects:
            validate(manifest, values["kubernetes"])
        files[name] = yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120)
    documents = {f"iam/{name}": document for name, document in _template("iam.yaml", scope)[0].items()}
    documents["grafana/dashboard"] = dashboard(scope)
    files |= {f"{name}.json": json.dumps(document, indent=1) + "\n" for name, document in documents.items()}
    _clear(out)
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content, encoding="utf-8")
    return [out / name for name in files]


def dashboard(scope: dict[str, Any]) -> dict[str, Any]:
    """Grafana's form of templates/dashboard.yaml: two panels side by side, one line for each server."""
    board: dict[str, Any] = _template("dashboard.yaml", scope)[0]
    panels = board["panels"] | board.pop("panels_of")[scope["server"]["engine"]]
    board["panels"] = [
        {
            "id": number,
            "type": "timeseries",
            "title": title,
            "datasource": {"type": "prometheus", "uid": "$source"},
            "gridPos": {"x": number % 2 * 12, "y": number // 2 * 8, "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "legendFormat": "{{service}} {{k}}", "expr": panel["expr"]}],
        }
        for number, (title, panel) in enumerate(panels.items())
    ]
    return board


def validate(manifest: dict[str, Any], kubernetes: str) -> None:
    """Raise UserError if a manifest has an unknown field, a wrong type, or a kind that the version lacks.

    The schemas are those of the package kubernetes-validate, in their strict form.
    """
    if manifest["kind"] in _CUSTOM:
        return
    # an extra that only rendering needs
    try:
        from kubernetes_validate import utils  # noqa: PLC0415
    except ImportError as error:
        raise UserError("kubernetes-validate is missing; run pip install 'trnspec[deploy]'") from error
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    try:
        used = utils.validate(manifest, kubernetes, strict=True)
    except utils.ValidationError as error:
        where = ".".join(map(str, error.absolute_path)) or "its top"
        raise UserError(f"{name} does not fit Kubernetes {kubernetes} at {where}: {error.message}") from error
    except utils.SchemaNotFoundError as error:
        raise UserError(f"Kubernetes {kubernetes} has no {manifest['apiVersion']} {manifest['kind']}") from error
    except (utils.VersionNotSupportedError, IndexError, ValueError) as error:
        raise UserError(f"no schemas of Kubernetes {kubernetes}; name one up to {utils.latest_version()}") from error
    # the package takes an older version's schemas silently
    if used != kubernetes:
        raise UserError(f"no schemas of Kubernetes {kubernetes}, only of {used}; change the version")


class _Plain(yaml.SafeDumper):
    """YAML without anchors: equal parts are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _clear(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder as --out")
    if out.exists() and any(out.iterdir()) and not (out / _MARK).is_file():
        raise UserError(f"{out} holds files that are not rendered manifests; give an empty or new folder")
    for folder in _FOLDERS:
        shutil.rmtree(out / folder, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()


def main(arguments: list[str]) -> None:
    """The last line of stdout is the folder."""
    parser = argparse.ArgumentParser(prog="python -m deploy.render", description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=Path, default=DEFAULTS, help="values file (default: deploy/values.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a value; repeatable")
    parser.add_argument("--out", type=Path, required=True, help="folder of the manifests")
    options = parser.parse_args(arguments)
    for file in render(load_values(options.values, options.set), options.out):
        print(file)
    print(options.out)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
