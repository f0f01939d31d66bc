"""Trainium2 (NeuronCore-v3): the values of the chip description, each with its source."""

from __future__ import annotations

from nkisim import geometry
from nkisim.timeline.chip import (
    A2,
    A3,
    CHIPBOOST,
    COLLECTIVE_DOC,
    CS149,
    CS149_PROFILES,
    DMA_OVERVIEW,
    GATHERS,
    GLOSSARY,
    KDA,
    KERNEL_OPT,
    LEDGER,
    LNC,
    MEGAKERNEL,
    NAKB,
    NO_SOURCE,
    PUBLIC_PROFILES,
    REDUCES,
    RMSNORM_QUANT,
    SHARED_API,
    TILED,
    Chip,
    documented,
    inferred,
    measured,
    profile,
)

TRN2 = Chip(
    name="trn2",
    geometry=geometry.CORE_V3,
    tensor_ghz=documented(2.4, "GHz", A3),
    tensor_min_cycles=inferred(64, "cycles", f"{A2}: stated for v2 only", 32, 128),
    # matmul pitch 429 to 430 ns for 1024 cycles
    tensor_issue_cycles=profile(7, "cycles", KERNEL_OPT, 5, 8),
    # matmul duration 590 to 597 ns for a pitch of 429 ns
    tensor_drain_ns=profile(163, "ns", KERNEL_OPT, 160, 168),
    # one fp32 call runs as two load and multiply pairs (fp32_mode LOW_HIGH)
    tensor_fp32_passes=profile(2, "passes", KERNEL_OPT, 2, 2),
    tensor_fp32_cycles_per_column=documented(2, "cycles per pass", A2),
    tensor_load_columns_per_cycle=documented(4, "columns per cycle", A2),
    tensor_strided_columns_per_cycle=measured(
        0.5, "columns per cycle", f"{A2}: a stride halves the rate; {NAKB}", 0.75, 0.5
    ),
    tensor_tiled_rate=measured(1.08, "columns per cycle", TILED, 1.2, 1),
    tensor_rotated_rate=measured(1.38, "columns per cycle", TILED, 1.6, 1.2),
    # isolated call: load start to last result 1.13 us, first multiply 665 ns
    tensor_load_exposed_ns=profile(80, "ns", KERNEL_OPT, 70, 190),
    tensor_throttle_share=measured(0.5, "of the clock", f"{GLOSSARY}: about 50 %; {PUBLIC_PROFILES}", 0.55, 0.5),
    tensor_throttle_window_ns=documented(3000, "ns", GLOSSARY),
    # both count the product of busy time and rows / 128: kernels over 1, 64 or 80 rows never warm up although they are
    # 95 % busy, while products over 64 rows stay fast after 32 transposes
    tensor_lift_work=measured(0.7, "of the window's rows", f"{PUBLIC_PROFILES}; {NAKB}", 0.24, 0.75),
    # between the two: a product over 64 rows, whose clock records of batched products contradict each other about
    tensor_throttle_work=measured(0.5, "of the window's rows", f"{GLOSSARY}; {PUBLIC_PROFILES}; {KDA}", 0.24, 0.55),
    tensor_bf16_tflops=documented(78.6, "TFLOP/s per core", A3),
    tensor_fp32_tflops=documented(19.7, "TFLOP/s per core", A3),
    tensor_fp8_tflops=documented(157.3, "TFLOP/s per core", A3),
    vector_ghz=documented(0.96, "GHz", A3),
    # copies and tensor_tensor of 512 elements take 153 to 167 ns more than their stream
    vector_latency_ns=profile(158, "ns", KERNEL_OPT, 150, 180),
    # and the next independent instruction starts 72 to 76 ns after the stream
    vector_gap_ns=profile(74, "ns", f"{KERNEL_OPT}; {PUBLIC_PROFILES}", 70, 100),
    # scalar_tensor_tensor with a (P, 1) operand: 55 ns more
    vector_pointer_ns=profile(55, "ns", RMSNORM_QUANT, 45, 70),
    vector_min_cycles=documented(64, "cycles", SHARED_API),
    vector_wide_elements=documented(4, "elements per cycle", A3),
    vector_sbuf_elements=profile(2, "elements per cycle", KERNEL_OPT, 2, 2),
    vector_half_wide_elements=documented(2, "elements per cycle", A3),
    vector_base_elements=profile(1, "elements per cycle", KERNEL_OPT, 1, 1),
    vector_mode_bytes=documented(8, "bytes per cycle", f"{A3}: four 16-bit elements, two of 32 bits"),
    # tensor_scalar of bf16 takes 1/4, 1/2 and 1 cycle an element with none, one and two (P, 1) operands
    vector_pointer_bytes=measured(4, "bytes per cycle and (P, 1) operand", NAKB, 2, 4),
    vector_strided_bytes=inferred(16, "bytes", f"{A2}: stride that halves the rate", 1e9, 16),
    vector_reciprocal_cycles=documented(8, "cycles per element", SHARED_API),
    # selective scans in fp32 (operators.py), cumsum of 2048 fp32 elements
    vector_scan_cycles=measured(1, "cycles per element", f"{KDA}; {NAKB}", 1, 2),
    # cumsum of bf16: 5.1 us for 2048 elements and their transfers
    vector_scan_cast_cycles=measured(1, "cycles per element", NAKB, 0, 1),
    # argsort of 128 and 512 elements: 80 ns for each max8 and nc_match_replace8 beyond the stream and the latency
    vector_eight_ns=measured(80, "ns", NAKB, 40, 110),
    vector_rng_cycles=inferred(1, "cycles per element", NO_SOURCE, 1, 4),
    scalar_ghz=documented(1.2, "GHz", A3),
    # ACTIVATE of 4096, 128 and 16384 elements: 290 ns beyond the stream
    scalar_latency_ns=profile(290, "ns", f"{DMA_OVERVIEW}; {PUBLIC_PROFILES}: 226 to 335", 226, 335),
    scalar_gap_ns=measured(130, "ns", f"{PUBLIC_PROFILES}: at most about 140", 75, 140),
    scalar_read_cycles=documented(64, "cycles", A2),
    scalar_table_load_ns=profile(1310, "ns", f"{DMA_OVERVIEW}; {RMSNORM_QUANT}", 370, 1340),
    scalar_tables_resident=inferred(1, "function sets", NO_SOURCE, 8, 1),
    gpsimd_ghz=documented(1.2, "GHz", A3),
    gpsimd_latency_ns=inferred(300, "ns", NO_SOURCE, 150, 1000),
    gpsimd_gap_ns=inferred(200, "ns", NO_SOURCE, 75, 800),
    gpsimd_cycles=inferred(1, "cycles per 32-bit element", f"{A2}: 16 lanes per 16 partitions", 0.5, 4),
    gpsimd_rsqrt_cycles=documented(4, "cycles per element", SHARED_API),
    gpsimd_search_cycles=inferred(4, "cycles per element", NO_SOURCE, 1, 16),
    gpsimd_gather_group_ns=inferred(300, "ns per 512 elements", NO_SOURCE, 75, 1000),
    gpsimd_partition_reduce_cycles=inferred(8, "cycles per element", NO_SOURCE, 2, 32),
    gpsimd_topk_cycles=documented(4, "cycles per element, plus one per result", "nki.isa.topk"),
    dma_engines=documented(16, "engines per core", DMA_OVERVIEW),
    dma_partitions_per_engine=documented(8, "partitions", DMA_OVERVIEW),
    # a depthwise convolution with rows of 12 bytes took five times as long as it would if its rows were dealt out
    dma_dealt_row_bytes=inferred(64, "bytes of a row", "no figure between 12 and 64 bytes is public", 1, 64),
    # pipelined streams reach 26 to 27.2 B/ns with about 9 ns a row; profiles of 2025 fit 24.1 and 8.2, and three
    # transfers of 1 MB in rows of 8000 bytes that take 8.9 us fit 22
    dma_bytes_per_ns=measured(
        26.0, "bytes per ns per engine", f"{DMA_OVERVIEW}; {PUBLIC_PROFILES}; {CS149_PROFILES}", 27.2, 22.0
    ),
    dma_descriptor_ns=measured(9, "ns per row", f"{KERNEL_OPT}; {PUBLIC_PROFILES}", 7, 11),
    # trigger to end less the data: 1.02 and 1.06 us for loads, 0.71 us for a store
    dma_load_lead_ns=profile(890, "ns", DMA_OVERVIEW, 740, 1300),
    dma_store_lead_ns=profile(560, "ns", DMA_OVERVIEW, 450, 1300),
    dma_tail_ns=profile(150, "ns", DMA_OVERVIEW, 100, 200),
    dma_trigger_ns=inferred(60, "ns of the issuing engine", NO_SOURCE, 30, 200),
    # profiles have one near every 0.5 us; but 64 KiB in rows of 512 bytes at 17.4 B/ns an engine are one every 235 ns
    dma_static_interval_ns=profile(235, "ns per dma", f"{KERNEL_OPT}; {PUBLIC_PROFILES}", 60, 500),
    # each of the two generators, at the sync and at the scalar engine
    dma_hwdge_interval_ns=documented(600, "ns per dma", A3),
    # one transfer into a row of a tile takes about 120 ns, one into 128 rows 670 ns whatever its bytes
    dma_swdge_start_ns=measured(85, "ns per dma", CHIPBOOST, 60, 110),
    dma_swdge_engine_ns=measured(36.5, "ns per dma engine that takes part", f"{CHIPBOOST}; {DMA_OVERVIEW}", 31, 45),
    # transfers that fill a tile follow each other faster than those that keep order within a tile
    dma_swdge_full_tile_share=measured(0.67, "of a transfer into part of a tile", CHIPBOOST, 0.6, 0.75),
    # copies, RMSNorms, sums and transposes take 0.58 to 0.62 us a transfer, and their loads 0.45
    dma_swdge_store_share=measured(1.25, "of a transfer into part of a tile", f"{CHIPBOOST}; {CS149}", 1, 1.35),
    # four gathers in a row take 4.8 us more than transfers without indices
    dma_index_ns=measured(1200, "ns per dma", NAKB, 600, 1800),
    # 76,800 transfers of one element each that all meet on one engine: 0.486 us each; plain products: 0.42 to 0.49
    dma_ring_ns=measured(450, "ns from transfer to transfer on one engine", f"{CHIPBOOST}; {CS149}", 400, 500),
    dma_generator_depth=inferred(4, "instructions that wait without blocking", NO_SOURCE, 16, 1),
    dma_transpose_hbm_share=documented(0.9, "of the copy rate", A3),
    dma_transpose_sbuf_share=documented(0.5, "of the copy rate", A3),
    cores_per_hbm_stack=documented(2, "cores", LNC),
    hbm_bytes_per_ns=measured(668, "bytes per ns per stack", NAKB, 725, 640),
    gpsimd_dma_bytes_per_ns=documented(153, "bytes per ns each way", A3),
    gpsimd_dma_latency_ns=inferred(700, "ns", NO_SOURCE, 300, 1500),
    semaphore_ns=profile(70, "ns", f"{KERNEL_OPT}, v5", 30, 200),
    dma_semaphore_ns=profile(305, "ns", DMA_OVERVIEW, 290, 320),
    core_semaphore_ns=measured(3100, "ns", NAKB, 1500, 4000),
    core_barrier_ns=inferred(1000, "ns", NO_SOURCE, 300, 3000),
    register_ns=inferred(50, "ns", NO_SOURCE, 10, 200),
    register_memory_ns=inferred(300, "ns", NO_SOURCE, 100, 2000),
    # the manual says 1 to 10 us
    collective_start_ns=measured(13000, "ns per collective", f"{REDUCES}; {COLLECTIVE_DOC}", 10000, 13800),
    collective_gather_start_ns=measured(24500, "ns per all-gather", GATHERS, 22000, 34000),
    # 64 ranks on 16 chips: 4.5 us more than four on one chip, over 30 hops; the manual says 1 to 2 us
    collective_hop_ns=measured(150, "ns per hop between chips", f"{LEDGER}; {COLLECTIVE_DOC}", 100, 1500),
    # beyond the least of the ledger: median 26.7 us, 90th percentile 117.5
    collective_wait_ns=measured(0, "ns for the slowest rank", LEDGER, 0, 117500),
    # hops as one ring over the chips (1) or along the sides of a torus (0)
    collective_ring_share=inferred(1, "of the way from torus to ring", NO_SOURCE, 0, 1),
    collective_bytes_per_ns=inferred(160, "bytes per ns per core", "1.28 TB/s of links over eight cores", 320, 80),
    launch_ns=measured(9000, "ns per launch of a graph", CHIPBOOST, 8000, 10000),
    # 11.6 to 12.5 us by the vendor's small kernels; three profiles: 12.4 to 13.3 us without any activity, and 1.7 to
    # 2.2 us of each engine's first instructions
    profiled_launch_ns=measured(12100, "ns per profiled launch", f"{NAKB}; {CS149_PROFILES}", 11000, 14500),
    host_dispatch_ns=measured(800_000, "ns per launch of a graph, on the host", MEGAKERNEL, 500_000, 1_000_000),
    compiler_window=measured(300, "instructions", f"{PUBLIC_PROFILES}: a few hundred", 300, 300),
    unmodelled_share=inferred(
        1, "of the latency", "bank conflicts, instruction fetch, refresh: no published figure", 0.95, 1.05
    ),
    # nine of ten of the rows that it was read off are within it, eight of ten of those that were not
    residual_share=measured(1.2, "times and part of the latency", NAKB, 1.2, 1.2),
)
