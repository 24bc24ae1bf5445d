"""The shuffle of Megatron's sample mapping: Fisher-Yates from the last element to the first, by draws of the 64-bit Mersenne twister.

The twister is that of C++'s `std::mt19937_64`, which numpy does not have. A word of its next state depends on words at most 156 places
later, so that half a state is computed at once. Swaps are done in blocks: those of a block that touch no common element commute, and
conflicts are rare in a block of the square root of what is left.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

_STATE_WORDS, _HALF = 312, 156
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_SMALL_BLOCK = 64


class MersenneTwister64:
    """The 64-bit Mersenne twister (Nishimura, 2000).

    >>> int(MersenneTwister64(5489).draw(10_000)[-1])  # the value that the C++ standard gives
    9981545732273789042
    """

    def __init__(self, seed: int) -> None:
        state = [seed & 0xFFFFFFFFFFFFFFFF]
        for place in range(1, _STATE_WORDS):
            last = state[-1]
            state.append((6364136223846793005 * (last ^ (last >> 62)) + place) & 0xFFFFFFFFFFFFFFFF)
        self._state = np.array(state, np.uint64)
        self._drawn = np.zeros(0, np.uint64)

    def draw(self, count: int) -> NDArray[np.uint64]:
        """Returns the next numbers."""
        blocks, available = [self._drawn], len(self._drawn)
        while available < count:
            blocks.append(self._next_block())
            available += _STATE_WORDS
        numbers = np.concatenate(blocks)
        self._drawn = numbers[count:]
        return numbers[:count]

    def _next_block(self) -> NDArray[np.uint64]:
        state = self._state
        state[:_HALF] = state[_HALF:] ^ _twist(state[:_HALF], state[1 : _HALF + 1])
        state[_HALF:] = state[:_HALF] ^ _twist(state[_HALF:], np.append(state[_HALF + 1 :], state[0]))
        x = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
        x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        return x ^ (x >> np.uint64(43))


def _twist(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (high & _UPPER) | (low & _LOWER)
    return (x >> np.uint64(1)) ^ np.where(x & np.uint64(1), _MATRIX, np.uint64(0))


def mersenne_permutation(count: int, seed: int) -> NDArray[np.int64]:
    """Returns the order in which the elements 0, 1, ... are after the shuffle.

    >>> sorted(mersenne_permutation(5, 1).tolist())
    [0, 1, 2, 3, 4]
    """
    order, twister = np.arange(count), MersenneTwister64(seed)
    last = count - 1
    while last > 0:
        block = min(last, max(_SMALL_BLOCK, isqrt(last) // 2))
        places = np.arange(last, last - block, -1)
        partners = (twister.draw(block) % (places + 1).astype(np.uint64)).astype(np.int64)
        done = 0
        while done < block:
            stop = done + _free_of_conflicts(places[done:], partners[done:])
            here, there = places[done:stop], partners[done:stop]
            order[here], order[there] = order[there], order[here]
            done = stop
        last -= block
    return order


def _free_of_conflicts(places: NDArray[np.int64], partners: NDArray[np.int64]) -> int:
    """Returns how many swaps, from the first on, touch no element that an earlier one of them has touched.

    >>> _free_of_conflicts(np.array([9, 8, 7, 6]), np.array([2, 7, 1, 1]))
    2
    """
    count = len(places)
    by_partner = np.argsort(partners, kind="stable")
    repeated = by_partner[1:][partners[by_partner[1:]] == partners[by_partner[:-1]]]
    # A partner that is a place of a later swap of the block.
    reached = int(places[0]) - partners
    reached = reached[(reached > np.arange(count)) & (reached < count)]
    return min(int(repeated.min(initial=count)), int(reached.min(initial=count)))
