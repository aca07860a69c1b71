"""Triton kernels, beneath the cache: each does one thing, and knows tensors only."""
