"""Paged attention, from block ids to an inference engine.

`import paged` is light: each name below is imported from its module when it is first used, so that
the modules that need no torch work without it.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "BlockPool": "block_pool",
    "PrefixCache": "prefix_cache",
    "slot_mapping_for": "slots",
    "Trace": "trace",
    "SamplingParams": "sampling",
    "BeamSearchParams": "sampling",
    "Engine": "engine",
    "EngineConfig": "engine",
    "PagedKVCache": "kv_cache",
    "paged_attention": "attention",
    "LLM": "llm",
    "AsyncLLM": "async_llm",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(set(globals()) | set(__all__))
