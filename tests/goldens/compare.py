"""How a tree differs from the goldens: ids, log-probabilities, accepted drafts, plans, simulated times."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.goldens.cases import CLASSES

# differences of logits that another order of sums explains: of log-probabilities, and of a near-tie's two scores
LOGPROB_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
MARGIN_TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2}
TIME_TOLERANCE = 0.01
Arrays = dict[str, np.ndarray]


class Setting(NamedTuple):
    """A target, how it is built, the requests of each class, and the drafters, of which the first gives the record."""

    model: str
    dtype: str
    tp: int
    k: int
    count: int
    drafters: tuple[str, ...]


def split(arrays: Arrays) -> list[tuple[np.ndarray, ...]]:
    """Of each request its ids, log-probabilities of them and of the prompt, and, where recorded, its margins."""
    counts = arrays["counts"].astype(int)
    ends = np.cumsum(counts[:, 0])[:-1]
    parts = [np.split(arrays["ids"], ends)]
    rows = np.split(arrays["logprobs"], np.cumsum(counts[:, 1:].ravel())[:-1])
    parts += [rows[::2], rows[1::2]]
    parts += [np.split(arrays["margins"], ends)] if "margins" in arrays else []
    return list(zip(*parts, strict=True))


def compare_ids(name: str, setting: Setting, old: Arrays, new: Arrays) -> bool:
    """Print how a setting's requests differ; whether no difference is larger than another order of sums explains.

    A request is compared up to its first different id: the texts behind it are different ones.
    """
    largest, lines, good = 0.0, [], not new["different"].any()
    for request, (before, after) in enumerate(zip(split(old), split(new), strict=True)):
        ids, others = before[0].tolist(), after[0].tolist()
        both = min(len(ids), len(others))
        same = next((n for n in range(both) if ids[n] != others[n]), both)
        for rows, other_rows in ((before[1][:same], after[1][:same]), (before[2], after[2])):
            if rows.size:
                largest = max(largest, float(np.nanmax(np.abs(rows - other_rows))))
        if ids != others:
            margin = abs(float(before[3][same])) if same < both else np.inf
            good &= margin <= MARGIN_TOLERANCE[setting.dtype]
            logprobs = ", ".join(str(part[1][same, 0]) for part in (before, after) if same < len(part[1]))
            cells = [f"{CLASSES[request // setting.count]} {request}", same, *ids[same : same + 1]]
            cells += [*others[same : same + 1], f"{margin:.2e}", logprobs or "not recorded"]
            lines.append(" | ".join(map(str, cells)))
    good &= largest <= LOGPROB_TOLERANCE[setting.dtype]
    print(f"\n{name}: {len(old['counts'])} requests, {len(old['ids'])} ids; requests with a different id {len(lines)}, "
          f"largest difference of a log-probability {largest:.2e}: {'ok' if good else 'FAILS'}")  # fmt: skip
    if lines:
        print("  request | position | before | after | margin | log-probabilities", *lines, sep="\n  ")
    for number, drafter in enumerate(setting.drafters[1:], 1):
        print(f"  {drafter}: {new['different'][number]} requests differ from {setting.drafters[0]} in this tree")
        for kind, pair in enumerate(zip(old["accepted"][number], new["accepted"][number], strict=True)):
            shown = [f"{accepted.tolist()} of {offered[0]}" for offered, accepted in pair]
            print(f"    {CLASSES[kind]}: accepted by position {' -> '.join(dict.fromkeys(shown))}")
    return bool(good)


def compare_plans(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Print the graphs of each spec before and after, those of one change of counts as one; nothing fails."""
    print("\ncounts: inputs, outputs, weights, state, collectives")
    print("| plan | graphs | equal | changed | gone | new | bytes per rank |")
    for name, plan in old.items():
        before, after = plan["graphs"], new[name]["graphs"]
        both = before.keys() & after.keys()
        equal = sum(before[g] == after[g] for g in both)
        sizes = [" + ".join(f"{v:,}" for v in p["bytes_per_rank"].values()) for p in (plan, new[name])]
        print(f"| {name} | {len(before)} -> {len(after)} | {equal} | {len(both) - equal} | {len(before) - len(both)} | "
              f"{len(after) - len(both)} | {' -> '.join(dict.fromkeys(sizes))} |")  # fmt: skip
        changes: dict[str, list[str]] = {}
        for g in sorted(both):
            if before[g][1:] != after[g][1:]:
                changes.setdefault(f"{before[g][1:]} -> {after[g][1:]}", []).append(g)
        for change, graphs in changes.items():
            print(f"    {graphs[0]} and {len(graphs) - 1} more: {change}")
    return True


def compare_kernels(old: dict[str, float], new: dict[str, float]) -> bool:
    """Print the cases whose simulated time differs, that are gone, that are new; whether all times are near."""
    # on the tag verify_attention_kernel was the contiguous kernel, which is gone: its paged kernel has the name now
    now = "verify_attention_kernel"
    old = {c.replace("verify_attention_paged_kernel", now): us for c, us in old.items() if not c.startswith(now)}
    changes = {case: new[case] / us - 1 for case, us in old.items() if case in new}
    rise = max(changes.values(), default=0.0)
    slower, faster = (sum(sign * change > TIME_TOLERANCE for change in changes.values()) for sign in (1, -1))
    print(f"\n| kernels | {len(old)} cases before, {len(new)} after, {len(changes)} in both | largest rise {rise:+.3%} "
          f"| beyond {TIME_TOLERANCE:.0%}: {slower} slower, {faster} faster | "
          f"{'FAILS' if slower + faster else 'ok'} |")  # fmt: skip
    for case in (*old, *(new.keys() - old.keys())):
        if case not in new or case not in old:
            print(f"    {'gone' if case in old else 'new'}: {case}")
        elif changes[case]:
            print(f"    {case}: {old[case]:.3f} -> {new[case]:.3f} us, {changes[case]:+.2%}")
    return not slower + faster
