def top_p_filter(probs: list[float], top_p: float) -> list[float]:
    """The probabilities of the smallest likely set that reaches top_p, renormalized; 0.0 for all
    others."""
    raise NotImplementedError
