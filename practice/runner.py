"""Judges an answer: runs the cases of an exercise against it and says where the first difference
is.

This one file serves the terminal (inside the child process of `child.py`) and the page (inside a
Pyodide worker). It therefore uses the standard library alone, starts nothing, and reads no file.

A case is a script that a reader could paste into Python. A comment at the end of a statement says
what the statement must give:

    pool = BlockPool(4)
    pool.allocate(3)        # → [0, 1, 2]         equal, and of the same type
    utilization([10], 16)   # ≈ 62.5              equal when rounded to the digits shown
    pool.free([9])          # raises ValueError   this exception or a subclass

An expectation may go on in comment lines of its own, indented by at least two spaces after the #.
The ```python blocks of a statement that contain such comments are the first cases of its exercise.
"""

import ast
import contextlib
import io
import linecache
import math
import random
import re
import sys
import textwrap
import tokenize
import types
from dataclasses import dataclass

MODULE = "answer"  # the name under which an answer is imported
PRINT_LIMIT = 4_000  # characters of printed output kept for a case
REPR_LIMIT = 300  # characters of a value shown in a message
MARK = re.compile(r"#\s*(→|≈|raises)\s+(.*)")
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@dataclass
class Step:
    """One statement of a case: its source, and what it must give ("→", "≈", "raises", or "" for
    nothing)."""

    source: str
    mark: str
    expected: str


# ------------------------------------------------------------------------------------------ scripts


def read_script(script):
    """Split the source of a case into steps. Raises SyntaxError when the script is not Python."""
    script = textwrap.dedent(script).strip("\n") + "\n"
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string
    steps = []
    for node in ast.parse(script).body:
        match = MARK.match(comments.get(node.end_lineno, ""))
        mark, expected = match.groups() if match else ("", "")
        line = node.end_lineno + 1
        while mark and re.match(r"#\s{2}", comments.get(line, "")):
            expected += "\n" + comments[line][1:].strip()
            line += 1
        if mark in ("→", "≈") and not isinstance(node, ast.Expr):
            raise SyntaxError(f"only an expression gives a value to compare: {ast.unparse(node)}")
        steps.append(Step(ast.get_source_segment(script, node) or "", mark, expected))
    return steps


def examples(statement):
    """The ```python blocks of a statement that say what their calls give, as (name, script)
    pairs."""
    blocks = [block for block in EXAMPLE.findall(statement) if MARK.search(block)]
    return [(f"example {number} of the statement", block) for number, block in enumerate(blocks, 1)]


def asked_names(starter):
    """What a starter defines and an answer must define too: public classes and functions, not
    kernels."""
    return [
        node.name for node in ast.parse(starter).body
        if not getattr(node, "name", "_").startswith("_") and (isinstance(
            node, ast.ClassDef) or isinstance(node, ast.FunctionDef) and not node.decorator_list)
    ]


# --------------------------------------------------------------------------------------- comparison


def show(value, limit=REPR_LIMIT):
    """repr, cut to `limit` characters, and safe against objects whose repr raises."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[:limit - 20]} ... ({len(text):,} characters)"


def difference(got, expected, digits=None, where=""):
    """None when `got` is what was expected, else a sentence on the first difference.

    Types count: True is not 1, a tuple is not a list, 3.0 is not 3. Floats may differ by rounding;
    with `digits`, by half a unit of that decimal. Tensors are compared within 1e-5.
    """
    place = f"at {where}: " if where else ""
    if is_tensor(expected):
        return _tensor_difference(got, expected, place)
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        if math.isnan(expected) or math.isnan(got):
            same = math.isnan(expected) and math.isnan(got)
        elif digits is None:
            same = math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12)
        else:
            same = abs(got - expected) <= 0.5 * 10.0**-digits * (1 + 1e-9)
        return None if same else f"{place}expected {show(expected, 60)}, got {show(got, 60)}"
    if type(got) is not type(expected):
        return f"{place}expected {_typed(expected)}, got {_typed(got)}"
    if isinstance(expected, (list, tuple)):
        for index, (one, other) in enumerate(zip(got, expected)):
            if found := difference(one, other, digits, f"{where}[{index}]"):
                return found
        if len(got) != len(expected):
            items = "item" if len(expected) == 1 else "items"
            return f"{place}expected {len(expected)} {items}, got {len(got)}"
        return None
    if isinstance(expected, dict):
        for key in [*expected, *got]:
            if key not in got:
                return f"{place}the key {show(key, 60)} is missing"
            if key not in expected:
                return f"{place}the key {show(key, 60)} is not expected"
            if found := difference(got[key], expected[key], digits, f"{where}[{show(key, 40)}]"):
                return found
        return None
    return None if got == expected else f"{place}expected {show(expected, 60)}, got {show(got, 60)}"


def is_tensor(value):
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "allclose")


def _a(value):
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _typed(value):
    return "None" if value is None else f"{_a(value)} {show(value, 60)}"


def _tensor_difference(got, expected, place):
    if not is_tensor(got):
        return f"{place}expected a tensor of shape {list(expected.shape)}, got {_a(got)}"
    if got.shape != expected.shape:
        return f"{place}expected the shape {list(expected.shape)}, got {list(got.shape)}"
    if got.dtype != expected.dtype:
        return f"{place}expected the dtype {expected.dtype}, got {got.dtype}"
    one, other = got.detach().cpu().double(), expected.detach().cpu().double()
    off = ~one.isclose(other, rtol=1e-5, atol=1e-5, equal_nan=True)
    if not off.any():
        return None
    index = off.nonzero()[0].tolist()
    return (f"{place}{int(off.sum()):,} of {off.numel():,} values differ, first at {index}: "
            f"expected {other[tuple(index)].item():.6g}, got {one[tuple(index)].item():.6g}")


# ------------------------------------------------------------------------------------------ judging


class Printed(io.TextIOBase):
    """Takes what an answer prints and keeps the beginning: an endless loop of prints must not fill
    memory."""

    def __init__(self):
        self.text = ""

    def writable(self):
        return True

    def write(self, text):
        if len(self.text) < PRINT_LIMIT:
            self.text += text
            if len(self.text) >= PRINT_LIMIT:
                self.text = self.text[:PRINT_LIMIT] + "\n... (more was printed)"
        return len(text)


def judge(answer, filename, starter, statement, tests):
    """Run every case and yield what happens, as plain dictionaries (one JSON line each in the
    terminal):

        {"event": "problem", "sentence", "trace", "printed"}    the answer cannot be run: the end
        {"event": "case", "case"}                               a case begins
        {"event": "step", "call"}                               a statement of it begins
        {"event": "result", "case", "passed", ...}              how it ended; see `_run_case`
    """
    module = types.ModuleType(MODULE)
    module.__file__ = filename
    sys.modules[MODULE] = module  # dataclasses look their module up by name
    linecache.cache[filename] = (len(answer), None, answer.splitlines(keepends=True), filename)
    printed = Printed()
    try:
        with _captured(printed):
            exec(compile(answer, filename, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        yield {
            "event": "problem", "sentence": _sentence(error, filename), "trace": _trace(
                error, filename), "printed": printed.text
        }
        return
    missing = [name for name in asked_names(starter) if not hasattr(module, name)]
    if missing:
        yield {
            "event": "problem", "trace": [], "printed": printed.text,
            "sentence": f"the answer does not define {' or '.join(missing)}, which the cases call"
        }
        return

    helpers: dict = {"__name__": "tests"}
    exec(compile(tests, "tests.py", "exec"), helpers)
    random.seed(0)
    for name, script in [*examples(statement), *helpers["cases"]()]:
        yield {"event": "case", "case": name}
        # What the answer defines can be called; a helper of the tests wins over a name that clashes
        # with it.
        yield from _run_case(name, script, {**module.__dict__, **helpers}, filename)


def _run_case(name, script, space, filename):
    """Run one case to its first failure.

    The result says: before (the statements that ran), call, expected, got, note (the first
    difference), error (a sentence, when an exception came), trace (the learner's frames), printed.
    """
    result = {"event": "result", "case": name, "passed": True, "before": [], "printed": ""}
    printed = Printed()
    for step in read_script(script):
        yield {"event": "step", "call": step.source}
        try:
            with _captured(printed):
                failure = _run_step(step, space)
        except BaseException as error:
            failure = {"error": _sentence(error, filename), "trace": _trace(error, filename)}
            if step.mark:
                failure["expected"] = ("raises " if step.mark == "raises" else "") + step.expected
        if failure:
            result.update(failure, passed=False, call=step.source, printed=printed.text)
            break
        result["before"].append(step.source)
    yield result


def _run_step(step, space):
    """Run one statement in `space`; None when it gives what it must, else what to report."""
    if step.mark == "raises":
        wanted = eval(f"({step.expected}\n)", space)
        try:
            exec(compile(step.source, "case", "exec"), space)
        except wanted:
            return None
        return {"expected": f"raises {step.expected}", "got": "no exception"}
    if not step.mark:
        exec(compile(step.source, "case", "exec"), space)
        return None
    expected = eval(f"({step.expected}\n)",
                    space)  # before the call, which might change its arguments
    got = eval(step.source, space)
    digits = None
    if step.mark == "≈":
        digits = max(len(decimals) for decimals in re.findall(r"\d\.(\d+)", step.expected))
    note = difference(got, expected, digits)
    if note is None:
        return None
    return {"expected": show(expected), "got": show(got), "note": note}


@contextlib.contextmanager
def _captured(printed):
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield


def _sentence(error, filename):
    """What went wrong, in words for the person who wrote the answer."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be shown: its __str__ raises"
    text = text if len(
        text) <= PRINT_LIMIT else f"{text[:PRINT_LIMIT]} ... ({len(text):,} characters)"
    if isinstance(error, NotImplementedError):
        return "not written yet" + (f": {text}" if text else "")
    if isinstance(error, SyntaxError) and error.filename == filename:
        caret = ""
        if error.text and error.offset and error.offset <= REPR_LIMIT:
            line = error.text.rstrip("\n")[:REPR_LIMIT]
            caret = f"\n    {line}\n    {' ' * (error.offset - 1)}^"
        return f"Python cannot read line {error.lineno}: {error.msg}{caret}"
    if isinstance(error, SystemExit):
        return (f"the answer ended the program (sys.exit({error.code!r})): let the function return "
                "instead")
    if isinstance(error, MemoryError):
        return "the answer asked for more memory than an exercise may use (MemoryError)"
    if isinstance(error, RecursionError):
        return "the function calls itself without an end (RecursionError)"
    if isinstance(error, EOFError):
        return "the answer waits for input, and there is nobody to type it (EOFError)"
    if isinstance(error, AssertionError) and not _trace(error, filename):
        return text  # a check written in tests.py
    if isinstance(error, Exception) and not _trace(error, filename):
        return f"what the answer gave could not be used: {name}: {text}"
    return f"{name}: {text}" if text else name


def _trace(error, filename):
    """The frames of a traceback that are in the answer, innermost last, the middle of a long one
    left out."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if code.co_filename == filename:
            frames.append({
                "line": tb.tb_lineno, "function": code.co_name, "source": linecache.getline(
                    filename, tb.tb_lineno).strip()[:REPR_LIMIT]
            })
        tb = tb.tb_next
    return frames if len(frames) <= 6 else frames[:2] + frames[-2:]
