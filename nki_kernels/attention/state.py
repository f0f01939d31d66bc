"""The state of verification attention: the launch, a pack of rows, one chunk of a pack.

Every field is declared here with its shape, partition axis first; a stage fills the fields that name it.
R rows of a pack, G its groups, W = 1024 keys of a chunk, D.
"""

import nki.language as nl

from nki_kernels.limits import CHUNK


class Launch(nl.NKIObject):
    """Shared by all packs: the tiling, the paged cache, and the operands and output in HBM."""

    def __init__(self, t, kv, positions_BN, limit_B1, out_BHND):
        self.t = t
        self.kv = kv
        # int32 (B, N), and int32 (B, 1) or None
        self.positions_BN = positions_BN
        self.limit_B1 = limit_B1
        self.out_BHND = out_BHND


class Pack(nl.NKIObject):
    """Rows that share the engines: `count` groups from `group` on, and their fields from chunk to chunk."""

    def __init__(self, group, count):
        self.group = group
        self.count = count
        # plan: transposed queries (D, R)
        self.q_DR = None
        # load_keys: the first and the last position that a row attends, fp32 (R, 1)
        self.zero_R1 = None
        self.limit_R1 = None
        # exponentials: -max / sqrt(D) so far, fp32 (R, 1)
        self.neg_max_R1 = None
        # add_sums: the sum of weights so far, and after the last chunk its reciprocal, fp32 (R, 1)
        self.total_R1 = None
        self.inverse_R1 = None
        # add_values: weighted values so far, fp32 (R, G, D); after the last chunk the result in the output's dtype
        self.values_RGD = None


class Chunk(nl.NKIObject):
    """1024 positions of a pack's groups, and what one stage leaves for the next."""

    def __init__(self, pack, index, length):
        self.pack = pack
        self.index = index
        self.start = index * CHUNK
        self.last = self.start + CHUNK >= length
        # load_keys: transposed keys (D, G, W)
        self.keys_DGW = None
        # load_values: values (128, G, RUN, D)
        self.values_PGRD = None
        # scores: PSUM fp32 (R, W)
        self.scores_psum_RW = None
        # exponentials: weights (R, 128, RUN), their sums by half of the key tiles, two of fp32 (R, 1)
        self.weights_RPR = None
        self.sums_R1 = []
        # exponentials, from the second chunk on: the rescale factor of the sums and values so far, fp32 (R, 1)
        self.rescale_R1 = None
        # transpose: weights by key tile with keys on partitions (128, RUN, R)
        self.weights_PRR = None
        # groups, first and last, whose values are multiplied and stored together (plan)
        self.spans = [(0, pack.count)]
        # multiply: weighted values, PSUM fp32 (R, G, D)
        self.part_psum_RGD = None
