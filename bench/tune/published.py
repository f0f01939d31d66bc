"""Measurements that others published for Qwen3-32B and its drafts; all other numbers here are ours.

Source: the blog and logs of tomasruizt on draft models in vLLM: one H100, bf16, greedy decoding,
one request at a time. Neither the spread nor the number of runs is given.
"""

from __future__ import annotations

from bench.tune.acceptance import Acceptance, from_lengths

SOURCE = "published: tomasruizt, vLLM on one H100, greedy, one request at a time"

# tokens a step for k = 1..6, the target's own token included
MT_BENCH_LENGTHS = (1.77, 2.35, 2.80, 3.15, 3.40, 3.58)
INSTRUCT_CODER_LENGTHS = (1.72, 2.24, 2.57, 2.85, 3.06, 3.17)
# the same for the heads of RedHatAI/Qwen3-32B-speculator.eagle3, whose speed-up at k = 4 was 2.10
EAGLE3_MT_BENCH_LENGTHS = (1.68, 2.07, 2.28, 2.39, 2.44, 2.46)


def workloads() -> list[Acceptance]:
    """The two published tables of acceptance lengths, for the draft that they were measured with."""
    return [
        from_lengths("MT-Bench", "1.7B", MT_BENCH_LENGTHS, SOURCE),
        from_lengths("InstructCoder", "1.7B", INSTRUCT_CODER_LENGTHS, SOURCE),
    ]
