"""The fast runner: what a step needs stays on the GPU, and small steps replay CUDA graphs.

Every running request has a seat: a row of the block tables, its last token, its temperature and its
    seed live on
the GPU. A step sends one small array of integers, and the rest happens there:

    CPU    ids or −1, positions, seats, lengths, new blocks ──► one copy
    GPU    prepare ► layers ► logits ► sample ► tokens[seat] ──► one copy back, read a step later

The same function runs a step of any size. For sizes up to the largest of MIXED_SIZES it is captured
once and replayed, padded up to the next captured size: padding has position −1, slot −1 and an
    empty context, and touches nothing.
A decode step has one token a request; a mixed step (chunks beside decodes) has its own sizes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import cache, partial

import torch
from tqdm import tqdm

from paged.attention import triton_backend
from paged.kernels.fused import prepare, sample
from paged.kv_cache import PagedKVCache
from paged.models.decoder import Decoder
from paged.models.fused_decoder import NARROW, FusedDecoder
from paged.request import Request, Status
from paged.runner import ModelRunner
from paged.sampler import sample as sample_with_filters
from paged.scheduler import Batch
from paged.slots import blocks_needed

# Tokens of captured steps with chunks.
MIXED_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384)


class StepInputs:
    """What one size of step reads, as views of one int32 array on the GPU with a twin in pinned
    memory."""

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device):
        self.num_tokens, self.num_rows = num_tokens, num_rows
        sizes = [num_tokens] * 3 + [num_rows] * 3 + [num_rows + 1, 1]
        # Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for addresses that do
        # not.
        places = [-(-size // 4) * 4 for size in sizes]

        def parts(array: torch.Tensor) -> list[torch.Tensor]:
            return [part[:size] for part, size in zip(array.split(places), sizes)]

        self.gpu = torch.zeros(sum(places), dtype=torch.int32, device=device)
        (self.ids, self.positions, self.rows, self.seats, self.new_blocks, self.seq_lens,
         self.query_start_loc, self.turn) = parts(self.gpu)
        # Two twins: one may still be on its way to the GPU while the next step is written to the
        # other.
        pinned = device.type == "cuda"
        self._twins = [
            torch.empty(sum(places), dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._views = [[part.numpy() for part in parts(twin)] for twin in self._twins]
        self._copied = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._turn = 0

    def send(self, values: Sequence[Sequence[int]], padding: Sequence[int]) -> None:
        """Copy the lists to the GPU, each padded to its size, in the order of the attributes."""
        self._turn = 1 - self._turn
        if self._copied:  # waits only if steps were dropped, by an interruption
            self._copied[self._turn].synchronize()
        for view, items, pad in zip(self._views[self._turn], values, padding):
            view[:len(items)] = items
            view[len(items):] = pad
        self.gpu.copy_(self._twins[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


class GraphRunner(ModelRunner):
    """Runs batches ahead of the CPU: `launch` starts a step, `collect` waits for its tokens.

    Args:
        decoder, kv, host_kv: as for ModelRunner.
        max_num_seqs: requests that run at once.
        max_model_len: tokens of a request.
        max_num_batched_tokens: tokens of a step.
        use_graphs: capture and replay; without, every step is launched kernel by kernel.
        narrow: see FusedDecoder.
    """

    runs_ahead = True

    def __init__(self, decoder: Decoder, kv: PagedKVCache, max_num_seqs: int, max_model_len: int,
                 max_num_batched_tokens: int, host_kv: PagedKVCache | None = None,
                 use_graphs: bool = True, narrow: int = NARROW):
        super().__init__(decoder, kv, "triton", host_kv)
        self.fused = FusedDecoder(decoder, kv, max_model_len, narrow)
        self.max_num_seqs, self.use_graphs = max_num_seqs, use_graphs
        # One seat more than requests: the padding sits there.
        table_width = blocks_needed(max_model_len, kv.block_size) + 1
        self.tables = torch.zeros(max_num_seqs + 1, table_width, dtype=torch.int32,
                                  device=self.device)
        self.tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self.temperatures = torch.zeros(max_num_seqs + 1, dtype=torch.float32, device=self.device)
        self.seeds = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        # What every step writes, graph or not: one copy for all sizes.
        self.logits = torch.empty(max_num_seqs, decoder.config.vocab_size, dtype=kv.data.dtype,
                                  device=self.device)
        # Steps take turns: while one draws its tokens, those of the step before are still being
        # copied.
        self.drawn = torch.empty(2, max_num_seqs, dtype=torch.int32, device=self.device)
        self._turn = 0
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._seat_of: dict[Request, int] = {}
        self._free_seats = list(range(max_num_seqs))
        self._sent: dict[int, tuple[list[int],
                                    int]] = {}  # seat -> its block table, and blocks sent of it
        self._steps: dict[tuple[int, int], tuple] = {}  # (tokens, rows) -> (inputs, replay)
        most = min(max_num_seqs, max_num_batched_tokens)  # requests of a decode step
        step = 8 if most >= 8 else 1
        last = next((size for size in MIXED_SIZES if size >= max_num_batched_tokens),
                    MIXED_SIZES[-1])
        self.mixed_sizes = [size for size in MIXED_SIZES if size <= last]
        self.decode_sizes = sorted({1, 2, 4} & set(range(most + 1))
                                   | set(range(step, most + 1, step)) | {most})

    # ── a step
    # ────────────────────────────────────────────────────────────────────────────────────────

    def execute(self, batch: Batch) -> list[int]:
        return self.collect(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: Batch):
        """Start a step; returns what `collect` wants. A step is to be collected before the next but
        one starts."""
        self._use_device()
        self.move_blocks(batch)
        if not batch.requests:
            return None
        seats = self._take_seats(batch.requests)
        num_tokens, num_rows = len(batch.input_ids), len(seats)
        decode = num_tokens == num_rows
        new_blocks = self._send_tables(batch, seats, decode)
        inputs, replay = self._step_for(num_tokens, num_rows, decode)
        rows = (list(range(num_rows)) if decode else [
            row for row in range(num_rows)
            for _ in range(batch.query_start_loc[row + 1] - batch.query_start_loc[row])
        ])
        self._turn = 1 - self._turn
        inputs.send((batch.input_ids, batch.positions, rows, seats, new_blocks, batch.seq_lens,
                     batch.query_start_loc, [self._turn]),
                    (0, -1, 0, self.max_num_seqs, -1, 0, num_tokens, 0))
        replay()
        drawn = self.drawn[self._turn, :num_rows]
        self._redraw(batch, seats, self.logits[:num_rows], drawn)
        if self._copies is None:
            return drawn.clone(), None
        # On a stream of its own, so that the next step need not wait for the copy.
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host = torch.empty(num_rows, dtype=torch.int32, pin_memory=True)
            host.copy_(drawn, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return host, done

    def _use_device(self) -> None:
        """Triton launches on the current device, which another engine or a new thread may have left
        elsewhere."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def collect(self, handle) -> list[int]:
        """The tokens of a step, one a request of its batch; waits for the GPU."""
        if handle is None:
            return []
        host, done = handle
        if done is not None:
            done.synchronize()
        tokens = host.tolist()
        if -1 in tokens:
            raise ValueError(
                f"the logits of request {tokens.index(-1)} of a batch of {len(tokens)} hold NaN or "
                f"infinity: the weights are damaged, or {self.kv.data.dtype} is too narrow for this model"
            )
        return tokens

    def _run(self, inputs: StepInputs) -> None:
        """The step itself, on the GPU from end to end; this is what graphs capture."""
        x, squares, slots, tables = prepare(inputs.ids, inputs.positions, inputs.rows, inputs.seats,
                                            inputs.new_blocks, inputs.seq_lens, self.tables,
                                            self.tokens, self.fused.decoder.embedding,
                                            self.kv.block_size)
        longest = 1 if inputs.num_tokens == inputs.num_rows else None

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return triton_backend.run(q, self.kv.k[layer], self.kv.v[layer], tables,
                                      inputs.seq_lens, inputs.query_start_loc, self.scale,
                                      max_query_len=longest, early=True)

        x = self.fused(x, squares, inputs.positions, slots, attend)
        if longest is None:
            x = x.index_select(
                0, (inputs.query_start_loc[1:] - 1).clamp(min=0))  # each request's last token
        logits = self.fused.logits(x, out=self.logits[:inputs.num_rows])
        sample(logits, inputs.seats, inputs.seq_lens, self.temperatures, self.seeds, self.tokens,
               self.drawn, inputs.turn)

    def _redraw(self, batch: Batch, seats: list[int], logits: torch.Tensor,
                drawn: torch.Tensor) -> None:
        """Rows that ask for more than a temperature go through the full sampler, which waits for
        the GPU."""
        rows = [
            row for row in self.sampled_rows(batch) if _needs_filters(batch.requests[row].params)
        ]
        if not rows:
            return
        chosen, logprobs = sample_with_filters(logits[rows].float(),
                                               [batch.requests[row] for row in rows])
        chosen = torch.tensor(chosen, dtype=torch.int32, device=self.device)
        drawn[rows] = chosen
        self.tokens[[seats[row] for row in rows]] = chosen
        self.keep_logprobs(batch, rows, logprobs)

    # ── seats and tables
    # ──────────────────────────────────────────────────────────────────────────────

    def _take_seats(self, requests: Sequence[Request]) -> list[int]:
        """The seat of each request; who is new gets one, and its temperature and seed go there in
        one copy."""
        newcomers = [request for request in requests if request not in self._seat_of]
        if len(newcomers) > len(self._free_seats):  # take back the seats of those who run no more
            for other in [r for r in self._seat_of if r.status is not Status.RUNNING]:
                self._free_seats.append(self._seat_of.pop(other))
        if newcomers:
            taken = self._free_seats[:-len(newcomers) - 1:-1]  # the order in which they are popped
            at = self._to_gpu(taken, torch.int64)
            temperatures = [min(request.params.temperature, 1e30)
                            for request in newcomers]  # float32 ends at 3e38
            self.temperatures.index_copy_(0, at, self._to_gpu(temperatures, torch.float32))
            self.seeds.index_copy_(0, at,
                                   self._to_gpu([r.seed % 2**63 for r in newcomers], torch.int64))
            for request in newcomers:  # now that all has gone well
                seat = self._seat_of[request] = self._free_seats.pop()
                self._sent.pop(seat, None)
        return [self._seat_of[request] for request in requests]

    def _to_gpu(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        """Numbers on the GPU; from pinned memory the copy does not wait for the step that the GPU
        is at."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    def _send_tables(self, batch: Batch, seats: list[int], decode: bool) -> list[int]:
        """Bring the block tables on the GPU up to date.

        In a decode step, a row's one new block is returned, to travel with the step's inputs; what
        else is new (admissions, chunks, copied blocks) is written at once.
        """
        new_blocks = [-1] * len(seats)
        copied = {destination for _, destination in batch.block_copies}
        places: list[int] = []
        blocks: list[int] = []
        for row, (seat, table) in enumerate(zip(seats, batch.block_tables)):
            known, num_sent = self._sent.get(seat, (None, 0))
            if known is not table or copied and not copied.isdisjoint(table):
                num_sent = 0
            missing = len(table) - num_sent
            if missing:
                if decode and missing == 1 and num_sent:
                    new_blocks[row] = table[-1]
                else:
                    start = seat * self.tables.shape[1] + num_sent
                    places += range(start, start + missing)
                    blocks += table[num_sent:]
                self._sent[seat] = (table, len(table))
        if places:
            self.tables.view(-1).index_copy_(0, self._to_gpu(places, torch.int64),
                                             self._to_gpu(blocks, torch.int32))
        return new_blocks

    # ── graphs
    # ────────────────────────────────────────────────────────────────────────────────────────

    def _step_for(self, num_tokens: int, num_rows: int, decode: bool):
        """Inputs of a step of this size, and what runs it."""
        if self.use_graphs:
            if decode:
                size = next(size for size in self.decode_sizes if size >= num_rows)
                return self._steps[size, size]
            size = next((size for size in self.mixed_sizes if size >= num_tokens), None)
            if size is not None:
                return self._steps[size, self._mixed_rows(size)]
        inputs = StepInputs(num_tokens, num_rows, self.device)
        return inputs, partial(self._run, inputs)

    def _mixed_rows(self, num_tokens: int) -> int:
        return min(self.max_num_seqs,
                   num_tokens - 1)  # fewer rows than tokens: this is no decode step

    @torch.inference_mode()
    def capture(self, use_tqdm: bool = True, only_largest: bool = False) -> float:
        """Capture every size, the largest first, or only the largest; returns the seconds it
        took."""
        self._use_device()
        start = time.perf_counter()
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
        return time.perf_counter() - start

    def _capture_sizes(self, sizes: list[tuple[int, int]], use_tqdm: bool) -> None:
        pool = None
        for num_tokens, num_rows in tqdm(sorted(sizes, reverse=True), desc="Capturing graphs",
                                         disable=not use_tqdm, dynamic_ncols=True):
            inputs = StepInputs(num_tokens, num_rows, self.device)
            inputs.send(([],) * 8, (0, -1, 0, self.max_num_seqs, -1, 0, 0, 0))
            replay = partial(self._run, inputs)  # where there is no CUDA, the step is run again
            replay()  # compiles kernels and fills caches outside the graph
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=_capture_stream(self.device)):
                    self._run(inputs)
                pool, replay = graph.pool(), graph.replay
            self._steps[num_tokens, num_rows] = inputs, replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: PyTorch's own belongs to the device that captured first."""
    return torch.cuda.Stream(device)


def _needs_filters(params) -> bool:
    return (params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
            or params.repetition_penalty != 1 or params.logprobs is not None)
