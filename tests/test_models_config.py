"""Protects the reading of configs: both spellings of transformers 4 and 5, and a sentence for
everything the decoder does not do. An option read past in silence would give fluent, wrong text."""

import pytest

from paged.models.config import ModelConfig, from_gguf, from_huggingface
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
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}
      }, "'longrope' is not supported"),
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
    ({"attention_bias": True}, "attention_bias to True"),
    ({"mlp_bias": True}, "mlp_bias to True"),
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
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace("{", r"\{")):
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
    ({"llama.expert_count": 8}, set(), "expert_count to 8"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0
      }, set(), "'yarn' is not supported"),
    ({"llama.rope.dimension_count": 4}, set(), "4 of 8 numbers"),
    ({}, {"blk.0.attn_q.bias"}, "has a bias"),
    ({"llama.embedding_length": None}, set(), "does not give embedding_length"),
])
def test_gguf_files_that_are_not_supported(change, names, said):
    fields = {key: value for key, value in {**GGUF, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=said):
        from_gguf(fields, names)


def test_a_config_cannot_be_changed_by_accident():
    with pytest.raises(AttributeError):
        TINY_LLAMA.hidden_size = 5
