"""The engine with a model in it: text in, text out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from paged.attention import BACKENDS
from paged.engine import Engine, EngineConfig
from paged.models.loader import Loaded, load
from paged.request import RequestOutput
from paged.sampling import BeamSearchParams, SamplingParams
from paged.slots import blocks_needed
from paged.startup import Speedups, block_bytes, cpu_num_blocks, make_runner, measure_budget
from paged.trace import NO_TRACE, Trace

Prompt = "str | list[int] | list[dict[str, str]]"

class LLM:
    """A language model behind a paged engine.

    Args:
        model: a Hugging Face directory or Hub id, a .gguf file, "default", or a Loaded model.
        device: "cpu", "cuda", or "auto" for a GPU where there is one.
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's on a GPU, float32 on a CPU.
        block_size: tokens a block.
        num_blocks: blocks in the pool; None takes what the memory budget allows.
        gpu_memory_utilization: share of the card's memory that may be in use.
        max_model_len: tokens of a request, prompt and output; None takes what the model was trained for, or
            what the pool holds if that is less.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step; None for 8,192 on a GPU and 2,048 on a CPU.
        enable_prefix_caching: share the blocks of common prefixes.
        attention_backend: a name of `paged.attention.BACKENDS`, or "auto".
        enforce_eager: no CUDA graphs.
        preemption: "recompute" or "swap".
        seed: for requests that bring no seed of their own.
        speedups: what makes the GPU fast, to be switched off for comparison.
        trace: receives every event.

    Raises ValueError and FileNotFoundError with a sentence that says what to do.
    """

    def __init__(self, model: str | Loaded = "default", device: str = "auto", dtype: str = "auto", block_size: int = 16,
                 num_blocks: int | None = None, gpu_memory_utilization: float = 0.9,
                 max_model_len: int | None = None, max_num_seqs: int = 256,
                 max_num_batched_tokens: int | None = None, enable_prefix_caching: bool = True,
                 attention_backend: str = "auto", enforce_eager: bool = False, preemption: str = "recompute",
                 seed: int = 0, speedups: Speedups = Speedups(), trace: Trace = NO_TRACE):
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = str(torch.device(device))
        except RuntimeError as error:
            raise ValueError(f"device is {device!r}: choose cpu, cuda, cuda:1 and so on, or auto") from error
        if attention_backend != "auto" and attention_backend not in BACKENDS:
            raise ValueError(f"attention_backend is {attention_backend!r}: choose auto, {', '.join(BACKENDS)}")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization!r}: it must be above 0, at most 1")
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 8192 if device != "cpu" else 2048
        # Checked before a model is loaded; the pool is sized after.
        EngineConfig(num_blocks=1 if num_blocks is None else num_blocks, block_size=block_size,
                     max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
                     max_model_len=1 if max_model_len is None else max_model_len, preemption=preemption)
        loaded = model if isinstance(model, Loaded) else load(model, device, dtype)
        self.model_config, self.tokenizer, self.trace = loaded.config, loaded.tokenizer, trace
        trace.emit("MODEL_WEIGHTS_LOADED", model=model if isinstance(model, str) else "given",
                   weights=loaded.num_weights, device=str(device))
        longest = loaded.config.max_position_embeddings
        if max_model_len is not None and max_model_len > longest:
            raise ValueError(f"max_model_len is {max_model_len}; the model was trained for {longest} positions: "
                             f"lower it")
        max_model_len = max_model_len or longest
        self.budget = None                                 # what the card's memory goes to, where it was measured
        speedups = replace(speedups, graphs=speedups.graphs and not enforce_eager)
        sizes = block_size, max_num_seqs, max_model_len
        if num_blocks is None and torch.device(device).type == "cuda":
            self.budget = measure_budget(loaded.decoder, *sizes, max_num_batched_tokens, gpu_memory_utilization,
                                         attention_backend, speedups, trace)
            # More blocks than the requests that may run can fill would never be used.
            num_blocks = min(self.budget.num_blocks, max_num_seqs * blocks_needed(max_model_len, block_size))
        elif num_blocks is None:
            num_blocks = cpu_num_blocks(loaded.decoder, *sizes)
            trace.emit("KV_BUDGET_ESTIMATE", num_blocks=num_blocks, block_bytes=block_bytes(loaded.decoder, block_size))
        config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
                              max_num_batched_tokens=max_num_batched_tokens,
                              max_model_len=min(max_model_len, num_blocks * block_size),
                              enable_prefix_caching=enable_prefix_caching, preemption=preemption, seed=seed)
        self.runner = make_runner(loaded.decoder, config, attention_backend, speedups)
        self.engine = Engine(config, self.runner, loaded.tokenizer, loaded.eos_token_ids,
                             loaded.config.vocab_size, trace)

    # ── generation ────────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete every prompt; returns one RequestOutput a prompt, in order.

        Args:
            prompts: one prompt or several. A string is continued as it is, a list of token ids too; a list of
                {"role", "content"} messages goes through the model's chat template.
            sampling_params: one for all, or one a prompt.
            use_tqdm: show progress.

        If one prompt is refused (ValueError), none is run. On an exception or Ctrl-C the engine is left empty.
        """
        ids = self._token_ids(prompts)
        params = self._params(sampling_params, len(ids))
        outputs: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(ids), desc="Requests", disable=not use_tqdm, dynamic_ncols=True)
        try:
            request_ids = [self.engine.add_request(*request) for request in zip(ids, params)]
            num_tokens, start = 0, time.perf_counter()
            while self.engine.has_unfinished():
                for output in self.engine.step():
                    if output.finished and output.request_id not in outputs:
                        outputs[output.request_id] = output
                        num_tokens += output.metrics.num_output_tokens
                        rate = num_tokens / (time.perf_counter() - start)
                        bar.set_postfix_str(f"{num_tokens} tokens, {rate:.0f}/s", refresh=False)
                        bar.update()
            return [outputs[request_id] for request_id in request_ids]
        except BaseException:
            self.engine.reset()
            raise
        finally:
            bar.close()

    def beam_search(self, prompts: Prompt | Sequence[Prompt], beam_width: int = 4, max_tokens: int = 16,
                    length_penalty: float = 1.0, ignore_eos: bool = False,
                    use_tqdm: bool = True) -> list[RequestOutput]:
        """Find the likeliest completions of every prompt: beam_width of them in each RequestOutput, best first.

        `cumulative_logprob` of a completion is its log-probability, and `metrics.memory_saved` the share of
        blocks that the beams saved by sharing. Refuses and fails as `generate` does.
        """
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens, length_penalty=length_penalty,
                                  ignore_eos=ignore_eos)
        return self.generate(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding its RequestOutput after every step that brought a token.

        `outputs[0].new_text` is what the step added. Closing the iterator early aborts the request.
        """
        (ids,) = self._token_ids([prompt])
        request_id = self.engine.add_request(ids, sampling_params)
        num_tokens = 0
        try:
            while self.engine.has_unfinished():
                for output in self.engine.step():
                    if output.request_id == request_id and output.metrics.num_output_tokens > num_tokens:
                        num_tokens = output.metrics.num_output_tokens
                        yield output
        except Exception:
            self.engine.reset()
            raise
        finally:
            self.engine.abort(request_id)

    def _token_ids(self, prompts) -> list[list[int]]:
        """Prompts of any form as token ids."""
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, dict)))
        ids = []
        for prompt in [prompts] if one else prompts:
            is_text = isinstance(prompt, str)
            is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], dict)
            if not isinstance(prompt, Sequence) or not is_text and not is_chat and any(
                    isinstance(token, str) for token in prompt):
                raise ValueError(f"the prompt {prompt!r} is neither a string, nor a list of token ids, nor a list of "
                                 f"{{'role', 'content'}} messages")
            if (is_text or is_chat) and self.tokenizer is None:
                raise ValueError("this model came without a tokenizer: give prompts as lists of token ids")
            ids.append(self.tokenizer.encode(prompt) if is_text else
                       self.tokenizer.chat(prompt) if is_chat else list(prompt))
        return ids

    @staticmethod
    def _params(sampling_params, num_prompts: int) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or SamplingParams()] * num_prompts
        if len(sampling_params) != num_prompts:
            raise ValueError(f"{len(sampling_params)} sampling_params for {num_prompts} prompts: give one, or one "
                             f"a prompt")
        return list(sampling_params)
