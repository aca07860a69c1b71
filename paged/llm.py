"""The engine with a model in it: text in, text out."""

from __future__ import annotations

import gc
import operator
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real

import torch
from tqdm import tqdm

from paged.attention import BACKENDS
from paged.config import EngineConfig, Speedups
from paged.device import enough_memory, use_device
from paged.engine import Engine
from paged.memory import GiB
from paged.models.loader import Loaded, load
from paged.models.loader.tokenizer import Tokenizer
from paged.request import RequestOutput
from paged.sampling import BeamSearchParams, SamplingParams
from paged.startup import (
    MemoryBudget,
    cache_spec,
    cpu_num_blocks,
    make_runner,
    measure_budget,
    timed,
)
from paged.trace import NO_TRACE, Trace

Prompt = str | list[int] | list[dict[str, str]]


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep Python's garbage collector from walking all of PyTorch between two steps, which takes
    milliseconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class LLM:
    """A language model behind a paged engine.

    Args:
        model: a Hugging Face directory or Hub id, a .gguf file, "default", or a Loaded model.
        device: "cpu", "cuda", "cuda:1" (which becomes PyTorch's current GPU), or "auto" for a GPU
            where there is one; given weights stay where they are.
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's on a GPU, float32 on a
            CPU.
        block_size: tokens a block.
        num_blocks: blocks in the pool; None takes what the memory budget allows.
        gpu_memory_utilization: share of the card's memory that may be in use.
        max_model_len: tokens of a request, prompt and output; None takes what the model was trained
            for, or what the pool holds if that is less.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step; None for 8,192 on a GPU and 2,048 on a CPU.
        enable_prefix_caching: share the blocks of common prefixes.
        prefix_cache: how they are found, "hash" or "radix".
        attention_backend: a name of `paged.attention.BACKENDS`, or "auto".
        enforce_eager: no CUDA graphs.
        preemption: "recompute" or "swap".
        seed: for requests that bring no seed of their own.
        kv_cache_dtype: of K and V in the cache, a name of `startup.KV_CACHE_DTYPES`; "auto" is the
            model's.
        speedups: what makes the GPU fast, to be switched off for comparison.
        trace: receives every event.
        use_tqdm: show what start-up does as bars.

    Attributes:
        start_up: seconds of each phase of start-up.
        budget: what the card's memory goes to, where it was measured, or None.

    Raises ValueError, FileNotFoundError and MemoryError with a sentence that says what to do.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    budget: MemoryBudget | None
    _step_needs: tuple[str, str, torch.device]

    def __init__(self, model: str | Loaded = "default", device: str | torch.device = "auto",
                 dtype: str = "auto", block_size: int = 16, num_blocks: int | None = None,
                 gpu_memory_utilization: float = 0.9, max_model_len: int | None = None,
                 max_num_seqs: int = 256, max_num_batched_tokens: int | None = None,
                 enable_prefix_caching: bool = True, prefix_cache: str = "hash",
                 attention_backend: str = "auto", enforce_eager: bool = False,
                 preemption: str = "recompute", seed: int = 0, kv_cache_dtype: str = "auto",
                 speedups: Speedups = Speedups(), trace: Trace = NO_TRACE, use_tqdm: bool = True):
        asked, device = device, use_device(device)
        if isinstance(model, Loaded):
            there = model.decoder.embedding.device
            if asked != "auto" and device not in (there, torch.device(there.type)):
                raise ValueError(
                    f"device is {asked!r} and the weights that were given lie on {str(there)!r}: "
                    f"load them there, or leave device out")
            device = use_device(there)
        if attention_backend not in ("auto", *BACKENDS):
            raise ValueError(
                f"attention_backend is {attention_backend!r}: choose auto, {', '.join(BACKENDS)}")
        if not (isinstance(gpu_memory_utilization, Real) and 0 < gpu_memory_utilization <= 1):
            raise ValueError(
                f"gpu_memory_utilization is {gpu_memory_utilization!r}: it must be above 0, at "
                f"most 1")
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 8192 if device.type == "cuda" else 2048
        # Checked before a model is loaded; the pool is sized after.
        config = EngineConfig(num_blocks=1 if num_blocks is None else num_blocks,
                              block_size=block_size, max_num_seqs=max_num_seqs,
                              max_num_batched_tokens=max_num_batched_tokens,
                              max_model_len=1 if max_model_len is None else max_model_len,
                              enable_prefix_caching=enable_prefix_caching,
                              prefix_cache=prefix_cache, preemption=preemption, seed=seed)
        self.start_up: dict[str, float] = {}
        with timed(self.start_up, "weights"):
            loaded = model if isinstance(model, Loaded) else load(model, device, dtype, use_tqdm,
                                                                  max_model_len)
        self.model_config, self.tokenizer, self.trace = loaded.config, loaded.tokenizer, trace
        card = {"card": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
        trace.emit("MODEL_WEIGHTS_LOADED", model=model if isinstance(model, str) else "given",
                   weights=loaded.num_weights, device=str(device), **card)
        longest = loaded.config.max_position_embeddings
        if max_model_len is not None and max_model_len > longest:
            raise ValueError(
                f"max_model_len is {max_model_len}; the model was trained for {longest} positions: "
                f"lower it")
        config = replace(config, max_model_len=max_model_len or longest)
        spec = cache_spec(loaded.decoder, block_size, kv_cache_dtype)
        self.budget = None
        speedups = replace(speedups, graphs=speedups.graphs and not enforce_eager)
        if num_blocks is None and device.type == "cuda":
            with timed(self.start_up, "warm-up"):
                self.budget = measure_budget(loaded.decoder, spec, config, gpu_memory_utilization,
                                             attention_backend, speedups, trace, use_tqdm)
            num_blocks = self.budget.num_blocks
        elif num_blocks is None:
            num_blocks = cpu_num_blocks(spec, config)
            trace.emit("KV_BUDGET_ESTIMATE", num_blocks=num_blocks, block_bytes=spec.block_bytes)
        capacity = num_blocks * block_size
        if max_model_len is not None and max_model_len > capacity:
            raise ValueError(f"max_model_len is {max_model_len}, and a pool of {num_blocks} blocks "
                             f"of {block_size} holds {capacity} tokens: raise num_blocks or "
                             f"gpu_memory_utilization, or lower max_model_len")
        config = replace(config, num_blocks=num_blocks, max_model_len=min(
            config.max_model_len, capacity))
        with timed(self.start_up,
                   "pool and graphs" if device.type == "cuda" and speedups.graphs else "pool"):
            self.runner = make_runner(loaded.decoder, spec, config, attention_backend, speedups,
                                      use_tqdm)
        self.engine = Engine(config, self.runner, loaded.tokenizer, loaded.eos_token_ids,
                             loaded.config.vocab_size, trace)
        pool = num_blocks * spec.block_bytes / GiB
        self._step_needs = (
            f"a step of up to {max_num_batched_tokens} tokens beside a pool of {num_blocks} blocks "
            f"({pool:.2f} GiB)", "Lower num_blocks, gpu_memory_utilization, max_num_batched_tokens "
            "or max_num_seqs", device)

    # ── generation ────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete every prompt; returns one RequestOutput a prompt, in order.

        Args:
            prompts: one prompt or several. A string is continued as it is, a list of token ids too;
                a list of {"role", "content"} messages goes through the model's chat template.
            sampling_params: one for all, or one a prompt.
            use_tqdm: show progress.

        If one prompt is refused (ValueError), none is run. On an exception or Ctrl-C the engine is
        left empty.
        """
        ids = self._token_ids(prompts)
        params = self._params(sampling_params, len(ids))
        checked = [self.engine.check_request(*request) for request in zip(ids, params)]
        bar = tqdm(total=len(ids), desc="Requests", disable=not use_tqdm, dynamic_ncols=True)
        try:
            request_ids = [
                self.engine.add_checked_request(*request) for request in zip(checked, params)
            ]
            outputs = {request_id: self.engine.output(request_id) for request_id in request_ids}
            running = set(request_ids)
            num_tokens, start = 0, time.perf_counter()
            with short_collections():
                while running and self.engine.has_unfinished():
                    for output in self._step():
                        if output.finished and output.request_id in running:
                            running.remove(output.request_id)
                            num_tokens += output.metrics.num_output_tokens
                            rate = num_tokens / (time.perf_counter() - start)
                            bar.set_postfix_str(f"{num_tokens} tokens, {rate:.0f}/s", refresh=False)
                            bar.update()
            return list(outputs.values())
        except BaseException:
            self.engine.reset()
            raise
        finally:
            bar.close()

    def beam_search(self, prompts: Prompt | Sequence[Prompt], beam_width: int = 4,
                    max_tokens: int = 16, length_penalty: float = 1.0, ignore_eos: bool = False,
                    use_tqdm: bool = True) -> list[RequestOutput]:
        """Find the likeliest completions of every prompt: beam_width of them in each RequestOutput,
        best first.

        `cumulative_logprob` of a completion is its log-probability, and `metrics.memory_saved` the
        share of blocks that the beams saved by sharing. Refuses and fails as `generate` does.
        """
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens,
                                  length_penalty=length_penalty, ignore_eos=ignore_eos)
        return self.generate(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt,
               sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding a snapshot of its RequestOutput whenever tokens were added.

        `new_text` of each of its outputs is what came since the last time. Several streams may be
        read in turn, and `generate` be called between. The request is refused (ValueError) here,
        and starts with the first `next`; closing the iterator early aborts it.
        """
        (ids,) = self._token_ids([prompt])
        (params,) = self._params(sampling_params, 1)
        return self._stream(self.engine.check_request(ids, params), params)

    def _stream(self, prompt: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        request_id = self.engine.add_checked_request(prompt, params)
        output = self.engine.output(request_id)
        num_tokens, shown = 0, {}  # shown: characters of each completion
        try:
            while True:
                if output.metrics.num_output_tokens > num_tokens:
                    num_tokens = output.metrics.num_output_tokens
                    now = output.snapshot()
                    for completion in now.outputs:
                        completion.new_text = completion.text[shown.get(completion.index, 0):]
                        shown[completion.index] = len(completion.text)
                    yield now
                elif output.finished or not self.engine.has_unfinished():
                    return
                else:
                    self._step()
        except Exception:
            self.engine.reset()
            raise
        finally:
            self.engine.abort(request_id)

    def _step(self) -> list[RequestOutput]:
        """A step of the engine; raises MemoryError, with the numbers, when memory runs out in
        it."""
        with enough_memory(*self._step_needs):
            return self.engine.step()

    def _token_ids(self, prompts) -> list[list[int]]:
        """Prompts of any form as token ids."""
        if isinstance(prompts, str):
            prompts = [prompts]
        try:
            if isinstance(prompts, (Mapping, Set)):  # one message, or prompts in no order
                raise TypeError
            prompts = prompts if isinstance(prompts, Sequence) else list(
                prompts)  # arrays, generators
            first = prompts[0] if len(prompts) else None
        except TypeError:
            raise ValueError(
                f"prompts is {prompts!r}: it must be a prompt or a list of prompts") from None
        one = isinstance(first,
                         dict) or hasattr(first, "__index__") and not getattr(first, "shape", ())
        return [self._prompt_ids(prompt) for prompt in ([prompts] if one else prompts)]

    def _prompt_ids(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            encode = "encode"
        elif isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], dict):
            encode = "chat"
        else:
            try:
                if isinstance(prompt, (bytes, Mapping, Set)):
                    raise TypeError
                return [operator.index(token) for token in prompt]
            except TypeError:
                raise ValueError(
                    f"the prompt {prompt!r} is neither a string, nor a list of token ids, nor a "
                    f"list of {{'role', 'content'}} messages") from None
        if self.tokenizer is None:
            raise ValueError(
                "this model came without a tokenizer: give prompts as lists of token ids")
        return getattr(self.tokenizer, encode)(prompt)

    @staticmethod
    def _params(sampling_params, num_prompts: int) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or SamplingParams()] * num_prompts
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
            raise ValueError(
                f"sampling_params is {sampling_params!r}: it must be a SamplingParams, or a list "
                f"of them")
        if len(sampling_params) != num_prompts:
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {num_prompts} prompts: give one, or "
                f"one a prompt")
        return list(sampling_params)
