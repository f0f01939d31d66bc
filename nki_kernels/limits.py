"""The limits of one launch. The host wrappers refuse more; the model splits its work by them."""

# rows of noise, draws and layers: each on a partition
ROWS = 128
# sequences of attention
SEQUENCES = 32
# rows of the sums above thresholds
SUM_ROWS = 32
# new rows of a sequence for attention
CANDIDATES = 32
# the floor of a row that keeps every id: the lowest fp32 number
NO_FLOOR = -3.4028234663852886e38
