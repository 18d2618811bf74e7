"""Arithmetic on boxes that several kernels share, rounded as the reference rounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(x):
    """Whether numbers are neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def clipped(x, limit):
    """Numbers from 0 to the limit; NaN stays NaN."""
    x = tl.where(x < 0.0, 0.0, x)
    return tl.where(x > limit, limit, x)


@triton.jit
def growth(x):
    """exp(x) of the log of a growth, which has an upper bound, to the last bit or so.

    The device's own exponential is off by several bits: too much for a side of 1000 pixels.
    """
    x = tl.where(x > 4.135166556742356, 4.135166556742356, x)  # `reference.MOST_GROWTH`
    x = tl.where(x < -104.0, -104.0, x)  # whose exp is 0
    count = tl.floor(x * 1.4426950408889634 + 0.5)
    count = tl.where(count == count, count, 0.0)
    # ln 2 in two parts, of which the first one's product is not rounded.
    rest = (x - count * 0.693359375) - count * -2.12194440e-4
    value = 1.9875691500e-4 * rest + 1.3981999507e-3
    value = value * rest + 8.3334519073e-3
    value = value * rest + 4.1665795894e-2
    value = value * rest + 1.6666665459e-1
    value = value * rest + 5.0000001201e-1
    value = (value * (rest * rest) + rest) + 1.0
    # A power of two in two factors: the result may be smaller than the smallest normal number.
    power = count.to(tl.int32)
    half = power >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    return value * first * second


@triton.jit
def decoded(x1, y1, x2, y2, dx, dy, dw, dh):
    """The corners of boxes from boxes that codes are relative to, and the codes."""
    wide = x2 - x1
    high = y2 - y1
    across = dx * wide + (x1 + 0.5 * wide)
    down = dy * high + (y1 + 0.5 * high)
    wide = 0.5 * wide * growth(dw)
    high = 0.5 * high * growth(dh)
    return across - wide, down - high, across + wide, down + high
