"""Random Pathfinder images, compiled: two target contours, distractors and two markers.

Image `i` is a function of (tables, seed, i) alone. Contours grow on a map of the space that paddles occupy, uint8
`[width * width]`. It is full outside the frame that no contour enters, so a paddle that would leave the image hits
the frame first. Ink is drawn when all contours are known. What the tables hold is said in `stamps.py`.
"""

from __future__ import annotations

import math

import numpy as np

from lra.data.numba_rng import GOLDEN, cached_njit, draw_below, mix_bits, start_stream
from lra.data.pathfinder.stamps import DEGREES, SOLID

# As records, not arrays: these are passed on in the innermost loops, and numba counts references to arrays
PADDLE = np.dtype([("kind", "i8"), ("at", "i8")])  # its kind, and the place of its first pixel in a map
_PIVOT = np.dtype([("y", "f8"), ("x", "f8")])
_RANDOM = np.dtype([("state", "u8")])

_DRAWS = 3  # of a step, before a contour is given up
_ATTEMPTS = 5  # at a distractor, before it is left out
_OVERLAP = 255 + SOLID  # two masks overlap where they sum to this: 1.8 of 255
_FREE = 76  # largest value of a pixel that counts as free: 0.3 of 255
_DEAD_END = 1e-4  # least sum of the weights of the possible steps with which a contour goes on
_PROPOSALS = 3  # of a step by its turn alone, before the space around all steps is looked at
_TRIES = 64  # of a random beginning, before all are looked at

_S11 = np.uint64(11)


@cached_njit
def _bits(random):
    random.state += GOLDEN
    return mix_bits(random.state)


@cached_njit
def _uniform(random):
    """Float64 in [0, 1) of 53 bits."""
    return (_bits(random) >> _S11) * 2.0**-53


@cached_njit
def _flat(law, y, x):
    """Place of pixel (y, x) in a map."""
    return (y + law.border) * law.width + x + law.border


@cached_njit
def _pixel(law, at):
    """The pixel (y, x) at a place in a map."""
    return at // law.width - law.border, at % law.width - law.border


@cached_njit
def _occupy(kinds, space, paddle, occupied):
    kind = kinds[paddle.kind]
    for i in range(kind.mask[0], kind.mask[1]):
        place = np.uintp(paddle.at + space[i].offset)  # unsigned, as numba looks whether others count from the end
        occupied[place] = max(occupied[place], space[i].value)


@cached_njit
def _vacate(kinds, space, paddle, occupied, empty):
    kind = kinds[paddle.kind]
    for i in range(kind.mask[0], kind.mask[1]):
        place = np.uintp(paddle.at + space[i].offset)
        occupied[place] = empty[place]


@cached_njit
def _fits(kind, space, at, occupied):
    """Whether a paddle overlaps nothing."""
    for i in range(kind.mask[0], kind.solid):
        if np.int64(occupied[np.uintp(at + space[i].offset)]) + space[i].value >= _OVERLAP:
            return False
    return True


@cached_njit
def _free(kind, space, at, occupied):
    """How free the margin around a pixel is, 0 to 255: 255 less the largest value there."""
    most = 0
    for i in range(kind.disc[0], kind.disc[1]):
        most = max(most, np.int64(occupied[np.uintp(at + space[i].offset)]))
    return 255 - most


@cached_njit
def _choose(kind, space, pivot, occupied, random):
    """The next step, chosen with probability ~ its weight times the share that is free there; -1 at a dead end.

    Proposing a step by weight alone, and keeping it with the probability of its free share, is such a draw, and is
    cheap.
    """
    for _ in range(_PROPOSALS):
        level, choice = _uniform(random), 0
        while kind.cumulative[choice] <= level:
            choice += 1
        free = _free(kind, space, pivot + kind.place[choice], occupied)
        if free == 255 or draw_below(_bits(random), 255) < free:
            return choice
    total = 0.0
    for choice in range(len(kind.weight)):
        total += kind.weight[choice] * _free(kind, space, pivot + kind.place[choice], occupied)
    if total < 255 * _DEAD_END:
        return -1
    level = _uniform(random) * total
    for choice in range(len(kind.weight)):
        level -= kind.weight[choice] * _free(kind, space, pivot + kind.place[choice], occupied)
        if level < 0:
            return choice
    return -1


@cached_njit
def _begin(law, kinds, number, y, x, paddle, pivot):
    """The first paddle of a contour, of kind `number` and with its tip at pixel (y, x), and the pivot after it.

    False if the paddle's last pixel or the pivot is outside the image.
    """
    kind = kinds[number]
    end_y, end_x = math.ceil(y + kind.end[0]), math.ceil(x + kind.end[1])
    paddle.kind, paddle.at = number, _flat(law, y, x)
    pivot.y, pivot.x = math.ceil(end_y + kind.back[0]), math.ceil(end_x + kind.back[1])
    return min(end_y, end_x, pivot.y, pivot.x) >= 0 and max(end_y, end_x, pivot.y, pivot.x) < law.side


@cached_njit
def _extend(law, kinds, space, paddles, last, pivot, occupied, random):
    """Puts paddle `last + 1` after paddle `last`, which occupies its space only then. False if none has a place."""
    kind = kinds[paddles[last].kind]
    # In floating point: near the image's edge the last digit of a step moves the pivot, in LRA's generator as here
    y, x = math.ceil(pivot.y + kind.step[0]), math.ceil(pivot.x + kind.step[1])
    at = _flat(law, y, x)
    for _ in range(_DRAWS):
        choice = _choose(kind, space, at, occupied, random)
        if choice < 0:
            return False
        number, tip = kind.following[choice], at + kind.place[choice]
        if _fits(kinds[number], space, tip, occupied):
            _occupy(kinds, space, paddles[last], occupied)
            paddles[last + 1].kind, paddles[last + 1].at = number, tip
            pivot.y, pivot.x = y, x
            return True
    return False


@cached_njit
def _targets(law, kinds, space, bearings, first, paddles, pivots, occupied, empty, random):
    """The two target contours, begun anew until both have a place. Returns how many pairs were tried."""
    length, pairs = law.contour_length, 0
    occupied[:] = empty
    one, two = paddles[:length], paddles[length : 2 * length]
    while True:
        pairs += 1
        number = first + draw_below(_bits(random), DEGREES)
        kind = kinds[number]
        low_y, end_y = law.frame - kind.extent[0, 0], law.side - law.frame - kind.extent[0, 1]
        low_x, end_x = law.frame - kind.extent[1, 0], law.side - law.frame - kind.extent[1, 1]
        if not kind.startable or low_y >= end_y or low_x >= end_x:
            continue
        y, x = low_y + draw_below(_bits(random), end_y - low_y), low_x + draw_below(_bits(random), end_x - low_x)
        _begin(law, kinds, number, y, x, one[0], pivots[0])
        # The second begins anywhere around the tip of the first, whatever is there
        bearing, number = draw_below(_bits(random), DEGREES), first + draw_below(_bits(random), DEGREES)
        y, x = round(y + bearings[bearing, 0]), round(x + bearings[bearing, 1])
        _begin(law, kinds, number, y, x, two[0], pivots[1])
        last = 0
        while (
            last < length - 1
            and _extend(law, kinds, space, one, last, pivots[0], occupied, random)
            and _extend(law, kinds, space, two, last, pivots[1], occupied, random)
        ):
            last += 1
        if last == length - 1:
            _occupy(kinds, space, two[last], occupied)  # that of the first target never is, as in LRA's generator
            return pairs
        for placed in range(last + 1):  # thousands of pairs fail for each that stays: less than the whole map
            _vacate(kinds, space, one[placed], occupied, empty)
            if placed < last:
                _vacate(kinds, space, two[placed], occupied, empty)


@cached_njit
def _startable(law, kind, space, at, occupied):
    """Whether a contour may begin at a pixel: all that the probe meets is free or outside the image."""
    i = kind.probe[0]
    while i < kind.probe[1]:
        place = at + space[i].offset
        if occupied[place] > _FREE:
            y, x = _pixel(law, place)
            if min(y, x) >= 0 and max(y, x) < law.side:
                return False
        i += 1
    return True


@cached_njit
def _crowded(law, occupied):
    """Whether less than a hundredth of the image is free."""
    free = 0
    for y in range(law.side):
        for at in range(_flat(law, y, 0), _flat(law, y, law.side)):
            free += occupied[at] <= _FREE
        if 100 * free >= law.side**2:
            return False
    return True


@cached_njit
def _tip(law, kind, space, occupied, random):
    """A uniform choice of the pixels where a contour may begin in this direction: (y, x), or (-1, -1) if there is
    none.
    """
    for _ in range(_TRIES):
        y, x = draw_below(_bits(random), law.side), draw_below(_bits(random), law.side)
        if _startable(law, kind, space, _flat(law, y, x), occupied):
            return y, x
    found, tip = 0, (-1, -1)
    for y in range(law.side):
        for x in range(law.side):
            if _startable(law, kind, space, _flat(law, y, x), occupied):
                found += 1
                if draw_below(_bits(random), found) == 0:
                    tip = y, x
    return tip


@cached_njit
def _distractor(law, kinds, space, first, paddles, pivot, occupied, random):
    """One attempt at a distractor. False if it has no place. Part of it may then occupy space."""
    number = first + draw_below(_bits(random), DEGREES)
    if not kinds[number].startable or _crowded(law, occupied):
        return False
    inside, draws = False, 0
    while not inside:
        y, x = _tip(law, kinds[number], space, occupied, random)
        if y < 0 or draws == _DRAWS:
            return False
        inside = _begin(law, kinds, number, y, x, paddles[0], pivot)
        draws += 1
    for last in range(len(paddles) - 1):
        if not _extend(law, kinds, space, paddles, last, pivot, occupied, random):
            return False
    _occupy(kinds, space, paddles[-1], occupied)
    return True


@cached_njit
def _distractors(law, kinds, space, first, paddles, pivot, occupied, saved, random):
    """All distractors that find a place, one after the other. Returns how many there are."""
    placed, length = 0, law.distractor_length
    saved[:] = occupied
    for _ in range(law.distractors):
        for _ in range(_ATTEMPTS):
            these = paddles[placed * length : (placed + 1) * length]
            if _distractor(law, kinds, space, first, these, pivot, occupied, random):
                saved[:] = occupied
                placed += 1
                break
            occupied[:] = saved
    return placed


@cached_njit
def _draw_paddles(kinds, ink, paddles, contrast, image):
    """Draw paddles into a map of float32. Returns the largest value drawn."""
    peak = 0.0
    for k in range(len(paddles)):
        kind = kinds[paddles[k].kind]
        for i in range(kind.ink[0], kind.ink[1]):
            place, value = paddles[k].at + ink[i].offset, contrast * ink[i].value
            image[place] = max(image[place], value)
            peak = max(peak, value)
    return peak


@cached_njit
def _draw_marker(law, markers, y, x, image):
    """Draw a marker into a map of float32. Returns the largest value drawn."""
    window, peak = len(markers), 0.0
    top, left = min(max(y - window // 2, 0), law.side - window), min(max(x - window // 2, 0), law.side - window)
    for row in range(window):
        at = _flat(law, top + row, left)
        for column in range(window):
            value = markers[y - top, x - left, row, column]
            image[at + column] = max(image[at + column], value)
            peak = max(peak, value)
    return peak


@cached_njit
def draw_images(laws, starts, kinds, space, ink, bearings, markers, seed, first, count, added):
    """Images `first` to `first + count - 1` of `seed`, a uint64. The arguments before them are `Tables`.

    Grey values are cut to whole levels after `added`, a float32, is added.

    Returns pixels uint8 `[count, side * side]`; labels int64 `[count]`; tips int64 `[count, 2, 2]`, y and x of the two
    markers; paddles PADDLE `[count, most]` of the two targets and then of the distractors. The last two are int64
    `[count]`: the number of distractors, and the number of pairs of targets that were tried.
    """
    law = laws[0]
    side, length = law.side, law.contour_length
    pixels, labels = np.empty((count, side * side), np.uint8), np.empty(count, np.int64)
    tips, distractors, pairs = np.empty((count, 2, 2), np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    paddles = np.zeros((count, 2 * length + law.distractors * law.distractor_length), PADDLE)
    pivots, random = np.empty(2, _PIVOT), np.empty(1, _RANDOM)[0]
    occupied, saved = np.empty((2, law.width**2), np.uint8)
    image = np.empty(law.width**2, np.float32)
    empty = np.full(law.width**2, 255, np.uint8)
    for y in range(law.padding, side - law.padding):
        empty[_flat(law, y, law.padding) : _flat(law, y, side - law.padding)] = 0
    for n in range(count):
        random.state = start_stream(seed, first + n)
        labels[n], origin = draw_below(_bits(random), 2), draw_below(_bits(random), 2)
        start = starts[draw_below(_bits(random), len(starts))]
        targets, others = paddles[n, : 2 * length], paddles[n, 2 * length :]
        pairs[n] = _targets(law, kinds, space, bearings, start, targets, pivots, occupied, empty, random)
        distractors[n] = _distractors(law, kinds, space, start, others, pivots[0], occupied, saved, random)

        image[:] = 0
        others = others[: distractors[n] * law.distractor_length]
        peak = _draw_paddles(kinds, ink, targets, law.target_contrast, image)
        peak = max(peak, _draw_paddles(kinds, ink, others, law.distractor_contrast, image))
        terminal = origin if labels[n] else 1 - origin
        for i, paddle in enumerate((origin * length, terminal * length + length - 1)):
            y, x = _pixel(law, targets[paddle]["at"])
            tips[n, i, 0], tips[n, i, 1] = y, x
            peak = max(peak, _draw_marker(law, markers, y, x, image))
        scale = np.float32(255 / peak)
        for y in range(side):
            at = _flat(law, y, 0)
            for x in range(side):
                pixels[n, y * side + x] = np.uint8(scale * image[at + x] + added)
    return pixels, labels, tips, paddles, distractors, pairs
