"""Measurements that others published for Qwen3-32B and its drafts: the only ones here that are not ours.

Source: the blog and logs of tomasruizt on draft models in vLLM: one H100, bf16, greedy decoding,
one request at a time. Neither the spread nor the number of runs is given.
"""

from __future__ import annotations

from bench.tune.acceptance import Acceptance, from_lengths

SOURCE = "published: tomasruizt, vLLM on one H100, greedy, one request at a time"

# tokens a step for k = 1..6, the target's own token included
MT_BENCH_LENGTHS = (1.77, 2.35, 2.80, 3.15, 3.40, 3.58)
# time per token without over with speculation, the same runs
MT_BENCH_SPEEDUPS = (1.55, 1.90, 2.11, 2.22, 2.24, 2.22)
INSTRUCT_CODER_LENGTHS = (1.72, 2.24, 2.57, 2.85, 3.06, 3.17)
# the same for the heads of RedHatAI/Qwen3-32B-speculator.eagle3, whose speed-up at k = 4 was 2.10
EAGLE3_MT_BENCH_LENGTHS = (1.68, 2.07, 2.28, 2.39, 2.44, 2.46)
# share of steps in which each position was accepted, from the run with k = 6
MT_BENCH_SHARES = (0.7397, 0.5588, 0.4334, 0.3398, 0.2809, 0.2305)
INSTRUCT_CODER_SHARES = (0.7193, 0.4907, 0.3609, 0.2618, 0.1929, 0.1427)
# milliseconds of one draft pass and one target pass in the same setting
H100_DRAFT_MS, H100_TARGET_MS = 2.50, 24.36


def workloads() -> list[Acceptance]:
    """The two published tables of acceptance lengths, for the draft that they were measured with."""
    return [
        from_lengths("MT-Bench", "1.7B", MT_BENCH_LENGTHS, SOURCE),
        from_lengths("InstructCoder", "1.7B", INSTRUCT_CODER_LENGTHS, SOURCE),
    ]
