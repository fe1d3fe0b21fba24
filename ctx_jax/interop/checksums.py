"""The checksum of TensorFlow's checkpoints: CRC-32C (RFC 3720, appendix B.4), as fast as numpy can."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

LANES = 1 << 14
"""At most so many parts of the bytes are taken side by side."""


def masked(crc: int) -> int:
    """A checksum as it is stored, so that one of bytes that hold checksums is still a good one."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The checksum of some bytes.

    It is linear: the state after two parts is the first one's, advanced over as many zeros as the second part is long,
    plus the second one's. So equal parts are read side by side, and then joined in pairs.
    """
    table = byte_table()
    lanes = max(1, min(LANES, 1 << len(data).bit_length() >> 6))
    length = -(-len(data) // lanes)
    padded = np.zeros(lanes * length, np.uint8)  # zeros in front leave the state 0
    padded[len(padded) - len(data) :] = np.frombuffer(data, np.uint8)
    state = np.zeros(lanes, np.uint32)
    for column in padded.reshape(lanes, length).T:
        state = table[(state ^ column) & np.uint32(255)] ^ state >> np.uint32(8)
    over = zeros(length)
    while len(state) > 1:
        state = advanced(state[::2], over) ^ state[1::2]
        over = advanced(over, over)
    start = np.full(1, 0xFFFFFFFF, np.uint32)
    return int((state ^ advanced(start, zeros(len(data))))[0]) ^ 0xFFFFFFFF


@lru_cache(maxsize=1)
def byte_table() -> np.ndarray:
    """[256] uint32: the state after one byte, from the state 0 (polynomial 0x1EDC6F41, lowest bit first)."""
    state = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        state = state >> 1 ^ (state & 1) * np.uint32(0x82F63B78)
    return state


def advanced(state: np.ndarray, over: np.ndarray) -> np.ndarray:
    """States after some zeros; `over` [32] says what becomes of each bit."""
    after = np.zeros_like(state)
    for bit in range(32):
        after ^= (state >> np.uint32(bit) & np.uint32(1)) * over[bit]
    return after


def zeros(count: int) -> np.ndarray:
    """[32] uint32: what becomes of each bit over so many bytes of zero."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    over, power = bits, np.concatenate([byte_table()[bits[:8]], bits[:-8]])
    while count:
        over = advanced(over, power) if count & 1 else over
        power, count = advanced(power, power), count >> 1
    return over
