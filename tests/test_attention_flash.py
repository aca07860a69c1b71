"""The flash backend hands each library what it wants, and says in a sentence why one cannot be
used.

No GPU and no flash-attn here: modules with the same signatures stand in for the libraries, and
compute what the library would from exactly the arguments they are given. What this cannot show is
that the library does the same.
"""

import sys
import types
from dataclasses import replace

import pytest
import torch

from paged.attention import Shape, flash, reference, resolve
from paged.kv_cache import CacheSpec
from tests.test_attention_triton import MIXTURE, assert_close, batch


def side_by_side(*tensors):
    return all(tensor.is_contiguous() for tensor in tensors)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None,
                            rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                            cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                            cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            softmax_scale=None, causal=False):
    assert causal and cu_seqlens_q.dtype == cache_seqlens.dtype == page_table.dtype == torch.int32
    # A left padding keeps it from the copy engine, through which NaN in unused rows reaches the
    # output.
    assert cache_leftpad.dtype == torch.int32 and cache_leftpad.tolist() == [0] * len(cache_seqlens)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert side_by_side(page_table, cache_seqlens, cu_seqlens_q)
    return reference.run(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q,
                         softmax_scale)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    assert causal and k.shape[
        1] % 256 == 0 and cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(
        cu_seqlens_k.diff().max())
    assert side_by_side(block_table, cu_seqlens_k, cu_seqlens_q)
    return reference.run(q, k, v, block_table, cu_seqlens_k.diff(), cu_seqlens_q, softmax_scale)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None,
                num_splits=None):
    assert tuple(window_size) == (-1,
                                  0) and enable_gqa and num_splits == 1 and key.shape[1] % 256 == 0
    assert max_q >= int(cu_seq_q.diff().max()) and max_k >= int(seqused_k.max())
    assert side_by_side(block_table, seqused_k, cu_seq_q)
    return reference.run(query, key, value, block_table, seqused_k, cu_seq_q, scale)


STAND_INS = {
    "flash_attn_interface": flash_attn_with_kvcache, "flash_attn": flash_attn_varlen_func,
    "torch.nn.attention.varlen": varlen_attn
}


def shape_of(q, k_cache):
    """What these ask of a backend, on a device that is said to be a GPU."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    spec = CacheSpec(1, block_size, num_kv_heads, head_dim, k_cache.dtype)
    return Shape(q.shape[1], q.dtype, spec, torch.device("cuda"))


def why_not(q, k_cache):
    """The reason why no library serves these."""
    with pytest.raises(ValueError) as error:
        flash.resolve(shape_of(q, k_cache))
    return str(error.value)


def install(monkeypatch, *modules):
    """Make exactly these libraries importable, and a Hopper GPU present, as far as the backend
    looks."""
    for name, function in STAND_INS.items():
        module = types.ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module if name in modules else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("module, block_size", [("flash_attn_interface", 3), ("flash_attn", 256),
                                                ("torch.nn.attention.varlen", 256)])
def test_every_library_gets_what_it_wants(monkeypatch, module, block_size):
    q, k, v, *rest = batch(MIXTURE, 4, 2, 16, block_size, dtype=torch.float16)
    want = reference.run(q, k, v, *rest)
    ragged = [row[:-(-n // block_size)] for row, n in zip(rest[0].tolist(), rest[1].tolist())]
    install(monkeypatch, module)
    attention = resolve("flash", shape_of(q, k))
    (library,) = (library for library in flash.LIBRARIES if library.module == module)
    assert attention.name == f"flash ({library.name})" and attention.in_graphs
    assert_close(attention.run(q, k, v, *rest), want)
    lists = ragged, rest[1].tolist(), rest[2].tolist()
    assert_close(attention.run(q, k, v, *lists, rest[3], max_query_len=66), want)
    strided = [x.repeat_interleave(2, -1)[..., ::2] for x in rest[:3]]
    assert_close(attention.run(q, k, v, *strided, rest[3]), want)


def test_the_first_that_can(monkeypatch):
    install(monkeypatch, *STAND_INS)
    q = torch.randn(1, 4, 64, dtype=torch.bfloat16)
    cache = torch.empty(2, 1, 2, 64, dtype=torch.bfloat16)
    assert flash.resolve(shape_of(q, cache)).name == "flash (FlashAttention-3)"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    cache = torch.empty(2, 256, 2, 64, dtype=torch.bfloat16)
    assert flash.resolve(shape_of(q, cache)).name == "flash (FlashAttention-2)"


def test_every_refusal_is_a_sentence(monkeypatch):
    q, cache = torch.randn(1, 4, 64, dtype=torch.float16), torch.empty(
        2, 16, 2, 64, dtype=torch.float16)
    on_cpu = replace(shape_of(q, cache), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="needs a GPU"):
        flash.resolve(on_cpu)
    install(monkeypatch)
    assert why_not(q, cache) == ("FlashAttention-3 is not installed; FlashAttention-2 is not "
                                 "installed; PyTorch's varlen_attn is not installed")
    install(monkeypatch, "flash_attn", "torch.nn.attention.varlen")
    assert "multiple of 256, not 16" in why_not(q, cache)
    install(monkeypatch, "flash_attn_interface")
    assert "float32" in why_not(q.float(), cache)
    assert "multiple of 8 up to 256, not 20" in why_not(q[..., :20], cache[..., :20])
    with pytest.raises(ValueError, match="cannot run here"):
        resolve("flash", shape_of(q.float(), cache.float()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "does not run on compute capability 7.x" in why_not(q, cache)


def test_a_broken_or_older_library_is_a_sentence(monkeypatch):
    q, cache = torch.randn(1, 4, 64, dtype=torch.float16), torch.empty(
        2, 256, 2, 64, dtype=torch.float16)
    install(monkeypatch, *STAND_INS)
    older = types.ModuleType("older")
    older.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", older)
    monkeypatch.setitem(sys.modules, "flash_attn_interface",
                        types.ModuleType("flash_attn_interface"))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "varlen_attn here takes no block_table" in why_not(q, cache)
    assert "FlashAttention-3 cannot be loaded (AttributeError" in why_not(q, cache)
