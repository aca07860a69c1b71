"""How fast a kernel is, on a GPU: `python practice/perf.py NAME FILE`, called by `judge.py grade`.

The score is the share of the card's copy bandwidth that the kernel reaches: the bytes that must
move, each counted once, over the time, over what a device-to-device copy reaches on the same card
in the same run. Times are medians of CUDA events, after a warm-up, over inputs that are rotated so
that the L2 cache does not serve them, and over caches full of random numbers.

A kernel is not graded when the answer lets a library do the work (it may allocate and fill tensors,
and launch its own kernels, nothing else), when its result depends on an earlier call, or when it is
wrong. All inputs are filled anew before each round of timed calls, and each timed result is checked
after it. At every shape, calls under watch come between the rounds at random, so that no count of
calls tells which are timed.
"""

import contextlib
import importlib.util
import json
import os
import random
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from practice import fair  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 8, 128, 16
# (batch, context) for the decode kernel, tokens for the store kernel.
SHAPES = {"triton_decode": ((16, 4096), (64, 4096), (256, 1024)), "triton_store": (16384, 65536)}
REPETITIONS, WARM_UP, ROTATED = 30, 5, 3  # repetitions in rounds, one call an input
LADDER = ((0.25, "★"), (0.5, "★★"), (0.7, "★★★"), (0.85, "★★★★"))
AS_GOOD = 0.98  # of the book's own kernel: five stars


def why_not(exercise):
    """None when an exercise can be graded here, else one sentence."""
    if exercise.name not in SHAPES:
        return f"{exercise.name} is not graded by speed: {' and '.join(SHAPES)} are"
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return "grading needs PyTorch and Triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ("TRITON_INTERPRET is set, and the interpreter's speed says nothing: unset it to "
                "grade on a GPU")
    import torch

    if not torch.cuda.is_available():
        return ("grading needs a GPU, and PyTorch sees none; `run` checks the kernel in the "
                "interpreter")
    return None


def mark(score, our_score):
    """The mark of a score; five stars for a kernel as good as the book's own."""
    if score >= AS_GOOD * our_score:
        return "★★★★★"
    return next((stars for least, stars in reversed(LADDER) if score >= least), "no star yet")


# -------------------------------------------------------------------------------------------- tasks


class DecodeTask:
    """Decode attention over `batch` contexts of `context` tokens, blocks of PAGE tokens in random
    order."""

    def __init__(self, function, batch, context, device="cuda", heads=(HEADS, KV_HEADS),
                 head_dim=HEAD_DIM):
        import torch

        self.function, self.batch, self.context = function, batch, context
        num_heads, num_kv_heads = heads
        pages = batch * context // PAGE
        kind = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
        self.q = torch.empty(batch, num_heads, head_dim, **kind)
        self.k_cache = torch.empty(pages, PAGE, num_kv_heads, head_dim, **kind)
        self.v_cache = torch.empty_like(self.k_cache)
        self.tables = torch.empty(batch, context // PAGE, dtype=torch.int32, device=device)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.scale = head_dim**-0.5
        self.name = f"{batch} x {context:,} tokens, page {PAGE}"
        self.bytes = 2 * self.k_cache.numel() * self.k_cache.element_size()
        self.fill(0)

    def fill(self, seed):
        import torch

        generator = torch.Generator(self.q.device).manual_seed(seed)
        for tensor in (self.q, self.k_cache, self.v_cache):
            tensor.normal_(generator=generator)
        order = torch.randperm(self.tables.numel(), device=self.q.device, generator=generator)
        self.tables.copy_(order.view_as(self.tables))

    def run(self):
        return self.function(self.q, self.k_cache, self.v_cache, self.tables, self.seq_lens,
                             self.scale)

    def right(self, out):
        """Against SDPA over gathered K and V, for the first, the middle and the last request."""
        from torch.nn.functional import scaled_dot_product_attention

        for i in {0, self.batch // 2, self.batch - 1}:
            k, v = (cache[self.tables[i].long()].flatten(0, 1).transpose(0, 1).float()
                    for cache in (self.k_cache, self.v_cache))
            expected = scaled_dot_product_attention(self.q[i, :, None].float(), k, v,
                                                    scale=self.scale, enable_gqa=True)[:, 0]
            if not (out[i].float() - expected).abs().max() < 2e-2:  # bf16; NaN is not less either
                return False
        return True


class StoreTask:
    """K and V of `tokens` tokens, slices of a fused projection, into a cache twice as large."""

    def __init__(self, function, tokens, device="cuda", heads=(HEADS, KV_HEADS), head_dim=HEAD_DIM):
        import torch

        self.function = function
        num_heads, num_kv_heads = heads
        kind = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
        self.qkv = torch.empty(tokens, num_heads + 2 * num_kv_heads, head_dim, **kind)
        _, self.k, self.v = self.qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        self.k_cache = torch.empty(2 * tokens // PAGE, PAGE, num_kv_heads, head_dim, **kind)
        self.v_cache = torch.empty_like(self.k_cache)
        self.slots = torch.empty(tokens, dtype=torch.int32, device=device)
        self.name = f"{tokens:,} tokens, page {PAGE}"
        self.bytes = 4 * self.k.numel() * self.k.element_size()  # read and written, K and V
        self.fill(0)

    def fill(self, seed):
        import torch

        generator = torch.Generator(self.qkv.device).manual_seed(seed)
        for tensor in (self.qkv, self.k_cache, self.v_cache):
            tensor.normal_(generator=generator)
        order = torch.randperm(2 * len(self.slots), device=self.qkv.device, generator=generator)
        self.slots.copy_(order[:len(self.slots)])

    def run(self):
        self.function(self.k, self.v, self.k_cache, self.v_cache, self.slots)
        return self.k_cache, self.v_cache

    def right(self, caches):
        import torch

        slots = self.slots.long()
        return all(
            torch.equal(cache.flatten(0, 1)[slots], new)
            for cache, new in zip(caches, (self.k, self.v)))


TASKS = {"triton_decode": ("paged_decode", DecodeTask), "triton_store": ("store", StoreTask)}


def our_function(name):
    """The book's own kernel, with the signature of the exercise."""
    if name == "triton_store":
        from paged.kernels.store import store
        return store
    import torch

    from paged.attention import triton_backend

    starts = {}  # query_start_loc by batch size: an engine has it at hand

    def paged_decode(q, k_cache, v_cache, block_tables, seq_lens, scale):
        if len(q) not in starts:
            starts[len(q)] = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        return triton_backend.run(q, k_cache, v_cache, block_tables, seq_lens, starts[len(q)],
                                  scale, max_query_len=1)

    return paged_decode


# -------------------------------------------------------------------------------------- measurement


def microseconds(call, inputs):
    """Times of `call(input)`, one an input, none of them waited for by the next; in µs, and the
    results."""
    import torch

    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
              for _ in inputs]
    torch.cuda._sleep(20_000_000)  # so that the CPU is ahead, and no launch is waited for
    results = []
    for (start, end), one in zip(events, inputs):
        start.record()
        results.append(call(one))
        end.record()
    torch.cuda.synchronize()
    return [1000 * start.elapsed_time(end) for start, end in events], results


def copy_bandwidth():
    """GB/s of a device-to-device copy, read and written bytes together."""
    import torch

    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times, _ = microseconds(target.copy_, [source] * (WARM_UP + REPETITIONS))
    return 2 * source.numel() / statistics.median(times[WARM_UP:]) / 1000


def measure(tasks, own=None):
    """(times in µs, None), or (None, why the function of the tasks is not graded, as a sentence).

    `own`: names of the kernels that it may run, None for any.
    """
    for i in range(WARM_UP):  # compiles, and tunes if the kernel asks for that
        tasks[i % len(tasks)].run()
    samples = []

    def watched():
        task = random.choice(tasks)
        return fair.foreign_operations(task.run) or fair.foreign_kernels(kernels_of(
            task.run), own) or fair.remembers(task)

    while len(samples) < REPETITIONS:
        for i, task in enumerate(tasks):
            task.fill(len(samples) + i)
        times, results = microseconds(lambda task: task.run(), tasks)
        samples += times
        if not all(task.right(out) for task, out in zip(tasks, results)):
            return None, "a result is wrong, or one of an earlier call: nothing may be kept"
        if own is not None and random.random() < 0.3 and (found := watched()):
            return None, found
    return samples, None if own is None else watched()


def kernels_of(call):
    """Names of the GPU kernels that a call launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    return [
        event.name for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def load(path):
    spec = importlib.util.spec_from_file_location("answer", path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules["answer"] = module
    spec.loader.exec_module(module)
    return module


def grade(name, path):
    """Everything that `judge.py grade` prints, raw samples included."""
    import torch
    import triton

    result = {
        "exercise": name, "card": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__, "refused": fair.foreign_imports(
            Path(path).read_bytes()), "shapes": []
    }
    if result["refused"]:  # before anything of the answer runs
        return result
    module, (function, task_of) = load(path), TASKS[name]
    answer, ours = getattr(module, function), our_function(name)
    result["copy_gb_s"] = copy_bandwidth()
    for shape in SHAPES[name]:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        tasks = [task_of(answer, *sizes) for _ in range(ROTATED)]
        row = {"shape": tasks[0].name, "bytes": tasks[0].bytes}
        for prefix, call, own in (("", answer, fair.own_kernels(module)), ("our_", ours, None)):
            for task in tasks:
                task.function = call
            samples, result["refused"] = measure(tasks, own)
            if result["refused"]:
                result["refused"] = f"at {row['shape']}, {result['refused']}"
                return result
            median = statistics.median(samples)
            row |= {
                f"{prefix}samples_us": samples, f"{prefix}us": median,
                f"{prefix}share": row["bytes"] / median / 1000 / result["copy_gb_s"]
            }
        result["shapes"].append(row)
    for prefix in ("", "our_"):
        shares = [row[f"{prefix}share"] for row in result["shapes"]]
        result[f"{prefix}score"] = statistics.geometric_mean(shares)
    result["mark"] = mark(result["score"], result["our_score"])
    return result


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # what the answer prints is no part of the result
        graded = grade(*sys.argv[1:3])
    print(json.dumps(graded), flush=True)
    os._exit(0)  # not through what the answer may have left behind
