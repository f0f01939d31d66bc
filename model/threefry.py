"""Threefry-2x32 with 13 rounds: the counter-based generator, in wrapping 32-bit integers.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It needs 32-bit additions,
rotations and XOR only. 13 rounds is the smallest count that passes BigCrush in the paper. An engine that adds in fp32
adds two 16-bit limbs instead, each sum below 2^17 and therefore exact.
"""

from torch import Tensor

from model.ops import shift_left, shift_right

ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA

Words = tuple[Tensor, Tensor]


def _rotate_left(x: Tensor, r: int) -> Tensor:
    # the right shift of int32 is arithmetic: the mask makes it logical
    return shift_left(x, r) | (shift_right(x, 32 - r) & ((1 << r) - 1))


def threefry2x32(key: Words, counter: Words, rounds: int = ROUNDS) -> Words:
    """Encrypts a counter of two int32 words with a key of two: returns two int32 words. Inputs broadcast."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for r in range(rounds):
        x = x + y
        y = _rotate_left(y, _ROTATIONS[r % 8]) ^ x
        if r % 4 == 3:
            s = r // 4 + 1
            x, y = x + schedule[s % 3], y + (schedule[(s + 1) % 3] + s)
    return x, y
