"""Protects the reading of configs: both spellings of transformers 4 and 5, and a sentence for
everything the decoder does not do. An option read past in silence would give fluent, wrong text."""

import json

import pytest

from paged.models.config import ModelConfig
from paged.models.loader.configs import from_huggingface
from paged.models.loader.gguf_config import from_gguf
from tests.small_models import TINY_LLAMA, TINY_MODELS, huggingface_model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5
}
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64
}
GGUF = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 512,
    "llama.embedding_length": 64, "llama.feed_forward_length": 96, "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 4, "llama.rope.freq_base": 5e4, "llama.vocab_size": 100,
    "llama.attention.layer_norm_rms_epsilon": 1e-5
}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_transformers_writes_reads_back(name):
    config = TINY_MODELS[name]
    assert from_huggingface(huggingface_model(config).config.to_dict()) == config


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
], ids=["transformers 4", "older", "transformers 5"])
def test_every_spelling_of_rope(spelling):
    config = from_huggingface({**LLAMA, **spelling})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize("spelling",
                         [{}, {"rope_scaling": None}, {"rope_scaling": {"type": "default"}},
                          {"rope_parameters": {"rope_type": "default"}}])
def test_plain_rope(spelling):
    config = from_huggingface({**LLAMA, **spelling})
    assert config.rope_theta == 10_000 and config.rope_scaling is None


def test_what_a_config_may_leave_out():
    lean = {
        key: value
        for key, value in LLAMA.items() if key not in ("num_key_value_heads", "architectures")
    }
    config = from_huggingface(lean)
    assert (config.num_kv_heads, config.head_dim) == (8, 8)
    assert from_huggingface({**LLAMA, "head_dim": None}).head_dim == 8
    assert from_huggingface({**LLAMA, "head_dim": 20}).head_dim == 20


@pytest.mark.parametrize("change, said", [
    ({"model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"model_type": "mixtral"}, "'mixtral' is not supported"),
    ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported"),
    ({"model_type": None}, "None is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "'su' is not supported"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate .* is 1"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}}, "beta_fast .*'32'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 0.5}, "above 1"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1}, "above 1"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "head_dim": 2}, "head_dim above 2"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "more than 2147483648"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor .* is 0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "factor .* is True"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": float("inf")}}, "factor .* is inf"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "alpha": 9.0}}, "set alpha"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "set mrope_section"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}
      }, "short_factor, long_factor"),
    ({
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4
        }
    }, "short_factor .* 4 numbers"),
    ({
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 0.0, 1.0]
        }
    }, "long_factor .* is 0.0"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "smaller"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "factor 0.5"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ({
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0}
    }, "keep the one"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set for all layers"),
    ({"rope_scaling": "yarn"}, "'yarn' are not supported"),
    ({"rope_theta": "x"}, "rope_theta is 'x'"),
    ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    ({"model_type": ["llama"]}, "is not supported"),
    ({"attention_bias": "false"}, "attention_bias to 'false': it must be true or false"),
    ({"mlp_bias": "true"}, "mlp_bias to 'true': it must be true or false"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings to 'false': it must be true or false"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings to 1: it must be true or false"),
    ({"model_type": "qwen2", "architectures": None, "mlp_bias": True}, "no bias in its MLP"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": True}, "rms_norm_eps is True"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({
        "head_dim": "8",
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    }, "head_dim is '8'"),
    ({"num_attention_heads": 65, "num_key_value_heads": 5}, "head_dim is 0"),
    ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0"),
    ({"max_position_embeddings": None}, "max_position_embeddings is None"),
    ({"architectures": "LlamaModel"}, "holds a LlamaModel"),
    ({"layer_types": "full_attention"}, "layer_types to 'full_attention'"),
    ({"layer_types": ["chunked_attention"]}, "layer_types to "),
    ({"hidden_act": "gelu"}, "hidden_act to 'gelu'"),
    ({"quantization_config": {"quant_method": "awq"}
      }, "quantization_config to {'quant_method': 'awq'}"),
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "window 8"),
    ({"num_key_value_heads": 3}, "8 query heads cannot share 3 KV heads"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"num_hidden_layers": "two"}, "num_layers is 'two'"),
])
def test_what_is_not_supported_is_said(change, said):
    with pytest.raises(ValueError, match=said.replace("{", r"\{")):
        from_huggingface({**LLAMA, **change})


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_named(missing):
    with pytest.raises(ValueError, match=f"does not give {missing}"):
        from_huggingface({key: value for key, value in LLAMA.items() if key != missing})


QWEN = {
    **LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 128
}


@pytest.mark.parametrize(
    "unused",
    [
        {"use_sliding_window": False, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 2},  # from layer 2 on, and there are two
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    ])
def test_a_sliding_window_that_no_layer_uses_is_fine(unused):
    assert from_huggingface({**QWEN, **unused}).attention_bias


def test_a_sliding_window_in_use_is_refused():
    with pytest.raises(ValueError, match="window 128"):
        from_huggingface({**QWEN, "use_sliding_window": True, "max_window_layers": 1})


def test_gguf_metadata():
    config = from_gguf(GGUF, {"output.weight"})
    assert config == ModelConfig("llama", 100, 64, 96, 2, 8, 4, 8, 1e-5, 5e4, None, False, False,
                                 False, 512)
    assert from_gguf(GGUF, set()).tie_word_embeddings
    assert from_gguf({**GGUF, "llama.attention.key_length": 20}, set()).head_dim == 20
    linear = from_gguf(
        {**GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, set())
    assert linear.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("change, names, said", [
    ({"general.architecture": "gemma"}, set(), "'gemma' is not supported"),
    ({"general.type": "adapter"}, set(), "'adapter'"),
    ({"llama.expert_count": 8}, set(), "expert_count to 8"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0
      }, set(), "'longrope' is not supported"),
    ({"llama.rope.scaling.type": 3}, set(), "3 is not supported"),
    ({"llama.rope.scaling.factor": -2.0}, set(), "factor is -2.0"),
    ({"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 2.0
      }, set(), "attn_factor to 2.0"),
    ({"llama.rope.dimension_count": 4}, set(), "rope.dimension_count to 4 and a head has 8"),
    ({"llama.attention.value_length": 4}, set(), "attention.value_length to 4"),
    ({"llama.attention.sliding_window": 64}, set(), "sliding_window to 64"),
    ({"llama.attention.scale": 0.1}, set(), "llama.attention.scale to 0.1"),
    ({"llama.logit_scale": 0.5}, set(), "llama.logit_scale to 0.5"),
    ({"llama.attention.causal": False}, set(), "llama.attention.causal to False"),
    ({"llama.attention.head_count": [8, 4]}, set(), r"num_heads is \[8, 4\]"),
    ({"llama.never_heard_of": 1}, set(), "llama.never_heard_of to 1"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, set(), "layer_norm_rms_epsilon"),
    ({"llama.embedding_length": None}, set(), "does not give embedding_length"),
])
def test_gguf_files_that_are_not_supported(change, names, said):
    fields = {key: value for key, value in {**GGUF, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=said):
        from_gguf(fields, names)


def test_gguf_factors_without_a_type_are_linear():
    """As in llama.cpp, where the type is linear until a key says otherwise."""
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        config = from_gguf({**GGUF, key: 4.0}, set())
        assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
        assert config.max_position_embeddings == 4 * 512
    none = from_gguf({**GGUF, "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
                     set())
    for plain in (none, from_gguf({**GGUF, "llama.rope.scaling.factor": 0.0}, set())):
        assert plain.rope_scaling is None and plain.max_position_embeddings == 512


NEUTRAL = {
    "attention.causal": True, "use_parallel_residual": False, "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
    "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0, "expert_count": 0,
    "expert_used_count": 0, "expert_shared_count": 0, "leading_dense_block_count": 0,
    "nextn_predict_layers": 0, "pooling_type": 0, "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.alpha": 0.0
}


@pytest.mark.parametrize("key", NEUTRAL)
def test_gguf_keys_that_ask_for_nothing(key):
    name, value = f"llama.{key}", NEUTRAL[key]
    assert from_gguf({**GGUF, name: value}, set()) == from_gguf(GGUF, set())
    with pytest.raises(ValueError, match=f"sets {name} to"):
        from_gguf({**GGUF, name: not value if isinstance(value, bool) else value + 1}, set())


def test_gguf_keys_that_are_harmless():
    harmless = {
        "llama.attention.sliding_window": 0, "llama.tensor_data_layout": "Meta AI original pth",
        "llama.rope.scaling.finetuned": True, "llama.rope.dimension_count": 8,
        "llama.attention.value_length": 8, "llama.rope.scaling.attn_factor": 1.0,
        "general.name": "x", "general.type": "model", "quantize.imatrix.file": "y"
    }
    assert from_gguf({**GGUF, **harmless}, set()) == from_gguf(GGUF, set())
    window = {"llama.attention.sliding_window": 512}  # as long as the context
    assert from_gguf({**GGUF, **window}, set()) == from_gguf(GGUF, set())


def test_gguf_biases_are_read_from_the_tensors():
    names = {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"}
    config = from_gguf(GGUF, names)
    assert config.attention_bias and config.output_bias and config.mlp_bias
    fields = {key.replace("llama", "qwen2"): value for key, value in GGUF.items()}
    with pytest.raises(ValueError, match="no bias on Q, K and V"):
        from_gguf({**fields, "general.architecture": "qwen2"}, set())


def test_numbers_that_a_config_leaves_out_are_those_of_transformers():
    """Where a checkpoint says nothing, it was trained with what its code says."""
    import transformers

    needed = {
        "vocab_size": 100, "hidden_size": 4096, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 32
    }
    for kind in ("Llama", "Qwen2", "Qwen3", "Mistral"):
        theirs = getattr(transformers, f"{kind}Config")(**needed)
        lean = {**needed, "model_type": kind.lower(), "sliding_window": None}
        ours = from_huggingface(lean)
        head_dim = getattr(theirs, "head_dim", 4096 // 32)
        assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("scaling, positions", [
    ({"type": "linear", "factor": 4.0}, 2048),
    ({"type": "yarn", "factor": 4.0}, 2048),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
    ({"type": "dynamic", "factor": 4.0}, 512),
    ({"type": "llama3", **LLAMA3}, 512),
    ({
        "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64
    }, 512),
])
def test_positions_that_a_scaled_model_runs_for(scaling, positions):
    config = from_huggingface({**LLAMA, "rope_scaling": scaling})
    assert config.max_position_embeddings == positions


MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize("window, runs", [(None, True), (512, True), (511, False), (..., True)])
def test_mistral_with_and_without_a_window(window, runs):
    """Left out, the window is 4,096, which a context of 512 fits into."""
    config = MISTRAL if window is ... else {**MISTRAL, "sliding_window": window}
    if runs:
        assert from_huggingface(config).architecture == "mistral"
    else:
        with pytest.raises(ValueError, match="window 511"):
            from_huggingface(config)
    with pytest.raises(ValueError, match="window 4096"):
        from_huggingface({**MISTRAL, "max_position_embeddings": 32_768})


def test_biases():
    config = from_huggingface({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert config.attention_bias and config.output_bias and config.mlp_bias
    config = from_huggingface({**QWEN, "attention_bias": False})  # no switch of Qwen2
    assert config.attention_bias and not config.output_bias
    assert not from_huggingface({**MISTRAL, "attention_bias": True}).attention_bias


def test_a_config_cannot_be_changed_by_accident():
    with pytest.raises(AttributeError):
        TINY_LLAMA.hidden_size = 5


def test_documented_defaults():
    config = ModelConfig("llama", 1, 1, 1, 1, 1, 1, 2)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10_000.0)
    assert config.rope_scaling is None and config.max_position_embeddings == 2048
    assert not (config.tie_word_embeddings or config.attention_bias or config.qk_norm
                or config.output_bias or config.mlp_bias)


def test_the_config_is_left_as_it_is():
    config = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}
    before = json.dumps(config)
    from_huggingface(config)
    assert json.dumps(config) == before
