"""What is not said has the documented value, everywhere the same.

Protects callers and the book's chapters, whose figures rest on these values: whoever changes one
has to change it here as well.
"""

import argparse
from dataclasses import MISSING, fields
from inspect import Parameter, signature

import pytest

from paged import LLM, BeamSearchParams, EngineConfig, SamplingParams
from paged.__main__ import _parser
from paged.config import Speedups
from paged.models.decoder import random_decoder
from paged.models.loader import Loaded, load
from paged.options import NAMES, add_model_options
from paged.server.door import Limits
from paged.trace import NO_TRACE
from tests.small_models import TINY_LLAMA

POLICIES = dict(enable_prefix_caching=True, prefix_cache="hash", preemption="recompute", seed=0)
SAMPLING = dict(n=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                presence_penalty=0.0, frequency_penalty=0.0, max_tokens=16, stop=None,
                stop_token_ids=None, ignore_eos=False, seed=None, logprobs=None, min_tokens=0,
                logit_bias=None, allowed_token_ids=None, bad_words=None,
                include_stop_str_in_output=False, skip_special_tokens=True, prompt_logprobs=None,
                truncate_prompt_tokens=None)
ENGINE = dict(block_size=16, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=4096,
              num_host_blocks=None, **POLICIES)
WHOLE = dict(model="default", device="auto", dtype="auto", block_size=16, num_blocks=None,
             gpu_memory_utilization=0.9, max_model_len=None, max_num_seqs=256,
             max_num_batched_tokens=None, attention_backend="auto", enforce_eager=False,
             kv_cache_dtype="auto", revision=None, tokenizer=None, generation_config="auto",
             speedups=Speedups(), trace=NO_TRACE, use_tqdm=True, tensor_parallel_size=1, **POLICIES)
CHAT = dict(sampling_params=None, use_tqdm=True, add_generation_prompt=None,
            continue_final_message=False, chat_template_kwargs=None, tools=None)
BEAMS = dict(beam_width=4, max_tokens=16, length_penalty=1.0, ignore_eos=False, use_tqdm=True)
DRAWS = dict(max_tokens=256, temperature=0.0, top_k=0, top_p=1.0, seed=0)
LOAD = dict(device="cpu", dtype="auto", use_tqdm=True, max_model_len=None, rank=0, num_ranks=1,
            revision=None, tokenizer=None)
COMMANDS = {
    "generate hi": dict(prompt="hi", system=None, raw=False, stats=False, **DRAWS),
    "trace hi": dict(prompts=["hi"], system=None, raw=False, save=None, metrics=None, **DRAWS),
    "chat": dict(system=None, max_tokens=1024, temperature=None, top_k=None, top_p=None, seed=None),
    "batch a -o b": dict(requests="a", output="b", served_model_name=None, in_flight=None,
                         ray=False, replicas=None),
    "serve": dict(host="127.0.0.1", port=8000, api_keys=None, share_prefixes=False,
                  served_model_name=None, max_requests=None, grace_period=30, log_prompts=False,
                  theatre=False),
}


def of_arguments(function) -> dict:
    return {
        name: argument.default
        for name, argument in signature(function).parameters.items()
        if argument.default is not Parameter.empty
    }


def of_options(add_options) -> dict:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return vars(parser.parse_args([]))


@pytest.mark.parametrize("kind, documented", [
    (EngineConfig, ENGINE),
    (Speedups, dict(graphs=True, fused=None, narrow_products=True, run_ahead=None,
                    persistent=False)),
    (SamplingParams, SAMPLING),
    (Limits, dict(body_bytes=4 << 20, body_seconds=30.0, send_seconds=60.0)),
    (BeamSearchParams, SAMPLING | dict(temperature=0.0, beam_width=4, length_penalty=1.0)),
])
def test_of_what_is_asked_for(kind, documented):
    given = {field.name: field.default for field in fields(kind)}
    assert {name: value for name, value in given.items() if value is not MISSING} == documented


@pytest.mark.parametrize("function, documented", [
    (LLM.__init__, WHOLE),
    (LLM.chat, CHAT),
    (LLM.beam_search, BEAMS),
    (load, LOAD),
    (LLM.generate, dict(sampling_params=None, use_tqdm=True)),
    (LLM.stream, dict(sampling_params=None)),
], ids=lambda value: getattr(value, "__name__", ""))
def test_of_arguments(function, documented):
    assert of_arguments(function) == documented


@pytest.mark.parametrize("line", COMMANDS)
def test_of_commands(line):
    """Of a command's own options, beside those that it shares with others."""
    options = vars(_parser().parse_args(line.split()))
    own = options.keys() - of_options(add_model_options) - {"run"}
    assert {name: options[name] for name in own} == COMMANDS[line]


def test_options_have_the_defaults_of_the_arguments():
    arguments, options = of_arguments(LLM.__init__), of_options(add_model_options)
    assert options.pop("quiet") is False
    assert set(options) == {"model", *NAMES}
    assert options == {name: arguments[name] for name in options}


def test_what_none_becomes():
    """On a CPU: 2,048 tokens a step; a pool for all requests, or as long a request as it holds."""
    loaded = Loaded(random_decoder(TINY_LLAMA), TINY_LLAMA, None, set(), 0)
    config = LLM(loaded, device="cpu", max_num_seqs=2).engine.config
    trained = TINY_LLAMA.max_position_embeddings
    assert (config.max_num_batched_tokens, config.max_model_len) == (2048, trained)
    assert config.num_blocks == 2 * trained // 16
    small = LLM(loaded, device="cpu", num_blocks=3).engine.config
    assert (small.num_blocks, small.max_model_len) == (3, 48)
