"""The engine with a model in it: text in, text out."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from queue import SimpleQueue
from typing import Any

import torch
from tqdm import tqdm

from paged.attention import BACKENDS
from paged.call import Call, Checked, News
from paged.checks import refuses
from paged.config import EngineConfig, Speedups
from paged.device import enough_memory, use_device
from paged.engine import Engine
from paged.memory import GiB
from paged.models.loader import Loaded, load
from paged.models.loader.tokenizer import Tokenizer
from paged.owner import Owner
from paged.parallel.ranks import Driver, Ranks, Worker
from paged.parallel.runner import RankedRunner, on_every_rank, serve
from paged.prompts import Prompt, is_conversation, one_params_a_prompt, read_prompt, split_prompts
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

LEFT_OUT = """
    enable_lora max_loras max_lora_rank lora_modules quantization load_format trust_remote_code
    pipeline_parallel_size data_parallel_size enable_expert_parallel distributed_executor_backend
    speculative_config speculative_model num_speculative_tokens structured_outputs_config
    guided_decoding_backend limit_mm_per_prompt mm_processor_kwargs scheduling_policy
    cpu_offload_gb swap_space hf_overrides task runner_type"""


@refuses("LLM", LEFT_OUT)
class LLM:
    """A language model behind a paged engine. Any number of threads may call it at once.

    Args:
        model: a Hugging Face directory or Hub id, a .gguf file, "default", a Loaded model, or a
            function that makes one as `loader.load` does, of what that takes behind the model.
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
            model's, "fp8" takes half of bfloat16's bytes (`fp8.py`).
        revision: of a model on the Hub, a branch, a tag or a commit; None is the newest.
        tokenizer: another than the model's: a directory or a Hub id that has one, or a Tokenizer.
        generation_config: "auto" samples as the checkpoint's generation_config.json says where a
            call brings no sampling_params, "none" as SamplingParams() does.
        tensor_parallel_size: GPUs (or, on a CPU, processes) that share the model, each with its
            part of the weights, K and V. One process each is started here; under torchrun, on one
            machine or several, the processes are those that it has started, each of which makes
            the same LLM: the first goes on, the others serve it and end with it.
        speedups: what makes the GPU fast, to be switched off for comparison.
        trace: receives every event.
        use_tqdm: show what start-up does as bars.

    Attributes:
        start_up: seconds of each phase of start-up.
        budget: what the card's memory goes to, where it was measured, or None.
        tokenizer: the checkpoint's, or None.
        default_sampling_params: of calls that bring none.
        engine: the owner's; only for whoever makes no call meanwhile.
        owner: runs the engine, see `paged.owner`.
        ranks: those that share the model, or None.

    Raises ValueError, FileNotFoundError and MemoryError with a sentence that says what to do.
    """

    engine: Engine
    owner: Owner
    tokenizer: Tokenizer | None
    default_sampling_params: SamplingParams
    _finalizer: Any
    budget: MemoryBudget | None
    ranks: Ranks | None

    @on_every_rank
    def __init__(self, model: str | Loaded | Callable[..., Loaded] = "default",
                 device: str | torch.device = "auto", dtype: str | torch.dtype = "auto",
                 block_size: int = 16, num_blocks: int | None = None,
                 gpu_memory_utilization: float = 0.9, max_model_len: int | None = None,
                 max_num_seqs: int = 256, max_num_batched_tokens: int | None = None,
                 enable_prefix_caching: bool = True, prefix_cache: str = "hash",
                 attention_backend: str = "auto", enforce_eager: bool = False,
                 preemption: str = "recompute", seed: int = 0, kv_cache_dtype: str = "auto",
                 revision: str | None = None, tokenizer: str | Tokenizer | None = None,
                 generation_config: str = "auto", speedups: Speedups = Speedups(),
                 trace: Trace = NO_TRACE, use_tqdm: bool = True, *, tensor_parallel_size: int = 1):
        ranks = self.ranks
        asked, device = device, use_device(device)
        if isinstance(model, Loaded):
            there = model.decoder.embedding.device
            if asked != "auto" and device not in (there, torch.device(there.type)):
                raise ValueError(
                    f"device is {asked!r} and the weights that were given lie on {str(there)!r}: "
                    f"load them there, or leave device out")
            device = use_device(there)
        if callable(model) or isinstance(model, Loaded):
            if revision is not None or tokenizer is not None:
                raise ValueError("revision and tokenizer are for models that are loaded here: a "
                                 "Loaded model has its own")
        if attention_backend not in ("auto", *BACKENDS):
            raise ValueError(
                f"attention_backend is {attention_backend!r}: choose auto, {', '.join(BACKENDS)}")
        if generation_config not in ("auto", "none"):
            raise ValueError(f"generation_config is {generation_config!r}: choose auto or none")
        if not (isinstance(gpu_memory_utilization, Real) and 0 < gpu_memory_utilization <= 1):
            raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization!r}: it must be "
                             f"above 0, at most 1")
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
            read = model if callable(model) else partial(load, model, revision=revision,
                                                         tokenizer=tokenizer)
            part = () if ranks is None else (ranks.rank, ranks.size)
            loaded = (model if isinstance(model, Loaded) else read(device, dtype, use_tqdm,
                                                                   max_model_len, *part))
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
        if ranks is not None:  # block 7 is the same tokens on every rank
            num_blocks = ranks.smallest(num_blocks)
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
        if isinstance(ranks, Worker):
            serve(self.runner, ranks)
            ranks.close()
            raise SystemExit  # the rest of the program is rank 0's
        if isinstance(ranks, Driver):
            self.runner = RankedRunner(self.runner, ranks)
        self.engine = Engine(config, self.runner, loaded.tokenizer, loaded.eos_token_ids,
                             loaded.config.vocab_size, trace)
        pool = num_blocks * spec.block_bytes / GiB
        self.default_sampling_params = SamplingParams(
            **(loaded.generation_defaults if generation_config == "auto" else {}))
        needs = (
            f"a step of up to {max_num_batched_tokens} tokens beside a pool of {num_blocks} blocks "
            f"({pool:.2f} GiB)", "Lower num_blocks, gpu_memory_utilization, max_num_batched_tokens "
            "or max_num_seqs", device)
        engine = self.engine

        def step() -> list[RequestOutput]:
            with enough_memory(*needs):
                return engine.step()

        self.owner = Owner(engine, step)
        self._finalizer = weakref.finalize(self, _close, self.owner, ranks)

    # ── generation ────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete every prompt; returns one RequestOutput a prompt, in order.

        Args:
            prompts: one prompt or several. A string is continued as it is, a list of token ids (or
                {"prompt_token_ids": ids}) too; a list of {"role", "content"} messages goes through
                the model's chat template.
            sampling_params: one for all, or one a prompt; None takes `default_sampling_params`.
            use_tqdm: show progress.

        If one prompt is refused (ValueError), none is run. On an exception or Ctrl-C these requests
        are aborted, and nobody else's. A request that fails says so (finish_reason "error", and
        `error`) and the others go on; the exception of a step is raised where it ended all of them.
        """
        return self._generate(self.check(prompts, sampling_params), use_tqdm)

    def chat(self, messages: list[dict] | Sequence[list[dict]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             use_tqdm: bool = True, add_generation_prompt: bool | None = None,
             continue_final_message: bool = False, chat_template_kwargs: dict | None = None,
             tools: list[dict] | None = None) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], or a list of such lists.
            sampling_params, use_tqdm: as for `generate`.
            add_generation_prompt: begin an answer; None does, unless the last message is continued.
            continue_final_message: go on where the last message's content ends.
            chat_template_kwargs: more variables for the template, as enable_thinking.
            tools: what the model may call, as JSON schemas.

        Refuses and fails as `generate` does.
        """
        options = dict(add_generation_prompt=add_generation_prompt, tools=tools,
                       continue_final_message=continue_final_message,
                       chat_template_kwargs=chat_template_kwargs)
        return self._generate(self.check(messages, sampling_params, options), use_tqdm)

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
        """Complete one prompt, yielding a snapshot of its RequestOutput whenever tokens were added,
        and at its end.

        `new_text` of each of its outputs is what came since the last time. The request is refused
        (ValueError) here, and starts with the first `next`; closing the iterator early aborts it. A
        step that fails because of it raises.
        """
        (request,) = self.check([prompt], sampling_params)
        return self.follow(request)

    def check(self, prompts, sampling_params=None, chat: dict | None = None) -> list[Checked]:
        """Prompts of any form as requests that can be served; ValueError if one cannot.

        chat: options of `tokenizer.chat`, for conversations only.
        """
        self.owner.check_open()
        prompts = split_prompts(prompts)
        params = one_params_a_prompt(
            self.default_sampling_params if sampling_params is None else sampling_params,
            len(prompts))
        if chat is not None and not all(is_conversation(prompt) for prompt in prompts):
            raise ValueError(f"messages is {prompts!r}: it must be a list of {{'role', 'content'}} "
                             f"messages, or a list of such lists")
        requests = []
        for prompt, param in zip(prompts, params):
            text, ids = read_prompt(prompt, self.tokenizer, **chat or {})
            requests.append(Checked(text, self.engine.check_request(ids, param), param))
        return requests

    def _generate(self, requests: list[Checked], use_tqdm: bool) -> list[RequestOutput]:
        box: SimpleQueue[News] = SimpleQueue()
        call, ended = Call(self.owner, requests, box.put), []
        bar = tqdm(total=len(requests), desc="Requests", disable=not use_tqdm, dynamic_ncols=True)
        try:
            call.start()
            num_tokens, start = 0, time.perf_counter()
            for _ in requests:
                ended.append(box.get())
                num_tokens += ended[-1].output.metrics.num_output_tokens
                rate = num_tokens / (time.perf_counter() - start)
                bar.set_postfix_str(f"{num_tokens} tokens, {rate:.0f}/s", refresh=False)
                bar.update()
            return call.outputs_of(ended)
        finally:
            call.close()
            bar.close()

    def follow(self, request: Checked) -> Generator[RequestOutput, None, None]:
        """`stream` for a request that `check` has let pass."""
        box: SimpleQueue[News] = SimpleQueue()
        call = Call(self.owner, [request], box.put, partial=True)
        try:
            call.start()
            while True:
                news = box.get()
                yield call.next_output(news)
                if news.output.finished:
                    return
                call.ask()
        finally:
            call.close()

    # ── beside it ─────────────────────────────────────────────────────────────────────────────────

    def abort(self, request_id: str) -> bool:
        """End a request, from any thread; its caller gets what there is, with finish_reason
        "abort". False if no unfinished request has this id."""
        return self.owner.do(self.owner.abort, request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; requests that run are computed again."""
        self.owner.do(self.owner.forget_prefixes)

    def close(self) -> None:
        """Abort what runs, and give the memory back. Calls are refused from here on; `with` does
        this at its end."""
        self._finalizer()
        for name in ("engine", "runner"):
            self.__dict__.pop(name, None)
        gc.collect()
        lost = self.ranks is not None and self.ranks.lost is not None
        if torch.cuda.is_available() and not lost:  # a GPU that waits for a lost rank never answers
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _close(owner: Owner, ranks: Ranks | None) -> None:
    owner.close()
    if ranks is not None:
        ranks.close()
