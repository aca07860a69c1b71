"""How fast a kernel is, on a GPU: `python practice/perf.py NAME FILE`, called by `judge.py grade`.

The score is the share of the card's copy bandwidth that the kernel reaches: the bytes that must move, each
counted once, over the time, over what a device-to-device copy reaches on the same card in the same run. Times
are medians of CUDA events, after a warm-up, over inputs that are rotated so that the L2 cache does not serve
them, and over caches full of random numbers.

A kernel is not graded when the answer lets a library do the work (it may allocate and fill tensors, and
launch its own kernels, nothing else), when its result depends on an earlier call, or when it is wrong.
"""

import ast
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 8, 128, 16
# (batch, context) for the decode kernel, tokens for the store kernel.
SHAPES = {"triton_decode": ((16, 4096), (64, 4096), (256, 1024)), "triton_store": (16384, 65536)}
REPETITIONS, WARM_UP, ROTATED = 30, 5, 3
LADDER = ((0.25, "★"), (0.5, "★★"), (0.7, "★★★"), (0.85, "★★★★"))
AS_GOOD = 0.98              # of the book's own kernel: five stars
# What an answer may ask of PyTorch besides launching kernels: memory, its shape, and filling it.
ALLOWED_OPERATIONS = set(
    "empty empty_like empty_strided new_empty zeros zeros_like new_zeros full full_like ones fill_ zero_ "
    "detach view _unsafe_view reshape as_strided slice select expand squeeze unsqueeze transpose permute "
    "alias split unbind _local_scalar_dense".split())
ALLOWED_MODULES = {"torch", "triton", "math", "collections", "functools", "typing", "__future__"}
ALLOWED_KERNELS = ("FillFunctor", "Memset")


def why_not(exercise):
    """None when an exercise can be graded here, else one sentence."""
    if exercise.name not in SHAPES:
        return f"{exercise.name} is not graded by speed: {' and '.join(SHAPES)} are"
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return "grading needs PyTorch and Triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set, and the interpreter's speed says nothing: unset it to grade on a GPU"
    import torch

    if not torch.cuda.is_available():
        return "grading needs a GPU, and PyTorch sees none; `run` checks the kernel in the interpreter"
    return None


def mark(score, our_score):
    """The mark of a score; five stars for a kernel as good as the book's own."""
    if score >= AS_GOOD * our_score:
        return "★★★★★"
    return next((stars for least, stars in reversed(LADDER) if score >= least), "no star yet")


# ------------------------------------------------------------------------------------- what is not allowed


def foreign_imports(source):
    """Modules that an answer imports and may not: a sentence, or None."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] not in ALLOWED_MODULES:
                return f"line {node.lineno} imports {name}: the kernel must be your own"
    return None


def foreign_operations(call):
    """PyTorch operations that a call runs and may not, as a sentence, or None."""
    import triton
    from torch.utils._python_dispatch import TorchDispatchMode

    found, home = set(), str(Path(triton.__file__).parent)

    def by_triton():
        """Whether Triton asks, and not the answer: its interpreter copies tensors."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith(home):
                return True
            frame = frame.f_back
        return False

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            if name not in ALLOWED_OPERATIONS and not by_triton():
                found.add(name)
            return function(*args, **(kwargs or {}))

    with Watch():
        call()
    if found:
        return f"the answer lets PyTorch work ({', '.join(sorted(found))}): the kernel must do it"
    return None


def foreign_kernels(names, own):
    """Of the GPU kernels that ran, one that is neither the answer's own nor a fill; a sentence, or None."""
    foreign = [name for name in names
               if name not in own and not any(part in name for part in ALLOWED_KERNELS)]
    if foreign:
        return f"a kernel ran that is not in the answer: {foreign[0][:80]}"
    if not any(name in own for name in names):
        return "no kernel of the answer ran"
    return None


def remembers(task):
    """Whether the result follows inputs that are changed in place, as a sentence if not, or None.

    The second inputs are other numbers in the very same tensors: whatever an answer keeps from the first
    call, by address, by shape or by object, is now wrong.
    """
    task.fill(1)
    task.run()
    task.fill(2)
    if not task.right(task.run()):
        return "after the inputs were changed in place, the result was still the old one: nothing may be kept"
    return None


# ------------------------------------------------------------------------------------------------- tasks


class DecodeTask:
    """Decode attention over `batch` contexts of `context` tokens, blocks of PAGE tokens in random order."""

    def __init__(self, function, batch, context, device="cuda", heads=(HEADS, KV_HEADS), head_dim=HEAD_DIM):
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
        return self.function(self.q, self.k_cache, self.v_cache, self.tables, self.seq_lens, self.scale)

    def right(self, out):
        """Against SDPA over gathered K and V, for the first, the middle and the last request."""
        from torch.nn.functional import scaled_dot_product_attention

        for i in {0, self.batch // 2, self.batch - 1}:
            k, v = (cache[self.tables[i].long()].flatten(0, 1).transpose(0, 1).float()
                    for cache in (self.k_cache, self.v_cache))
            expected = scaled_dot_product_attention(self.q[i, :, None].float(), k, v, scale=self.scale,
                                                    enable_gqa=True)[:, 0]
            if not (out[i].float() - expected).abs().max() < 2e-2:        # bf16; NaN is not less either
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
        self.bytes = 4 * self.k.numel() * self.k.element_size()          # read and written, K and V
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
        return all(torch.equal(cache.flatten(0, 1)[slots], new)
                   for cache, new in zip(caches, (self.k, self.v)))


TASKS = {"triton_decode": ("paged_decode", DecodeTask), "triton_store": ("store", StoreTask)}


def our_function(name):
    """The book's own kernel, with the signature of the exercise."""
    if name == "triton_store":
        from paged.attention.triton_store import store
        return store
    import torch

    from paged.attention import triton_backend

    starts = {}                                      # query_start_loc by batch size: an engine has it at hand

    def paged_decode(q, k_cache, v_cache, block_tables, seq_lens, scale):
        if len(q) not in starts:
            starts[len(q)] = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        return triton_backend.run(q, k_cache, v_cache, block_tables, seq_lens, starts[len(q)], scale,
                                  max_query_len=1)
    return paged_decode


# ------------------------------------------------------------------------------------------- measurement


def microseconds(call, inputs):
    """Times of `call(input)`, one a repetition, going round the inputs; in µs."""
    import torch

    for i in range(WARM_UP):
        call(inputs[i % len(inputs)])
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
              for _ in range(REPETITIONS)]
    torch.cuda._sleep(20_000_000)                    # so that the CPU is ahead, and no launch is waited for
    for i, (start, end) in enumerate(events):
        start.record()
        call(inputs[i % len(inputs)])
        end.record()
    torch.cuda.synchronize()
    return [1000 * start.elapsed_time(end) for start, end in events]


def copy_bandwidth():
    """GB/s of a device-to-device copy, read and written bytes together."""
    import torch

    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = microseconds(lambda _: target.copy_(source), [None])
    return 2 * source.numel() / statistics.median(times) / 1000


def kernels_of(call):
    """Names of the GPU kernels that a call launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA]


def load(path):
    spec = importlib.util.spec_from_file_location("answer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["answer"] = module
    spec.loader.exec_module(module)
    return module


def refusal(name, path, tasks):
    """Why an answer is not graded, as a sentence, or None."""
    import triton

    if found := foreign_imports(Path(path).read_text(encoding="utf-8")):
        return found
    own = {value.fn.__name__ for value in vars(sys.modules["answer"]).values()
           if isinstance(value, triton.runtime.JITFunction)}
    task = tasks[0]
    task.run()                                       # compiles, and tunes if the kernel asks for that
    return (foreign_operations(task.run) or foreign_kernels(kernels_of(task.run), own) or remembers(task))


def grade(name, path):
    """Everything that `judge.py grade` prints, raw samples included."""
    import torch
    import triton

    function, task_of = TASKS[name]
    answer, ours = getattr(load(path), function), our_function(name)
    result = {"exercise": name, "card": torch.cuda.get_device_name(), "torch": torch.__version__,
              "triton": triton.__version__, "refused": None, "copy_gb_s": copy_bandwidth(), "shapes": []}
    for shape in SHAPES[name]:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        tasks = [task_of(answer, *sizes) for _ in range(ROTATED)]
        for seed, task in enumerate(tasks):
            task.fill(seed)
        if not result["shapes"]:
            result["refused"] = refusal(name, path, tasks)
            if result["refused"]:
                return result
        row = {"shape": tasks[0].name, "bytes": tasks[0].bytes}
        for prefix, call in (("", answer), ("our_", ours)):
            for task in tasks:
                task.function = call
            samples = microseconds(lambda task: task.run(), tasks)
            median = statistics.median(samples)
            row |= {f"{prefix}samples_us": samples, f"{prefix}us": median,
                    f"{prefix}share": row["bytes"] / median / 1000 / result["copy_gb_s"]}
            if not prefix and not tasks[-1].right(tasks[-1].run()):
                result["refused"] = f"at {row['shape']} the result is wrong"
                return result
        result["shapes"].append(row)
    for prefix in ("", "our_"):
        shares = [row[f"{prefix}share"] for row in result["shapes"]]
        result[f"{prefix}score"] = statistics.geometric_mean(shares)
    result["mark"] = mark(result["score"], result["our_score"])
    return result


if __name__ == "__main__":
    print(json.dumps(grade(*sys.argv[1:3])))
