"""The state of verification attention: the launch, a pack of rows, one chunk of a pack.

Every field is declared here with its shape, partition axis first; a stage fills the fields that name it.
R rows of a pack, G its groups, N candidates, W slots of a chunk (a multiple of RUN) in T = W / RUN runs, C chunks of a
cache, B sequences, D.
"""

import nki.language as nl

from nki_kernels.limits import CHUNK


class Launch(nl.NKIObject):
    """Shared by all packs: the tiling, the cache object, and the operands and outputs in HBM."""

    def __init__(self, t, cache, candidates, outputs):
        self.t = t
        # a contiguous Cache or Pages
        self.cache = cache
        # int32 (B, N), and int32 (B, N) or None
        self.positions_BN = candidates[0]
        self.ancestors_BN = candidates[1]
        # int32 (1, B) in SBUF
        self.slots_1B = candidates[2]
        # (B, H, N, D), and fp32 (B, H, N) or None
        self.out_BHND = outputs[0]
        self.lse_BHN = outputs[1]


class Pack(nl.NKIObject):
    """Rows that share the engines: `count` groups from `group` on, and their fields from chunk to chunk."""

    def __init__(self, group, count):
        self.group = group
        self.count = count
        # plan: the rows' turned queries (D, R); the layer's kernel has them by group instead, a list of (D, H / G, N)
        self.q_DR = None
        self.queries = []
        # load_limits: the first and the last slot that a row may see, fp32 (R, 1)
        self.zero_R1 = None
        self.limit_R1 = None
        # load_limits, with ancestors: HIDDEN for a candidate that is none, fp32 (R, G, N), and the column in each chunk
        # where the candidates begin, int32 (1, C, B)
        self.hidden_RGN = None
        self.columns_1CB = None
        # exponentials: -max / sqrt(D) so far, fp32 (R, 1)
        self.shift_R1 = None
        # add_sums: the sum of weights so far, and after the last chunk its inverse, fp32 (R, 1)
        self.total_R1 = None
        self.inverse_R1 = None
        # add_values: weighted values so far, fp32 (R, G, D); after the last chunk the result in the output's dtype
        self.values_RGD = None


class Chunk(nl.NKIObject):
    """CHUNK slots of a pack's groups, perhaps fewer at a cache's end, and the fields that pass from stage to stage."""

    def __init__(self, pack, index, slots):
        self.pack = pack
        self.index = index
        self.start = index * CHUNK
        self.size = min(CHUNK, slots - self.start)
        self.last = self.start + CHUNK >= slots
        # groups whose values are weighed together: all, but in halves in the chunk that ends the launch
        self.spans = [(0, pack.count)]
        # fetch_keys: gathered keys (128, RUN, D), one a group
        self.rows = []
        # load_keys: keys (D, G, margin + W + margin), whose first slot is in column `margin`
        self.keys_DGW = None
        self.margin = 0
        # load_values: values (T, G, RUN, D); fetch_values: (T, RUN / HALVES, D), one a half of a group
        self.values_TGRD = None
        self.values = []
        # scores: PSUM fp32 (R, W)
        self.scores_psum_RW = None
        # exponentials: weights (R, T, RUN), their sums by half of the key tiles, two of fp32 (R, 1)
        self.weights_RTR = None
        self.sums_R1 = []
        # exponentials, from the second chunk on: the factor of the sums and values so far, fp32 (R, 1)
        self.factor_R1 = None
        # turn: weights by key tile with keys on partitions (T, RUN, R)
        self.turned_TRR = None
        # weigh: weighted values, PSUM fp32 (R, G, D)
        self.part_psum_RGD = None
