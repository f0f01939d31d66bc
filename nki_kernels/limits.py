"""The limits of one launch. The host functions of kernels refuse more; the model splits its work by them."""

# rows of noise, samples and fused layers: each on a partition
ROWS = 128
# rows of the sums above thresholds
SUM_ROWS = 32
# new rows per sequence for attention
CANDIDATES = 32
# keys between two updates of the running max: a block table covers full chunks
CHUNK = 1024
# bytes of the keys between two updates of the running max, for one head dimension: 4096 of bf16, 2048 of fp32
GROUP_BYTES = 8192
# entries of a launch's block table, B * S / 128: SBUF holds their page indices
TABLE_ENTRIES = 16384
# last pages of a pool, one for each core of a launch: rows without a page go there, and no block table names them
SPARE_PAGES = 2
# rows of a pool, pages * G * 128: indices are computed in fp32, which is exact below
POOL_ROWS = 1 << 24
# the logit of an id that must not be sampled: finite, because sums multiply it by 0
FORBIDDEN = -1e25
# floor that disables filtering but still excludes FORBIDDEN ids
NO_FLOOR = FORBIDDEN / 2
# largest hidden size and largest intermediate size of prompt kernels, each as (bf16, fp32): transposed rows fit SBUF
PROMPT_DEPTH, PROMPT_INNER = (5120, 4096), (12800, 8192)


def attention_limit_error(batch: int, group_rows: int, length: int, pool_rows: int) -> str:
    """Why a launch of attention cannot serve B sequences of `length` positions; "" if it can.

    `group_rows` are the (H / G) * N rows of a kv head, `pool_rows` the rows (pages * G * 128) of a pool.
    """
    if group_rows > ROWS:
        return f"a kv head has {group_rows} rows, at most {ROWS} fit the partitions: raise tp or lower k"
    entries = batch * -(-length // CHUNK) * (CHUNK // 128)
    if entries > TABLE_ENTRIES:
        return (
            f"{batch} sequences of {length} positions have {entries} block table entries, at most {TABLE_ENTRIES} fit "
            "SBUF: lower the batch or max-len"
        )
    if pool_rows >= POOL_ROWS:
        return f"a pool has {pool_rows} rows, fewer than {POOL_ROWS} can be addressed: use fewer pages or raise tp"
    return ""
