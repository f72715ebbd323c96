"""NumPy forms of the counter-based generator and of the numbers made from its words.

In: uint32 keys and words, uint64 counters, broadcast together. Out: uint32 words with an extra last axis of 4 where C
has a struct of four; f32 or f64 numbers otherwise, the f32 ones with the bits of the C text.
"""

from __future__ import annotations

import numpy as np

from stagedtensor.codegen.prelude.mirror_arithmetic import F32, F64, Array, Function
from stagedtensor.codegen.prelude.mirror_transcendental import (
    log_f32,
    nearest_quarter,
    remainder_of_turns,
    sin_of_turns,
)

_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
_PARITY = np.uint32(0x1BD11BDA)


def _rotate(x: Array, bits: int) -> Array:
    return np.asarray((x << np.uint32(bits)) | (x >> np.uint32(32 - bits)))


def threefry4x32(key: Array, counter: Array) -> Array:
    """Threefry 4x32 with 20 rounds; key, counter and result have a last axis of 4."""
    keys = [key[..., index] for index in range(4)]
    keys.append(_PARITY ^ keys[0] ^ keys[1] ^ keys[2] ^ keys[3])
    a, b, c, d = (np.asarray(counter[..., index] + keys[index]) for index in range(4))
    for turn in range(20):
        p, q = _ROTATIONS[turn % 8]
        if turn % 2 == 0:
            a, c = np.asarray(a + b), np.asarray(c + d)
            b, d = _rotate(b, p) ^ a, _rotate(d, q) ^ c
        else:
            a, c = np.asarray(a + d), np.asarray(c + b)
            d, b = _rotate(d, p) ^ a, _rotate(b, q) ^ c
        if turn % 4 == 3:
            n = turn // 4 + 1
            a, b, c = a + keys[n % 5], b + keys[(n + 1) % 5], c + keys[(n + 2) % 5]
            d = d + keys[(n + 3) % 5] + np.uint32(n)
    return np.stack(np.broadcast_arrays(a, b, c, d), axis=-1)


def threefry(key0: Array, key1: Array, counter: Array) -> Array:
    """Four words for one counter value of the stream named by two keys; last axis 4."""
    count = np.asarray(counter, np.uint64)
    low, high = (count & np.uint64(0xFFFFFFFF)).astype(np.uint32), (count >> np.uint64(32)).astype(np.uint32)
    first, second = np.asarray(key0, np.uint32), np.asarray(key1, np.uint32)
    zero = np.uint32(0)
    key = np.stack(np.broadcast_arrays(first, second, zero, zero), axis=-1)
    return threefry4x32(key, np.stack(np.broadcast_arrays(low, high, zero, zero), axis=-1))


def uniform_f32(word: Array) -> Array:
    """A multiple of 2^-24 in [0, 1)."""
    return np.asarray((word >> np.uint32(8)).astype(F32) * F32(2.0**-24))


def uniform_f64(high: Array, low: Array) -> Array:
    """A multiple of 2^-53 in [0, 1)."""
    joined = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | low
    return np.asarray((joined >> np.uint64(11)).astype(F64) * 2.0**-53)


def normal_f32(first: Array, second: Array) -> Array:
    """A standard normal number from two words."""
    u = ((first >> np.uint32(8)) + np.uint32(1)).astype(F32) * F32(2.0**-24)
    radius = np.sqrt(F32(-2) * log_f32(u))
    turns = np.asarray(second).astype(np.uint64) << np.uint64(32)
    cosine = sin_of_turns(nearest_quarter(turns) + np.uint32(1), remainder_of_turns(turns))
    return np.asarray(radius * cosine.astype(F32))


def normal_f64(a: Array, b: Array, c: Array, d: Array) -> Array:
    """A standard normal number from four words."""
    radius = np.sqrt(-2.0 * np.log(1.0 - uniform_f64(a, b)))
    return np.asarray(radius * np.cos(float.fromhex("0x1.921fb54442d18p+2") * uniform_f64(c, d)))


def random_uniform_f32(key0: Array, key1: Array, counter: Array) -> Array:
    """The uniform number of one counter value."""
    return uniform_f32(threefry(key0, key1, counter)[..., 0])


def random_uniform_f64(key0: Array, key1: Array, counter: Array) -> Array:
    """The uniform number of one counter value."""
    words = threefry(key0, key1, counter)
    return uniform_f64(words[..., 0], words[..., 1])


def random_normal_f32(key0: Array, key1: Array, counter: Array) -> Array:
    """The standard normal number of one counter value."""
    words = threefry(key0, key1, counter)
    return normal_f32(words[..., 0], words[..., 1])


def random_normal_f64(key0: Array, key1: Array, counter: Array) -> Array:
    """The standard normal number of one counter value."""
    words = threefry(key0, key1, counter)
    return normal_f64(words[..., 0], words[..., 1], words[..., 2], words[..., 3])


def functions() -> dict[str, Function]:
    """Return the functions of this file by C name."""
    return {
        "st_threefry4x32": threefry4x32,
        "st_threefry": threefry,
        "st_uniform_f32": uniform_f32,
        "st_uniform_f64": uniform_f64,
        "st_normal_f32": normal_f32,
        "st_normal_f64": normal_f64,
        "st_random_uniform_f32": random_uniform_f32,
        "st_random_uniform_f64": random_uniform_f64,
        "st_random_normal_f32": random_normal_f32,
        "st_random_normal_f64": random_normal_f64,
    }
