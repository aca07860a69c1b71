import math


def to_fp8(x: float) -> float:
    """The number of FP8 (e4m3) nearest to x."""
    size = min(abs(x), 448.0)
    exponent = max(math.frexp(size)[1] - 1, -6)  # size = 1.… × 2^exponent, but below 2^-6
    step = 2.0**(exponent - 3)
    return math.copysign(min(round(size / step) * step, 448.0), x)


def quantize(row: list[float]) -> tuple[list[float], float]:
    """The numbers of a row as FP8, and their scale."""
    largest = max(abs(x) for x in row)
    scale = largest / 448 if largest else 1.0
    return [to_fp8(x / scale) for x in row], scale


def dequantize(numbers: list[float], scale: float) -> list[float]:
    """What these numbers stand for."""
    return [number * scale for number in numbers]
