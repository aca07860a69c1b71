def to_fp8(x: float) -> float:
    """The number of FP8 (e4m3) nearest to x."""
    raise NotImplementedError


def quantize(row: list[float]) -> tuple[list[float], float]:
    """The numbers of a row as FP8, and their scale."""
    raise NotImplementedError


def dequantize(numbers: list[float], scale: float) -> list[float]:
    """What these numbers stand for."""
    raise NotImplementedError
