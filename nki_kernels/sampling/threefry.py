"""Threefry-2x32 with 13 rounds on the Vector Engine.

x0 += x1;  x1 = rotate_left(x1, r) ^ x0;  after every fourth round a word of the key schedule is added to each

The engine adds in fp32, so a 32-bit sum is two exact sums of 16-bit halves and a carry; nothing relies on integer
overflow. Words are uint32 (P, W, 1). A sum is int32 (P, W, 2), low half first; only the lower 16 bits of each half
count, and it is packed to words only for a rotation.
Law: model/threefry.py. Source: Salmon, Moraes, Dror, Shaw, SC 2011. Cost: 6 instructions a round, 6 passes over W.
"""

import nki.isa as nisa
import nki.language as nl

ROUNDS = 13
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
HALF = 65536.0


def new_words(like):
    """Words of the shape of words or sums."""
    return nl.ndarray((like.shape[0], like.shape[1], 1), dtype=nl.uint32)


def halves(x):
    """The 16-bit halves of words or of a sum, low first: uint16 (P, W, 2)."""
    return x.view(nl.uint16)[:, :, 0 : 2 * x.shape[2] : x.shape[2]]


def carry(sums, terms):
    """Move the bits above 16 of a sum of 2 or 3 low halves into the high half."""
    low, high = sums[:, :, 0], sums[:, :, 1]
    for times in range(1, terms):
        nisa.scalar_tensor_tensor(
            dst=high, data=low, op0=nl.greater_equal, operand0=times * HALF, op1=nl.add, operand1=high
        )
    return sums


def add(first, second):
    """The sum of two words modulo 2^32; either may be a sum."""
    sums = nl.ndarray((first.shape[0], first.shape[1], 2), dtype=nl.int32)
    nisa.tensor_tensor(dst=sums, data1=halves(first), data2=halves(second), op=nl.add, engine=nisa.engine.vector)
    return carry(sums, 2)


def column(word):
    """One word per partition, (P, 1, 1), as the fp32 operands (P, 2) of add_column and add_all."""
    halves_P2 = nl.ndarray((word.shape[0], 2), dtype=nl.float32)
    nisa.tensor_copy(dst=halves_P2, src=halves(word), engine=nisa.engine.vector)
    return halves_P2


def add_column(words, column_P2):
    """The sum of words and a column."""
    sums = nl.ndarray((words.shape[0], words.shape[1], 2), dtype=nl.int32)
    for i in range(2):
        half = halves(words)[:, :, i]
        nisa.tensor_scalar(dst=sums[:, :, i], data=half, op0=nl.add, operand0=column_P2[:, i : i + 1])
    return carry(sums, 2)


def add_all(first, column_P2, third):
    """The sum of words, a column and words: a key injection and the next round's addition."""
    sums = nl.ndarray((first.shape[0], first.shape[1], 2), dtype=nl.int32)
    for i in range(2):
        a, b, c = halves(first)[:, :, i], column_P2[:, i : i + 1], halves(third)[:, :, i]
        nisa.scalar_tensor_tensor(dst=sums[:, :, i], data=a, op0=nl.add, operand0=b, op1=nl.add, operand1=c)
    return carry(sums, 3)


def packed(sums):
    """A sum as words."""
    words = new_words(sums)
    nisa.tensor_copy(dst=halves(words), src=halves(sums), engine=nisa.engine.vector)
    return words


def rotate_left(words, by):
    """The two parts of rotated words, which share no bit."""
    left, right = new_words(words), new_words(words)
    nisa.tensor_scalar(dst=left, data=words, op0=nl.left_shift, operand0=by)
    nisa.tensor_scalar(dst=right, data=words, op0=nl.right_shift, operand0=32 - by)
    return left, right


def mix(words, by, sums):
    """rotate_left(words, by) ^ sums."""
    mixed = new_words(words)
    if by == 16:
        for i in range(2):
            nisa.tensor_tensor(
                dst=halves(mixed)[:, :, i],
                data1=halves(words)[:, :, 1 - i],
                data2=halves(sums)[:, :, i],
                op=nl.bitwise_xor,
            )
        return mixed
    left, right = rotate_left(words, by)
    nisa.tensor_tensor(dst=left, data1=left, data2=right, op=nl.bitwise_xor)
    nisa.tensor_tensor(dst=halves(mixed), data1=halves(left), data2=halves(sums), op=nl.bitwise_xor)
    return mixed


def schedule(key):
    """The key schedule of key (P, 2, 1): pairs of words (P, 1, 1) for x0 and x1, the first pair for the start."""
    words = [key[:, 0:1], key[:, 1:2], nl.ndarray((key.shape[0], 1, 1), dtype=nl.uint32)]
    nisa.tensor_tensor(dst=words[2], data1=words[0], data2=words[1], op=nl.bitwise_xor)
    nisa.tensor_scalar(dst=words[2], data=words[2], op0=nl.bitwise_xor, operand0=PARITY)
    injections = []
    for s in range(1 + ROUNDS // 4):
        number = new_words(words[2])
        nisa.memset(dst=number, value=s)
        injections.append((words[s % 3], packed(add(words[(s + 1) % 3], number))))
    return injections


def threefry(counter, second, injections):
    """Both words of the counters (counter (P, W, 1), second (P, 1, 1)) under the schedule `injections`."""
    # in the first round x1 is one word per partition
    start = packed(add(second, injections[0][1]))
    x0 = add_column(counter, column(packed(add(start, injections[0][0]))))
    parts, rotated = rotate_left(start, ROTATIONS[0]), new_words(start)
    nisa.tensor_tensor(dst=rotated, data1=parts[0], data2=parts[1], op=nl.bitwise_xor)
    x1 = new_words(counter)
    nisa.tensor_scalar(dst=x1, data=packed(x0), op0=nl.bitwise_xor, operand0=rotated)
    for r in range(1, ROUNDS):
        if r % 4 == 0:
            x0 = add_all(x0, column(injections[r // 4][0]), x1)
        else:
            x0 = add(x0, x1)
        x1 = mix(x1, ROTATIONS[r % 8], x0)
        if r % 4 == 3:
            x1 = packed(add_column(x1, column(injections[r // 4 + 1][1])))
    return packed(x0), x1
