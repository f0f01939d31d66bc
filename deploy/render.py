"""`python -m deploy.render --values V --out DIR`: every manifest, a kustomize base and the IAM policies.

DIR/base/   what runs all the time, and kustomization.yaml over it
DIR/jobs/   what is run once and in this order: compile-*, load-test, quality
DIR/iam/    policy documents of the roles, and the trust policy
DIR/grafana/  a dashboard of the servers' metrics, to import
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy import claims, dashboard, iam, jobs, network, router, server, storage
from deploy.pods import Manifest
from deploy.schema import validate
from deploy.values import Values, load_values
from model.errors import UserError, run_cli

_MARK = "kustomization.yaml"
_DEFAULT = Path(__file__).with_name("values.yaml")


def namespace(values: Values) -> Manifest:
    """The namespace. It enforces `baseline`; all pods but the servers' keep `restricted` (see deploy.server)."""
    levels = {"enforce": "baseline", "audit": "restricted", "warn": "restricted"}
    marks = {f"pod-security.kubernetes.io/{mode}": level for mode, level in levels.items()}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": values.namespace, "labels": marks}}


def base(values: Values) -> dict[str, list[Manifest]]:
    """The manifests of the base by file name."""
    found = {
        "namespace.yaml": [namespace(values)],
        "network.yaml": network.policies(values),
        "service-accounts.yaml": iam.service_accounts(values),
        "bucket.yaml": [storage.volume(values), storage.claim(values)],
        "devices.yaml": [claims.claim_template(values)],
    }
    for variant in server.VARIANTS:
        made = (server.deployment, server.service, server.disruption_budget)
        found[f"{variant}.yaml"] = [make(values, variant) for make in made]
    # custom resources: the package of Kubernetes' schemas has none of them
    return found | ({"router.yaml": objects} if (objects := router.objects(values)) else {})


def once(values: Values) -> dict[str, list[Manifest]]:
    """The Jobs by file name."""
    return {
        **{f"compile-{v}.yaml": [jobs.compile_bundle(values, v)] for v in server.VARIANTS},
        "load-test.yaml": [jobs.load_test(values)],
        "quality.yaml": [jobs.quality(values)],
    }


def kustomization(values: Values, files: list[str]) -> Manifest:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "labels": [{"pairs": {"app.kubernetes.io/part-of": values.name}}],
        "resources": files,
    }


def render(values: Values, out: Path) -> list[Path]:
    """Write everything; each manifest is validated first, and nothing of an earlier render stays.

    Raises UserError when a manifest does not fit its schema or the folder holds something else.
    """
    files: dict[str, str] = {}
    for folder, made in (("base", base(values)), ("jobs", once(values))):
        for name, manifests in made.items():
            for manifest in manifests:
                if manifest["kind"] not in router.KINDS:
                    validate(manifest, values.kubernetes)
            files[f"{folder}/{name}"] = _yaml(manifests)
    files[f"base/{_MARK}"] = _yaml([kustomization(values, sorted(base(values)))])
    documents: dict[str, Any] = iam.policies(values) | {"trust": iam.trust()}
    files |= {f"iam/{name}.json": json.dumps(document, indent=1) + "\n" for name, document in documents.items()}
    files["grafana/dashboard.json"] = json.dumps(dashboard.dashboard(values), indent=1) + "\n"
    _clear(out)
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in files]


def _yaml(manifests: list[Manifest]) -> str:
    return yaml.dump_all(manifests, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """YAML without anchors: equal parts are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _clear(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder as --out")
    if out.exists() and any(out.iterdir()):
        if not (out / "base" / _MARK).is_file():
            raise UserError(f"{out} holds something else than rendered manifests; give an empty or new folder")
        for folder in ("base", "jobs", "iam", "grafana"):
            shutil.rmtree(out / folder, ignore_errors=True)


def main(arguments: list[str]) -> None:
    """The last line of stdout is the folder."""
    parser = argparse.ArgumentParser(prog="python -m deploy.render", description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=Path, default=_DEFAULT, help="values file (default: deploy/values.yaml)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a value; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the manifests")
    options = parser.parse_args(arguments)
    for file in render(load_values(options.values, options.set), options.out):
        print(file)
    print(options.out)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
