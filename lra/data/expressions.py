"""Random ListOps expressions, compiled. Apart from `listops.py` so that only drawing them needs numba.

Expression `i` of a seed is a function of (seed, i) alone: each has its own random stream, so that neither the
number of cores nor the chunking matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Token ids of lra.data.listops.VOCABULARY: a digit is its own id.
MAX, MED, MIN, SM, CLOSE = 10, 11, 12, 13, 14
ATTEMPTS = 1_000_000  # draws before the limits count as impossible; LRA's accept one draw in 12

_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32, _S60, _S62 = (np.uint64(bits) for bits in (27, 30, 31, 32, 60, 62))
_LOW32, _THREE = np.uint64(0xFFFFFFFF), np.uint64(3)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # nowhere to write a cache, neither beside the source nor in the user's folder
        return numba.njit(nogil=True)(function)


@_compiled
def _mix(bits):
    """Finaliser of splitmix64 (Steele, Lea and Flood 2014): uint64 to uint64."""
    bits = (bits ^ (bits >> _S30)) * _MIX1
    bits = (bits ^ (bits >> _S27)) * _MIX2
    return bits ^ (bits >> _S31)


@_compiled
def _below(bits, limit):
    """Uniform integer in 0 .. limit - 1 from the low half of 64 random bits."""
    return np.int64(((bits & _LOW32) * np.uint64(limit)) >> _S32)


@_compiled
def _apply(operator, arguments):
    """Value of one operator. `arguments`: int64 `[arity]`, sorted in place."""
    if operator == SM:
        return arguments.sum() % 10
    arguments.sort()
    if operator == MIN:
        return arguments[0]
    if operator == MAX:
        return arguments[-1]
    arity = len(arguments)
    return (arguments[(arity - 1) // 2] + arguments[arity // 2]) // 2


@_compiled
def _draw(state, tokens, max_length, max_depth, operators, arities, filled, values):
    """One expression into `tokens`. Returns (state, length, value); length 0 if it exceeds `max_length`.

    One 64-bit draw per node: two bits decide between operator (1/4) and digit, two more and the low half say
    which. `operators`, `arities`, `filled` `[depth]` and `values` `[depth, max_args]` hold the open operators.
    """
    length, depth, needed = 0, 0, 1  # `needed`: tokens that the nodes drawn so far amount to at least
    while True:
        state += _GOLDEN
        bits = _mix(state)
        if depth + 1 < max_depth and bits >> _S62 == 0:
            operators[depth] = MAX + np.int64((bits >> _S60) & _THREE)
            arities[depth] = 2 + _below(bits, values.shape[1] - 1)
            filled[depth] = 0
            needed += arities[depth] + 1
            if needed > max_length:
                return state, 0, 0
            tokens[length] = operators[depth]
            length += 1
            depth += 1
            continue
        value = _below(bits, 10)
        tokens[length] = value
        length += 1
        while depth > 0:  # hand the value to the innermost open operator, and close those it completes
            top = depth - 1
            values[top, filled[top]] = value
            filled[top] += 1
            if filled[top] < arities[top]:
                break
            value = _apply(operators[top], values[top, : arities[top]])
            tokens[length] = CLOSE
            length += 1
            depth = top
        if depth == 0:
            return state, length, value


@_compiled
def draw(seed, first, count, min_length, max_length, max_depth, max_args):
    """Expressions `first` .. `first + count - 1` of `seed`, each drawn until its length fits.

    Returns tokens uint8 `[count, max_length]`, lengths int64 `[count]` and values int64 `[count]`. A
    length of 0 says that none fitted in ATTEMPTS draws, and ends the work.
    """
    tokens = np.empty((count, max_length), np.uint8)
    lengths, labels = np.zeros(count, np.int64), np.zeros(count, np.int64)
    operators, arities, filled = np.empty((3, max_depth), np.int64)
    values = np.empty((max_depth, max_args), np.int64)
    for i in range(count):
        state = _mix(_mix(np.uint64(seed) + _GOLDEN) + np.uint64(first + i))
        for _ in range(ATTEMPTS):
            state, length, value = _draw(state, tokens[i], max_length, max_depth, operators, arities, filled, values)
            if length >= min_length:
                lengths[i], labels[i] = length, value
                break
        if lengths[i] == 0:
            break
    return tokens, lengths, labels
