"""Every number of FP8 stays itself, the nearest one is found from both sides, ties go to even."""


def numbers():
    """All numbers of e4m3 from 0 up, from their bits."""
    found = []
    for byte in range(0x7F):
        exponent, step = byte >> 3, byte & 7
        found.append(step * 2.0**-9 if exponent == 0 else (8 + step) * 2.0**(exponent - 10))
    return found


def nearest_of(x):
    """By looking at all of them."""
    choices = numbers()
    best = min(range(len(choices)), key=lambda i: (abs(choices[i] - abs(x)), i % 2))
    return choices[best] if x >= 0 else -choices[best]


def worst(row, quantize, dequantize):
    """The largest error of a row, as a share of each number."""
    back = dequantize(*quantize(row))
    return max(abs(a - b) / abs(a) for a, b in zip(row, back))


def cases():
    yield "every number of FP8 is itself", """
        [to_fp8(x) for x in numbers()]                              # → numbers()
        [to_fp8(-x) for x in numbers()[1:]]                         # → [-x for x in numbers()[1:]]
    """
    yield "halfway: the even step", """
        to_fp8(1.1875)                                              # → 1.25
        to_fp8(17.0)                                                # → 16.0
        to_fp8(-19.0)                                               # → -20.0
        to_fp8(1.9375)                                              # → 2.0
    """
    yield "below 2⁻⁶ the steps stay", """
        to_fp8(0.003)                                               # → 2 * 2.0**-9
        to_fp8(0.0009)                                              # → 0.0
        to_fp8(2.0**-6 - 2.0**-12)                                  # → 2.0**-6
        to_fp8(2.0**-10)                                            # → 0.0
    """
    yield "the largest", """
        to_fp8(450.0)                                               # → 448.0
        to_fp8(465.0)                                               # → 448.0
        to_fp8(1e30)                                                # → 448.0
        to_fp8(0.0)                                                 # → 0.0
    """
    yield "anything between", """
        xs = [0.0173 * 1.37**i for i in range(33)]
        [to_fp8(x) for x in xs]                                     # → [nearest_of(x) for x in xs]
        [to_fp8(-x) for x in xs]                                   # → [nearest_of(-x) for x in xs]
    """
    yield "the largest by size decides, not the largest", """
        quantize([1.0, -7.0])                                       # → ([64.0, -448.0], 7 / 448)
    """
    yield "a row of zeros", """
        quantize([0.0, 0.0])                                        # → ([0.0, 0.0], 1.0)
    """
    yield "rows of any size lose one part in sixteen at most", """
        row = [0.9, -0.31, 0.0101, 0.44, -0.002]
        worst(row, quantize, dequantize) <= 1 / 16 + 1e-9           # → True
        worst([1e-20 * x for x in row], quantize, dequantize) <= 1 / 16 + 1e-9      # → True
        worst([1e20 * x for x in row], quantize, dequantize) <= 1 / 16 + 1e-9       # → True
    """
    yield "the row is left as it was", """
        row = [3.0, -4.0]
        quantize(row)[1]                                            # → 4 / 448
        row                                                         # → [3.0, -4.0]
    """
