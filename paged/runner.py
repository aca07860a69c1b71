"""Turns batches into tensors and runs the model over the paged cache, with CUDA graphs or without.

Every running request has a seat (`seats.py`): its block table, its last token and what it asks of
the sampler live where the model runs. A step sends one small array of integers, and the rest
happens there, from end to end:

    CPU    ids or −1, seats, new blocks, lengths, offsets ──► one copy
    GPU    prepare ► layers ► logits ► sample ► tokens[seat] ──► one copy back, read a step later

The same function runs a step of any size, with plain operations or with fused ones. On a GPU it is
captured once for the sizes up to the largest of MIXED_SIZES, and replayed, padded up to the next of
them: padding has position −1, slot −1 and an empty context, and touches nothing. A decode step has
one token a request; a mixed step (chunks beside decodes) has its own sizes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import repeat

import torch
from tqdm import tqdm

from paged.attention import Shape, resolve
from paged.batch import Batch, RowOutput
from paged.config import EngineConfig, Speedups
from paged.device import why_no_triton
from paged.kv_cache import PagedKVCache, copy_between
from paged.models.decoder import Decoder, PlainOperations, SummedOperations, rms_norm
from paged.parallel.sums import Sums
from paged.sampler import logprobs
from paged.sampler import sample as plain_sample
from paged.seats import Prepared, Seats
from paged.seats import prepare as plain_prepare
from paged.slots import blocks_needed

# Tokens of captured steps with chunks.
MIXED_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384)


class StepInputs:
    """What one size of step reads, as views of one int32 array on the device with a twin on the
    host.

    Attributes:
        ids: [tokens]; PENDING is the token last drawn for the seat.
        seats, new_blocks, samples, seq_lens: [rows].
        query_start_loc: [rows + 1].
        turn: [1]; which row of the runner's output this step writes.
    """

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device):
        self.num_tokens, self.num_rows = num_tokens, num_rows
        sizes = [num_tokens] + [num_rows] * 4 + [num_rows + 1, 1]
        # Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for others.
        places = [-(-size // 4) * 4 for size in sizes]

        def parts(array: torch.Tensor) -> list[torch.Tensor]:
            return [part[:size] for part, size in zip(array.split(places), sizes)]

        self.device_array = torch.zeros(sum(places), dtype=torch.int32, device=device)
        (self.ids, self.seats, self.new_blocks, self.samples, self.seq_lens, self.query_start_loc,
         self.turn) = parts(self.device_array)
        # Two twins: one may still be on its way while the next step is written to the other.
        pinned = device.type == "cuda"
        self._twins = [
            torch.empty(sum(places), dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._views = [[part.numpy() for part in parts(twin)] for twin in self._twins]
        self._copied = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._turn = 0

    def send(self, values: Sequence[Sequence[int]], padding: Sequence[int]) -> None:
        """Copy the lists to the device, each padded to its size, in the order of the attributes."""
        self._turn = 1 - self._turn
        if self._copied:  # waits only if steps were dropped, by an interruption
            self._copied[self._turn].synchronize()
        for view, items, pad in zip(self._views[self._turn], values, padding):
            view[:len(items)] = items
            view[len(items):] = pad
        self.device_array.copy_(self._twins[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


class ModelRunner:
    """Runs batches: `launch` starts a step, `collect` waits for its tokens.

    Args:
        decoder: the model.
        kv: the cache its K and V live in.
        config: the sizes of the engine.
        attention_backend: a name of `attention.BACKENDS`, or "auto".
        host_kv: the cache in host memory that preempted requests are swapped to; None if they
            recompute.
        speedups: what makes a GPU fast.

    Attributes:
        attention: the backend in use.
        fused: whether the operations are the fused ones.
        use_graphs: whether steps are captured and replayed, as `capture` prepares.
        sums: what it computes with other ranks, if the decoder is a part of a model, or None.

    Raises ValueError for a backend, or fused operations, that cannot run here, with the reason.
    """

    needs_lists = False

    def __init__(self, decoder: Decoder, kv: PagedKVCache, config: EngineConfig,
                 attention_backend: str = "auto", host_kv: PagedKVCache | None = None,
                 speedups: Speedups = Speedups()):
        self.decoder, self.kv, self.host_kv, self.config = decoder, kv, host_kv, config
        self.device = device = kv.data.device
        on_gpu = device.type == "cuda"
        self.runs_ahead = on_gpu if speedups.run_ahead is None else speedups.run_ahead
        model, dtype = decoder.config, decoder.embedding.dtype
        self.attention = resolve(attention_backend, Shape(model.num_heads, dtype, kv.spec, device))
        self.scale = kv.head_dim**-0.5
        missing = why_no_triton(device)
        if speedups.fused and missing:
            raise ValueError(f"speedups ask for fused operations, and {missing}")
        self.fused = on_gpu and not missing if speedups.fused is None else speedups.fused
        self.use_graphs = speedups.graphs and self.fused and self.attention.in_graphs
        vocab_size, self.sums = model.vocab_size, None
        if decoder.part is not None:
            vocab_size = decoder.part.whole.vocab_size
            self.sums = Sums(decoder.part, config.max_num_seqs, dtype, device)
        if self.fused:
            from paged.models.fused import FusedModel

            self.model = FusedModel(decoder, kv, config.max_model_len,
                                    None if speedups.narrow_products else 0, self.sums)
        self.layers = self._one_kernel(missing) if speedups.persistent else None
        self.seats = Seats(config.max_num_seqs,
                           blocks_needed(config.max_model_len, kv.block_size) + 1, vocab_size,
                           device)
        # What every step writes, graph or not: one buffer for all sizes.
        self.logits = torch.empty(config.max_num_seqs, vocab_size, dtype=dtype, device=device)
        # Steps take turns: while one draws its tokens, those of the one before are being copied.
        self.drawn = torch.empty(2, config.max_num_seqs, dtype=torch.int32, device=device)
        self._turn = 0
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        self._steps: dict[tuple[int, int], tuple] = {}  # (tokens, rows) -> (inputs, replay)
        most = min(config.max_num_seqs, config.max_num_batched_tokens)  # requests of a decode step
        step = 8 if most >= 8 else 1
        self.decode_sizes = sorted({1, 2, 4} & set(range(most + 1))
                                   | set(range(step, most + 1, step)) | {most})
        enough = [size for size in MIXED_SIZES if size >= config.max_num_batched_tokens]
        last = enough[0] if enough else MIXED_SIZES[-1]
        self.mixed_sizes = [size for size in MIXED_SIZES if size <= last]

    # ── a step ────────────────────────────────────────────────────────────────────────────────────

    def execute(self, batch: Batch) -> list[int | RowOutput]:
        """One entry a request of the batch; see `Engine`."""
        return self.collect(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: Batch):
        """Start a step; returns what `collect` wants. A step is to be collected before the next but
        one starts."""
        self._use_device()
        copy_between(self.kv, self.host_kv, batch.swap_out)
        self.kv.copy_blocks(batch.block_copies)
        copy_between(self.host_kv, self.kv, batch.swap_in)
        num_tokens, num_rows = len(batch.input_ids), len(batch.seats)
        if not num_rows:
            return None
        new_blocks = self.seats.update(batch)
        inputs, replay = self._step_for(num_tokens, num_rows)
        self._turn = 1 - self._turn
        inputs.send((batch.input_ids, batch.seats, new_blocks, batch.samples, batch.seq_lens,
                     batch.query_start_loc, [self._turn]),
                    (0, self.config.max_num_seqs, -1, 0, 0, num_tokens, 0))
        # Log-probabilities are few requests' wish: beside the graph, and read with the tokens.
        # Those of a prompt want what the layers gave for all of its tokens, which no graph keeps.
        if batch.prompt_logprobs:
            hidden = self._run(inputs)
        else:
            replay()
        drawn = self.drawn[self._turn, :num_rows]
        wanted = [drawn]
        if rows := list(batch.num_logprobs):
            at = self.seats.send(rows, torch.int64)
            wanted += logprobs(self.logits[at], drawn[at], max(batch.num_logprobs.values()))
        for row, (count, behind) in batch.prompt_logprobs.items():
            first = batch.query_start_loc[row]
            wanted += self._prompt_logprobs(hidden[first:first + len(behind)], behind, count)
        return batch, *self._fetch(wanted)

    def _prompt_logprobs(self, x: torch.Tensor, behind: list[int],
                         count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probabilities [tokens, 1 + count] of the tokens behind x [tokens, hidden]."""
        tokens, found = self.seats.send(behind, torch.int64), []
        most = len(self.logits)  # few logits at once: a prompt's would be gigabytes
        for start in range(0, len(behind), most):
            part = x[start:start + most]
            logits = self._head(part, self.logits[:len(part)])
            found.append(logprobs(logits, tokens[start:start + most], count))
        ids, values = zip(*found)
        return torch.cat(ids), torch.cat(values)

    def _fetch(self, wanted: list[torch.Tensor]):
        """Copies of these tensors on the host, and the event after which they are there."""
        if self._copies is None:
            return [tensor.clone() for tensor in wanted], None
        # On a stream of its own, so that the next step need not wait for the copy.
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            copies = []
            for tensor in wanted:
                tensor.record_stream(self._copies)
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return copies, done

    def _use_device(self) -> None:
        """Triton launches on the current device, which another engine or a new thread may have left
        elsewhere."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def collect(self, handle) -> list[int | RowOutput]:
        """What a launched step gave, one entry a request of its batch; waits for the device."""
        if handle is None:
            return []
        batch, (tokens, *more), done = handle
        samples = batch.samples
        if done is not None:
            done.synchronize() if self.sums is None else self.sums.wait(done)
        results: list[int | RowOutput] = tokens.tolist()
        tables = iter(more)
        if asked := batch.num_logprobs:
            for row, likeliest in zip(asked, _dicts(tables, asked.values())):
                results[row] = RowOutput([results[row]], [likeliest])
        for row, (count, _) in batch.prompt_logprobs.items():
            result = results[row]
            if not isinstance(result, RowOutput):
                results[row] = result = RowOutput([result])
            result.prompt_logprobs = _dicts(tables, repeat(count))
        if -1 in tokens.tolist():
            for row, token in enumerate(tokens.tolist()):
                if token == -1 and samples[row]:
                    results[row] = RowOutput(
                        error=(f"the logits hold NaN or infinity: the weights are damaged, or "
                               f"{self.decoder.embedding.dtype} is too narrow for this model; or "
                               f"allowed_token_ids, bad_words and min_tokens leave no token"))
        return results

    def _run(self, inputs: StepInputs) -> torch.Tensor:
        """The step itself, from end to end; this is what graphs capture. Returns what the layers
        gave, [tokens, hidden]."""
        decode = inputs.num_tokens == inputs.num_rows
        step = self._prepare(inputs)
        if decode and self.layers is not None and self.layers.takes(step):
            hidden = self.layers.run(step, inputs.seq_lens, inputs.query_start_loc, self.scale)
        else:
            operations = self._operations(inputs, step, 1 if decode else None)
            hidden = self.decoder.run(step.x, operations)
        x = hidden
        if not decode:  # each request's last token
            x = x.index_select(0, (inputs.query_start_loc[1:] - 1).clamp(min=0))
        logits = self._head(x, self.logits[:inputs.num_rows])
        sample = plain_sample
        if self.fused:
            from paged.kernels.sample import sample
        sample(logits, inputs.seats, inputs.seq_lens, inputs.samples, self.seats, self.drawn,
               inputs.turn)
        return hidden

    def _head(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the scores [rows, vocab] of x [rows, hidden] to out."""
        scores = out if self.sums is None else self.sums.scores(len(out))
        if self.fused:
            self.model.logits(x, out=scores)
        else:
            norm = rms_norm(x, self.decoder.norm, self.decoder.config.rms_norm_eps)
            scores.copy_(self.decoder.head(norm))
        if self.sums is not None:
            self.sums.gather(scores, out)
        return out

    def _prepare(self, inputs: StepInputs) -> Prepared:
        of_step = (inputs.ids, inputs.seats, inputs.new_blocks, inputs.seq_lens,
                   inputs.query_start_loc)
        embedding, block_size = self.decoder.embedding, self.kv.block_size
        first = None if self.decoder.part is None else self.decoder.part.first_token
        if self.fused:
            from paged.kernels.prepare import prepare

            step = Prepared(*prepare(*of_step, self.seats.tables, self.seats.tokens, embedding,
                                     block_size, first))
        else:
            step = plain_prepare(*of_step, self.seats, embedding, block_size, first)
        if self.sums is not None:  # each rank has found the tokens of its part of the vocabulary
            self.sums.sum(step.x)
        return step

    def _one_kernel(self, missing: str | None):
        """The layers as one kernel; ValueError, with the reason, where it cannot serve."""
        if not missing:
            from paged.models.persistent import Layers, why_not

            missing = why_not(self.decoder, self.attention.name, self.fused)
        if missing:
            raise ValueError(f"speedups ask for one persistent kernel, and {missing}")
        return Layers(self.decoder, self.kv, self.model.rotation)

    def _operations(self, inputs: StepInputs, step: Prepared, max_query_len: int | None):

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return self.attention.run(q, self.kv.k[layer], self.kv.v[layer], step.tables,
                                      inputs.seq_lens, inputs.query_start_loc, self.scale,
                                      max_query_len=max_query_len, early=True)

        if self.fused:
            return self.model.operations(step, attend)

        def write_and_attend(layer: int, q, k, v) -> torch.Tensor:
            self.kv.store(layer, step.slots, k, v)
            return attend(layer, q)

        needs = (self.decoder.config, *self.decoder.rotation(step.positions), write_and_attend)
        if self.sums is not None:
            return SummedOperations(*needs, sum=self.sums.sum)
        return PlainOperations(*needs)

    # ── graphs ────────────────────────────────────────────────────────────────────────────────────

    def _step_for(self, num_tokens: int, num_rows: int):
        """Inputs of a step of this size, and what runs it."""
        if self._steps:
            if num_tokens == num_rows:
                size = next(size for size in self.decode_sizes if size >= num_rows)
                return self._steps[size, size]
            size = next((size for size in self.mixed_sizes if size >= num_tokens), 0)
            if size:
                return self._steps[size, self._mixed_rows(size)]
        inputs = StepInputs(num_tokens, num_rows, self.device)
        return inputs, partial(self._run, inputs)

    def _mixed_rows(self, num_tokens: int) -> int:
        # Fewer rows than tokens: this is no decode step.
        return min(self.config.max_num_seqs, num_tokens - 1)

    @torch.inference_mode()
    def capture(self, use_tqdm: bool = True, only_largest: bool = False) -> None:
        """Capture every size, the largest first, or only the largest."""
        self._use_device()
        sizes = [(size, self._mixed_rows(size)) for size in self.mixed_sizes]
        sizes += [(size, size) for size in self.decode_sizes]
        if only_largest:
            sizes = [sizes[len(self.mixed_sizes) - 1], sizes[-1]]
        # Garbage of an earlier engine may hold graphs, and to destroy one during a capture breaks
        # the capture.
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._capture_sizes(sizes, use_tqdm)
        finally:
            if collecting:
                gc.enable()

    def _capture_sizes(self, sizes: list[tuple[int, int]], use_tqdm: bool) -> None:
        pool = None
        for num_tokens, num_rows in tqdm(sorted(sizes, reverse=True), desc="Capturing graphs",
                                         disable=not use_tqdm, dynamic_ncols=True):
            inputs = StepInputs(num_tokens, num_rows, self.device)
            inputs.send(([],) * 7, (0, self.config.max_num_seqs, -1, 0, 0, 0, 0))
            replay: Callable[[], object] = partial(
                self._run, inputs)  # where there is no CUDA, the step is run again
            replay()  # compiles kernels and fills caches outside the graph
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                # NCCL looks after its work on threads of its own, which may not break a capture.
                mode = "global" if self.sums is None else "thread_local"
                with torch.cuda.graph(graph, pool=pool, stream=_capture_stream(self.device),
                                      capture_error_mode=mode):
                    self._run(inputs)
                pool, replay = graph.pool(), graph.replay
            self._steps[num_tokens, num_rows] = inputs, replay


def _dicts(tables: Iterator[torch.Tensor], counts: Iterable[int]) -> list[dict[int, float]]:
    """The next two tables, ids and values, as a dict a row, of its first 1 + count columns."""
    rows = zip(next(tables).tolist(), next(tables).tolist(), counts)
    return [dict(zip(ids[:1 + count], values[:1 + count])) for ids, values, count in rows]


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: PyTorch's own belongs to the device that captured first."""
    return torch.cuda.Stream(device)
