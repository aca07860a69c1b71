"""Protects the grading by speed: good kernels are graded, borrowed and remembered results are not.

Everything runs in Triton's interpreter, on the CPU, with invented times.
"""

import os

import pytest

from practice.catalog import load_exercises

BY_NAME = {exercise.name: exercise for exercise in load_exercises()}


@pytest.fixture
def kernel():
    """kernel(name): the solution's function and a small task for it, on the CPU."""
    pytest.importorskip("triton")
    from practice import perf

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter")

    def make(name, function=None):
        module = perf.load(BY_NAME[name].folder / "solution.py")
        function = function or getattr(module, perf.TASKS[name][0])
        small = (2, 32) if name == "triton_decode" else (32,)
        return perf.TASKS[name][1](function, *small, device="cpu", heads=(4, 2), head_dim=16)

    return make


@pytest.mark.parametrize("name", ["triton_decode", "triton_store"])
def test_a_good_kernel_is_graded(kernel, name):
    from practice import fair, perf

    task = kernel(name)
    assert task.right(task.run())
    assert fair.foreign_operations(task.run) is None and fair.remembers(task) is None
    assert fair.foreign_imports(BY_NAME[name].solution) is None
    task.function = perf.our_function(name)
    assert task.right(task.run())


def test_a_library_kernel_is_not_graded(kernel):
    import torch

    from practice import fair

    def library(q, k_cache, v_cache, tables, seq_lens, scale):
        k, v = (cache[tables.long()].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale,
                                                                enable_gqa=True)[:, :, 0]

    task = kernel("triton_decode", library)
    assert task.right(task.run())
    assert "the kernel must do it" in fair.foreign_operations(task.run)
    assert "line 1 imports flash_attn" in fair.foreign_imports(
        "from flash_attn import flash_attn_func\n")
    assert "line 2 imports paged.attention" in fair.foreign_imports(
        "import torch\nimport paged.attention\n")


def test_a_remembered_result_is_not_graded(kernel):
    from practice import fair

    good, kept = kernel("triton_decode").function, {}

    def remembering(q, *rest):
        return kept.setdefault(q.data_ptr(), good(q, *rest))

    assert "nothing may be kept" in fair.remembers(kernel("triton_decode", remembering))


@pytest.fixture
def grade(kernel, monkeypatch, tmp_path):
    """grade(source): what `perf.grade` says of an answer for the decode kernel, on the CPU, times
    invented."""
    import functools

    import torch

    from practice import perf

    class Event:

        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return 1.0

    for name, stand_in in (("Event", Event), ("synchronize", lambda: None),
                           ("_sleep", lambda cycles: None), ("get_device_name", lambda: "none")):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    small = functools.partial(perf.DecodeTask, device="cpu", heads=(4, 2), head_dim=16)
    monkeypatch.setitem(perf.TASKS, "triton_decode", ("paged_decode", small))
    monkeypatch.setitem(perf.SHAPES, "triton_decode", ((2, 32), (3, 16)))
    monkeypatch.setattr(perf, "REPETITIONS", 9)
    monkeypatch.setattr(perf, "copy_bandwidth", lambda: 1000.0)
    monkeypatch.setattr(perf, "kernels_of", lambda call: call() is None or ["decode_kernel"])

    def of(source):
        path = tmp_path / "answer.py"
        path.write_text(source, encoding="utf-8")
        return perf.grade("triton_decode", path)

    return of


def test_grade_of_a_good_kernel(grade):
    found = grade(BY_NAME["triton_decode"].solution)
    assert found["refused"] is None and found["mark"] == "★★★★★" and len(found["shapes"]) == 2
    assert all(len(row["samples_us"]) == len(row["our_samples_us"]) == 9 for row in found["shapes"])


@pytest.mark.parametrize("honest", [0, 3, 7, 8, 14, 25])
def test_an_answer_that_is_honest_at_first_is_not_graded(grade, honest):
    """However many calls it waits before it gives back results that it keeps by address."""
    found = grade(BY_NAME["triton_decode"].solution + f"""

calls, kept, real = [], {{}}, paged_decode


def paged_decode(q, *rest):
    calls.append(1)
    if len(calls) <= {honest}:
        return real(q, *rest)
    if q.data_ptr() not in kept:
        kept[q.data_ptr()] = real(q, *rest)
    return kept[q.data_ptr()]
""")
    assert "nothing may be kept" in found["refused"]


def test_an_answer_that_lets_pytorch_work_later_is_not_graded(grade):
    found = grade(BY_NAME["triton_decode"].solution + """

calls, real = [], paged_decode


def paged_decode(q, *rest):
    calls.append(1)
    return real(q, *rest) if len(calls) <= 7 else real(q, *rest).mul(1)
""")
    assert "lets PyTorch work (mul)" in found["refused"]


@pytest.mark.parametrize("line, said", [
    ('mod = __import__("paged.attention")', "uses __import__"),
    ('exec("import paged")', "uses exec"),
    ('eval("1")', "uses eval"),
    ("import importlib", "imports importlib"),
    ("import builtins", "imports builtins"),
    ("from . import paged", "imports ."),
    ("from collections import _sys", "uses _sys"),
    ("import torch.utils._import_utils", "uses _import_utils"),
    ('torch.builtins.exec("import paged")', "uses exec"),
    ('torch.importlib.import_module("paged")', "uses import_module"),
    ('globals()["__builtins__"]', "uses globals"),
    ('getattr(torch, "sys")', "uses getattr"),
    ("paged_decode.__globals__", "uses __globals__"),
    ("side = torch.cuda.Stream()", "uses Stream"),
    ("torch.cuda.Event.elapsed_time = 1", "changes torch.cuda.Event.elapsed_time"),
])
def test_ways_round_the_imports_are_refused(line, said):
    from practice import fair

    assert f"line 2 {said}" in fair.foreign_imports(f"import torch\n{line}\n")


def test_refused_before_it_runs(grade):
    assert "line 2 uses exec" in grade("import torch\nexec('')\n1 / 0\n")["refused"]


def test_an_answer_may_keep_its_own_state_and_names():
    from practice import fair

    assert fair.foreign_imports(
        "from __future__ import annotations\nimportant = 1\nclass A:\n"
        "    def __init__(self):\n        self.a = super().__init__()\n") is None


def test_own_kernels_are_those_of_the_file(kernel, tmp_path):
    """Tuned kernels too, and no kernel that came from elsewhere."""
    from practice import fair, perf

    path = tmp_path / "answer.py"
    path.write_text(
        "import triton\nfrom paged.kernels.store import *\n"
        "from paged.kernels import store as ours\n"
        "borrowed = next(v for v in vars(ours).values() if hasattr(v, 'fn'))\n"
        "@triton.jit\ndef mine(x):\n    pass\n"
        "@triton.autotune(configs=[triton.Config({})], key=[])\n"
        "@triton.jit\ndef tuned(x):\n    pass\n", encoding="utf-8")
    assert fair.own_kernels(perf.load(path)) == {"mine", "tuned"}


def test_a_wrong_kernel_is_noticed(kernel):
    task = kernel("triton_decode")
    assert not task.right(task.run() * 1.1)
    assert not task.right(task.run() * float("nan"))


def test_kernels_that_may_run():
    from practice import fair

    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
    assert fair.foreign_kernels(["decode_kernel", fill, "Memset (Device)"],
                                {"decode_kernel"}) is None
    assert "flash_fwd" in fair.foreign_kernels(["decode_kernel", "flash_fwd_splitkv"],
                                               {"decode_kernel"})
    assert "no kernel" in fair.foreign_kernels([fill], {"decode_kernel"})


def test_the_ladder():
    from practice import perf

    assert [perf.mark(score, 0.95) for score in (0.1, 0.25, 0.6, 0.84, 0.9, 0.94)] == [
        "no star yet", "★", "★★", "★★★", "★★★★", "★★★★★"
    ]
