"""Whether the fields of a manifest agree: sizes with graphs, graphs with models, files with both.

Every number that a loader uses is held against a second place, so that an edited one is noticed even where its
author could write a new digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from model.bundle.layer_shapes import differences
from model.bundle.schema import (
    DECODE,
    DRAFT,
    FUSED,
    MASKED,
    PREFILL,
    UNFILTERED,
    VERIFY,
    Wrong,
    kind_of,
    roles_in,
    shown,
    step_tag,
)
from model.drafting import KINDS, recorded
from model.tree import parse_tree

_TENSOR = {"bf16": "bfloat16", "fp32": "float32"}
# the vocabulary that ranks divide where it is not the target's
_DRAWN = {"eagle3": "draft_vocab_size"}
_HLO = "hlo/{tag}_bk{bucket}.hlo.pb"


def check_agreement(manifest: dict[str, Any], config_hash: str) -> None:
    """Raise Wrong for the first two fields that contradict each other; the types have been checked.

    `config_hash` is the digest of the flags and models that the manifest holds.
    """
    if difference := next(_differences(manifest, config_hash), None):
        raise Wrong(difference)


def _differences(m: dict[str, Any], config_hash: str) -> Iterator[str]:
    k, spec, weights = m["k"], m["spec"], m["weights"]
    expected = {
        "rows": k + 1,
        "speculation_length": k + 1 if k else 0,
        "config_hash": config_hash,
        "draft_tp": (spec.get("draft_tp") or m["tp"]) if _has_draft(m) else 0,
    } | {name: spec.get(name) for name in ("k", "tp", "batch", "max_len", "dtype", "kv_shard")}
    for name, value in expected.items():
        if type(m[name]) is not type(value) or m[name] != value:
            yield f"{name} is {shown(m[name])} and its other fields say {shown(value)}"
    if _ks(m) != sorted({0, k, *_fewer(spec)}) or max(_ks(m)) != k:
        yield f"ks are {_ks(m)}, its other fields say k {k} and fewer {shown(spec.get('fewer'))}"
    if m["buckets"] != sorted(set(m["buckets"])) or m["buckets"][-1] != m["max_len"]:
        yield f"buckets are {shown(m['buckets'])} that do not rise to max_len {m['max_len']}"
    if (m["neff"] == "none") != (m["toolchain"] == "cpu"):
        yield f"neff is {m['neff']} and the toolchain {m['toolchain']}"
    if weights and _cut_for(weights) != (m["tp"], m["dtype"], m["draft_tp"], _draft_head_ranks(m)):
        yield "weights were cut for other ranks or another dtype than the bundle's"
    if "tree" in spec and (clause := _tree(m)):
        yield f"the tree is {shown(spec['tree'])}, and {clause}"
    yield from _models(m)
    yield from _graphs(m)
    yield from _files(m)


def _ks(m: dict[str, Any]) -> list[int]:
    """Every k that a step may have, rising; a bundle of an earlier build has one beside 0 and does not list them."""
    ks: list[int] = m.get("ks", sorted({0, m["k"]}))
    return ks


def _fewer(spec: dict[str, Any]) -> list[int]:
    text = str(spec.get("fewer", ""))
    return [int(part) for part in text.split(",")] if re.fullmatch(r"[0-9]{1,2}(,[0-9]{1,2})*", text) else []


def _tree(m: dict[str, Any]) -> str:
    """What is wrong with the tree that the flags name, if anything."""
    try:
        tree = parse_tree(str(m["spec"]["tree"]))
    except ValueError as error:
        return str(error)
    if clause := recorded(m).of_kind.refusal(tree.leaves_only):
        return f"the drafter {recorded(m).kind} {clause}"
    return "" if tree.k == m["k"] else f"k is {m['k']}"


def _paths(m: dict[str, Any]) -> int:
    """The caches that a sequence may have: one for each path of the tree."""
    return len(parse_tree(m["spec"]["tree"]).branches) if "tree" in m["spec"] and not _tree(m) else 1


def _models(m: dict[str, Any]) -> Iterator[str]:
    kind, mask = recorded(m).kind, recorded(m).mask_id
    if m["spec"].get("drafter", kind) != kind:
        yield f"the drafter is {kind} and the flags say {shown(m['spec']['drafter'])}"
    if (m["k"] > 0) != (kind != "none") or m["k"] > (KINDS[kind].limit or m["k"]):
        yield f"k is {m['k']} and the drafter {kind}"
    if ("config" in m["models"]["draft"]) != _has_draft(m):
        yield f"the drafter is {kind} and the draft has {'no' if _has_draft(m) else 'a'} configuration"
        return
    yield from _heads(m)
    if (mask is not None) != (kind == "parallel") or (mask or 0) >= m["models"]["target"]["config"]["vocab_size"]:
        yield f"the drafter is {kind} and its mask rows have the id {mask}"
    for role, ranks, head_ranks in _roles(m):
        config = m["models"][role]["config"]
        ids = _DRAWN.get(kind if role == "draft" else "", "vocab_size")
        sizes = {"hidden_size": ranks, "intermediate_size": ranks, ids: head_ranks}
        if not ranks or m["tp"] % ranks or any(config.get(size, n) % n for size, n in sizes.items()):
            yield f"the {role}'s sizes cannot be cut for {ranks} of {m['tp']} ranks"
        if config.get("num_attention_heads", 0) % config.get("num_key_value_heads", 1):
            yield f"the {role}'s query heads are no multiple of its kv heads"
        if m["max_len"] > config.get("max_position_embeddings", m["max_len"]):
            yield f"max_len is {m['max_len']}, beyond the {role}'s {config['max_position_embeddings']} positions"
        if config["vocab_size"] != m["models"]["target"]["config"]["vocab_size"]:
            yield "target and draft have different vocabularies"
        if any(token >= config["vocab_size"] for token in config.get("eos_token_ids", ())):
            yield f"eos_token_ids of the {role} lie outside of its vocabulary"


def _heads(m: dict[str, Any]) -> Iterator[str]:
    """Heads on the target's states: that they fit it, and draft as many as a step asks for."""
    if not _has_draft(m) or recorded(m).of_kind.decoder:
        return
    target, heads = m["models"]["target"]["config"], m["models"]["draft"]["config"]
    if heads.get("target_hidden_size", heads["hidden_size"]) != target["hidden_size"]:
        yield "the draft reads states of another width than the target's"
    if any(tap >= target["num_hidden_layers"] for tap in heads.get("taps", ())):
        yield f"the draft reads the states {heads['taps']} of a target with {target['num_hidden_layers']} layers"
    if m["k"] > heads.get("heads", m["k"]):
        yield f"k is {m['k']} and the draft has {heads['heads']} heads"
    if heads.get("draft_vocab_size", 0) > target["vocab_size"]:
        yield "the draft has more ids than the target"


def _roles(m: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Each model, the ranks that split it, and those that split its head."""
    return [("target", m["tp"], m["tp"]), ("draft", m["draft_tp"], _draft_head_ranks(m))][: 1 + _has_draft(m)]


def _draft_head_ranks(m: dict[str, Any]) -> int:
    """The ranks that split the draft's head: all, where the flags say so, otherwise those of its groups."""
    ranks: int = m["tp"] if m["spec"].get("draft_head") == "all" else m["draft_tp"]
    return ranks


def _cut_for(weights: dict[str, Any]) -> tuple[Any, ...]:
    draft_ranks = weights["draft_ranks"]
    return weights["ranks"], weights["dtype"], draft_ranks, weights.get("draft_head_ranks", draft_ranks)


def _has_draft(m: dict[str, Any]) -> bool:
    """Whether there is a draft with weights beside the target."""
    return recorded(m).of_kind.has_model


def _graphs(m: dict[str, Any]) -> Iterator[str]:
    k_of = _tags(m)
    wanted = {(tag, bucket) for tag in k_of for bucket in m["buckets"]}
    listed = [(g["tag"], g["bucket"]) for g in m["graphs"]]
    # prompts below the first bucket may have graphs of their own
    short = {bucket for tag, bucket in listed if tag == PREFILL and bucket < m["buckets"][0]}
    wanted |= {(tag, bucket) for tag in k_of if kind_of(tag) == PREFILL for bucket in short}
    if len(listed) != len(wanted) or set(listed) != wanted:
        yield f"graphs has {len(listed)}, expected one for each of {len(k_of)} tags and {len(m['buckets'])} buckets"
    for graph in m["graphs"]:
        at = f"graph {graph['tag']}_bk{graph['bucket']}"
        k = k_of.get(graph["tag"], 0)
        if graph["k"] != k:
            yield f"{at} has k {graph['k']}, expected {k}"
        if graph["file"] != _HLO.format(**graph):
            yield f"{at} is in {shown(graph['file'])}, which has another name"
        yield from (f"{at}: {clause}" for clause in _border(graph, m, k))
        yield from (f"{at}: {clause}" for clause in _inside(graph, m))


def _tags(m: dict[str, Any]) -> dict[str, int]:
    """The tag of every graph that a bundle has, and its k."""
    # steps that filter nothing may have graphs of their own, which are faster; without them the others serve
    own = any(graph["tag"].endswith(UNFILTERED) for graph in m["graphs"])
    steps = {step_tag(k, m["k"]): k for k in _ks(m)}
    unfiltered = {tag + UNFILTERED: k for tag, k in steps.items()} if own else {}
    halves = {step_tag(k, m["k"], part): k for part in (DRAFT, VERIFY) for k in _ks(m) if k} if _has_draft(m) else {}
    masked = steps
    # those of an earlier build filter all, and fused steps are among them
    if any(graph["tag"].endswith(UNFILTERED + MASKED) for graph in m["graphs"]):
        masked = {tag: k for tag, k in (steps | halves).items() if kind_of(tag) != FUSED or not halves}
        masked |= {tag + UNFILTERED: k for tag, k in masked.items()}
    masked = masked | {PREFILL: m["k"]}
    tags = {PREFILL: m["k"]} | steps | unfiltered
    tags |= halves if m["spec"].get("separate") is True else {}
    return tags | ({tag + MASKED: k for tag, k in masked.items()} if m["spec"].get("structured") is True else {})


def _border(graph: dict[str, Any], m: dict[str, Any], k: int) -> Iterator[str]:
    part, masked = kind_of(graph["tag"]), graph["tag"].endswith(MASKED)
    prompt = part == PREFILL
    # a host that drafts brings the drafts of a step with its input ids
    ids = 1 if _has_draft(m) and part != VERIFY else k + 1
    batch, count = (1, graph["bucket"]) if prompt else (m["batch"], ids)
    mask = m["max_len"] if prompt else graph["bucket"]
    inputs = {
        "input_ids": [batch, count],
        "attention_mask": [batch, graph["bucket"]],
        "position_ids": [batch, count],
        "seq_ids": [batch],
        "sampling_params": [batch, 3],
        "allowed": _masks(graph, m, batch) if masked else None,
    }
    outputs = (
        {"candidates": [batch, k + 1]}
        if part == DRAFT
        else {
            "accepted_tokens": [batch, k + 1],
            "next_input_ids": [batch, 1],
            "next_attention_mask": [batch, mask],
            "next_pos_ids": [batch, 1],
            "scores": [batch, k + 1, 2] if masked else None,
        }
    )
    for field, wanted in (("inputs", inputs), ("outputs", outputs)):
        shapes = {name: shape for name, shape, _ in graph[field]}
        for name, shape in wanted.items():
            if shapes.get(name) != shape:
                yield f"{name} has shape {shapes.get(name)}, the bundle's sizes ask for {shape}"


def _masks(graph: dict[str, Any], m: dict[str, Any], batch: int) -> list[int]:
    """The shape of a graph's masks: one a row where there are drafts, one a sequence elsewhere."""
    words = -(-m["models"]["target"]["config"]["vocab_size"] // 32)
    one, each = [batch, words], [batch, graph["k"] + 1, words]
    part, shapes = kind_of(graph["tag"]), [shape for name, shape, _ in graph["inputs"] if name == "allowed"]
    # a fused step of an earlier build has one too
    return one if part in (PREFILL, DECODE) or (part == FUSED and one in shapes) else each


def _inside(graph: dict[str, Any], m: dict[str, Any]) -> Iterator[str]:
    inside, alone = roles_in(graph["tag"], recorded(m).of_kind), kind_of(graph["tag"]) == DECODE
    roles = [row for row in _roles(m) if row[0] in inside]
    kinds = {"float32", "bfloat16"} - {_TENSOR[m["dtype"]]}
    if any(dtype in kinds for field in ("weights", "state") for _, _, dtype in graph[field]):
        yield f"a weight or cache is not of dtype {m['dtype']}"
    shapes = {name: shape for name, shape, _ in graph["weights"]}
    if len(shapes) != len(graph["weights"]):
        yield "two weights have one name"
    of_kind, layers = recorded(m).of_kind, 0
    for role, ranks, head_ranks in roles:
        config, prefix = m["models"][role]["config"], f"{role}_model." if _has_draft(m) else ""
        kind = recorded(m).kind if role == "draft" else "chain"
        yield from differences(kind, shapes, prefix, config, ranks, head_ranks)
        layers += config.get("num_hidden_layers", of_kind.head_layers)
    caches = 2 * layers + (0 if alone else len(of_kind.kept))
    # a chain of an earlier build made a pass more and remembered no id
    earlier = 2 * layers if of_kind is KINDS["chain"] else caches
    # a tree of an earlier build had one cache of the target a sequence
    sizes = {"target": ([m["batch"]], [m["batch"] * _paths(m)]), "draft": ([m["batch"]],)}
    if len(graph["state"]) not in (caches, earlier) or any(
        shape[:1] not in sizes["draft" if name.startswith("draft_model.") else "target"]
        for name, shape, _ in graph["state"]
    ):
        yield f"its caches are not {caches} of {m['batch']} sequences"


def _files(m: dict[str, Any]) -> Iterator[str]:
    wanted = [_HLO.format(**graph) for graph in m["graphs"]] + ["neuron_config.json"]
    if m["weights"]:
        wanted += [f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(m["tp"])]
    if m["neff"] == "model.pt":
        wanted.append("model.pt")
    for name in wanted:
        if name not in m["files"]:
            yield f"files lacks {name}"
