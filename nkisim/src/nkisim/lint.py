"""The linter: `nkisim lint PATH...` refuses kernels that the NKI compiler refuses."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nkisim import command
from nkisim.command import Parser
from nkisim.dialect.loops import RULES
from nkisim.dialect.rules import ERROR, WARNING, Rule, Scope
from nkisim.dialect.scope import scope_of
from nkisim.dialect.source import NotPython, Reach, Reached, kernel_nodes, kernels, load
from nkisim.policy import POLICIES, chosen
from nkisim.versions import VERSIONS


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One broken rule: where, which, and how to write it."""

    path: str
    line: int
    column: int
    rule: str
    severity: str
    message: str
    source: str
    kernel: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}:{self.column + 1}:"
        origin = f"[{self.rule}; {self.source}; in {self.kernel}]"
        return f"{where} {self.severity}: {self.message} {origin}"


def _rules_by_node(version: str) -> dict[type[ast.AST], list[tuple[Rule, str]]]:
    table: dict[type[ast.AST], list[tuple[Rule, str]]] = {}
    for rule in RULES:
        severity = rule.at(version)
        for node in rule.nodes if severity else ():
            table.setdefault(node, []).append((rule, str(severity)))
    return table


# the rules of a version that look at a node, each with its severity
RULES_BY_NODE = {version: _rules_by_node(version) for version in VERSIONS}


def source_files(paths: Iterable[Path]) -> list[Path]:
    """The Python files of the given files and folders."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [file.resolve() for file in files]


def lint(paths: Iterable[Path], nki: str = VERSIONS[0]) -> tuple[list[Finding], int]:
    """Check every kernel of the files by a version of the language; return the findings and the number of kernels."""
    reach, seen = Reach(), set()
    findings: set[Finding] = set()
    for path in source_files(paths):
        try:
            module = load(path)
        except NotPython as error:
            findings.add(Finding(_shown(path), error.line, 0, "syntax", ERROR, f"{error}; mend it", "Python", "-"))
            continue
        for owner, kernel in kernels(module):
            reach.kernel(owner, kernel)
            seen.add(id(kernel))
    for reached in reach.reached.values():
        findings.update(
            check(replace(reached, is_kernel=reached.is_kernel and id(reached.definition) not in reach.inner), nki)
        )
    return sorted(findings), len(seen)


def check(reached: Reached, nki: str = VERSIONS[0]) -> list[Finding]:
    """Apply every rule to one function or class statement."""
    definition, module = reached.definition, reached.module
    if isinstance(definition, ast.ClassDef):
        scope = Scope(module, in_function=False)
        return list(_apply(definition, scope, reached, nki))
    scope = scope_of(module, definition, reached.is_kernel, nki != VERSIONS[0])
    findings: list[Finding] = []
    for node in kernel_nodes(definition):
        findings += _apply(node, scope, reached, nki)
    return findings


def _apply(node: ast.AST, scope: Scope, reached: Reached, nki: str) -> list[Finding]:
    return [
        _finding(rule, node, (severity, broken), reached)
        for rule, severity in RULES_BY_NODE[nki].get(type(node), ())
        if (broken := rule.test(node, scope))
    ]


def _finding(rule: Rule, node: ast.AST, how: tuple[str, bool | str], reached: Reached) -> Finding:
    severity, broken = how
    message = broken if isinstance(broken, str) else rule.message
    line = getattr(node, "lineno", reached.definition.lineno)
    column = getattr(node, "col_offset", 0)
    path = _shown(reached.module.path)
    return Finding(path, line, column, rule.name, severity, message, rule.source, reached.kernel)


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# code that the policy vendor takes, with a warning
VENDOR_TAKES = frozenset({"kernel-in-kernel", "raw-enum"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the NKI compiler refuses, with a summary on stderr; exit with 1 if anything is refused."""
    parser = Parser(prog="nkisim lint", description=main.__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders with kernels")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="refuse warnings too")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="default", help="vendor warns of what it takes")
    parser.add_argument("--nki", choices=VERSIONS, default=chosen().nki, help="the version of the language")
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.paths if not path.exists()]
    if missing:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    findings, count = lint(options.paths, options.nki)
    if not count and not findings:
        parser.error(f"no kernel in {', '.join(map(str, options.paths))}; give files or folders with kernels")
    if options.policy == "vendor":
        findings = [replace(f, severity=WARNING) if f.rule in VENDOR_TAKES else f for f in findings]
    refused = [f for f in findings if options.strict or f.severity == ERROR]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(finding)
    print(f"{count} kernels, {len(refused)} refusals, {len(findings)} findings", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    command.run(main)
