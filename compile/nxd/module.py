"""Our step with NxDI's inputs and outputs, as one torch module that ModelBuilder traces.

Parameters have the names of the weight files; caches are parameters that are aliased to outputs. NxDI's inputs are
ids, attention mask, position ids, seq_ids (the slot), sampling parameters, and two that we do not use. It has no min-p,
no seed, no k and no block table: min-p is off, a step accepts k drafts, a slot has blocks 1 + slot * L and on, and
noise is keyed by the slot and by how many prompts it has had, which is state of the graphs as the caches are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compile.graph.pair import drafts, grouped_state, make_pair, stage_of
from model.attention import KEY_TILE
from model.backing import REFERENCE
from model.dtypes import BY_NAME
from model.graph_io import StepInputs
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec, TensorSpec
from model.ops import Ops, iota, rows_inside
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.spec import BundleSpec

# NxDI's tags: it routes by the list of input shapes, so a pair has no step without drafts
PREFILL, FUSED, DECODE = "context_encoding_model", "fused_speculation_model", "token_generation_model"
# prompts that each slot has had
REQUEST_COUNTS = "request_counts"
