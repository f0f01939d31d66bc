"""The limits of one launch. The host wrappers refuse more; the model splits its work by them."""

# rows of noise, draws and layers: each on a partition
ROWS = 128
# sequences of attention
SEQUENCES = 32
# rows of the sums above thresholds
SUM_ROWS = 32
# new rows of a sequence for attention
CANDIDATES = 32
# keys of attention between two merges: a block table has whole chunks
CHUNK = 1024
# the logit of an id that must not be drawn: finite, for sums multiply it by 0
FORBIDDEN = -1e25
# the floor of a row that keeps every other id
NO_FLOOR = FORBIDDEN / 2
# numbers of a row and of an inner row of the MLP that a prompt's products hold in SBUF, turned, of bf16 and of fp32
PROMPT_DEPTH, PROMPT_INNER = (5120, 4096), (12800, 8192)
