"""Random ListOps expressions, compiled. This is apart from `listops.py`, so that only drawing needs numba.

Expression `i` of a seed is a function of (seed, i) alone, as each has its own random stream. Neither the number of
cores nor the size of chunks matters.
"""

from __future__ import annotations

import numpy as np

from lra.data.numba_rng import GOLDEN, cached_njit, draw_below, mix_bits, start_stream

# Token ids of lra.data.listops.VOCABULARY: a digit is its own id.
MAX, MED, MIN, SM, CLOSE = 10, 11, 12, 13, 14
ATTEMPTS = 1_000_000  # draws before the limits count as impossible; LRA's accept one draw in 12

_S60, _S62, _THREE = np.uint64(60), np.uint64(62), np.uint64(3)


@cached_njit
def _apply(operator, arguments):
    """The value of one operator. `arguments`: int64 `[arity]`, sorted in place."""
    if operator == SM:
        return arguments.sum() % 10
    arguments.sort()
    if operator == MIN:
        return arguments[0]
    if operator == MAX:
        return arguments[-1]
    arity = len(arguments)
    return (arguments[(arity - 1) // 2] + arguments[arity // 2]) // 2


@cached_njit
def _draw(state, tokens, max_length, max_depth, operators, arities, filled, values):
    """Draws one expression into `tokens`. Returns (state, length, value); the length is 0 if it exceeds
    `max_length`.

    Each node takes one 64-bit draw. Two bits decide between operator (1/4) and digit. Two more bits, or the low half,
    say which one. `operators`, `arities`, `filled` `[depth]` and `values` `[depth, max_args]` hold the open operators.
    """
    length, depth, needed = 0, 0, 1  # `needed`: tokens that the nodes drawn so far amount to at least
    while True:
        state += GOLDEN
        bits = mix_bits(state)
        if depth + 1 < max_depth and bits >> _S62 == 0:
            operators[depth] = MAX + np.int64((bits >> _S60) & _THREE)
            arities[depth] = 2 + draw_below(bits, values.shape[1] - 1)
            filled[depth] = 0
            needed += arities[depth] + 1
            if needed > max_length:
                return state, 0, 0
            tokens[length] = operators[depth]
            length += 1
            depth += 1
            continue
        value = draw_below(bits, 10)
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


@cached_njit
def draw_expressions(seed, first, count, min_length, max_length, max_depth, max_args):
    """Expressions `first` .. `first + count - 1` of `seed`, each drawn until its length fits.

    Returns tokens uint8 `[count, max_length]`, lengths int64 `[count]` and values int64 `[count]`. If none of ATTEMPTS
    draws fits, the length is 0 and no further expression is drawn.
    """
    tokens = np.empty((count, max_length), np.uint8)
    lengths, labels = np.zeros(count, np.int64), np.zeros(count, np.int64)
    operators, arities, filled = np.empty((3, max_depth), np.int64)
    values = np.empty((max_depth, max_args), np.int64)
    for i in range(count):
        state = start_stream(seed, first + i)
        for _ in range(ATTEMPTS):
            state, length, value = _draw(state, tokens[i], max_length, max_depth, operators, arities, filled, values)
            if length >= min_length:
                lengths[i], labels[i] = length, value
                break
        if lengths[i] == 0:
            break
    return tokens, lengths, labels


@cached_njit
def evaluate_tokens(tokens, offsets):
    """Values int64 `[n]` of the expressions uint8 `tokens[offsets[i] : offsets[i + 1]]`.

    The value is -1 where the tokens are not one whole expression.
    """
    count = len(offsets) - 1
    found = np.full(count, -1)
    most = 0
    for i in range(count):
        most = max(most, offsets[i + 1] - offsets[i])
    # of the operators that are open: which, and where its arguments begin among the values
    operators, begins, values = np.empty((3, most + 1), np.int64)
    for i in range(count):
        depth, filled, last = 0, 0, offsets[i + 1] - 1
        for at in range(offsets[i], offsets[i + 1]):
            token = np.int64(tokens[at])
            if token < MAX:
                values[filled] = token
                filled += 1
            elif token != CLOSE:
                operators[depth], begins[depth] = token, filled
                depth += 1
            elif depth == 0 or begins[depth - 1] == filled:  # closes nothing, or an operator without arguments
                break
            else:
                depth -= 1
                value = _apply(operators[depth], values[begins[depth] : filled])
                filled = begins[depth]
                values[filled] = value
                filled += 1
            if depth == 0:  # whole: nothing may follow
                if at == last:
                    found[i] = values[0]
                break
    return found
