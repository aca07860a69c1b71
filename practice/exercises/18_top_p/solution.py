def top_p_filter(probs: list[float], top_p: float) -> list[float]:
    """The probabilities of the smallest likely set that reaches top_p, renormalized; 0.0 for all
    others."""
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: it must be above 0 and at most 1")
    result, total = [0.0] * len(probs), 0.0
    for index in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if total >= top_p or probs[index] == 0:
            break
        result[index] = probs[index]
        total += probs[index]
    return [p / total for p in result]
