"""What a kernel that is graded by speed may do: allocate and fill tensors, launch its own kernels.

Each check gives a sentence on what the answer does and may not, or None. They read the answer's
source, watch the operations that PyTorch runs and the kernels that the GPU runs, and change inputs
in place to find a result that was kept.
"""

import ast
import re
import sys
import traceback

# What an answer may ask of PyTorch besides launching kernels: memory, its shape, and filling it.
ALLOWED_OPERATIONS = set(
    "empty empty_like empty_strided new_empty zeros zeros_like new_zeros full full_like ones fill_ "
    "zero_ detach view _unsafe_view reshape as_strided slice select expand squeeze unsqueeze "
    "transpose permute alias split unbind _local_scalar_dense".split())
ALLOWED_MODULES = {"torch", "triton", "math", "collections", "functools", "typing", "__future__"}
ALLOWED_KERNELS = ("FillFunctor", "Memset")
# Ways to a module that is not imported by its name, and to work that the events do not see.
REFUSED_NAMES = set(
    "exec eval compile builtins sys _sys inspect ctypes getattr setattr vars globals locals Stream "
    "ExternalStream get_stream_from_external set_stream".split())
REFUSED_PATTERN = re.compile("(.*_)?import(_.*|lib)?|__(?!name__|init__|future__).*__")


def foreign_imports(source):
    """What an answer imports or names and may not, such as a way round imports: a sentence, or
    None."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [part for alias in node.names for part in alias.name.split(".")]
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = ["." * node.level + (node.module or "")]
                names += modules[0].split(".")
            for name in modules:
                if name.partition(".")[0] not in ALLOWED_MODULES:
                    return f"line {line} imports {name}: the kernel must be your own"
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
            if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self":
                return (f"line {line} changes {ast.unparse(node)}, which is not the "
                        "answer's own")
        for name in names:
            if name in REFUSED_NAMES or REFUSED_PATTERN.fullmatch(name):
                return (f"line {line} uses {name}, which a graded answer may not: the "
                        "kernel must be your own")
    return None


def own_kernels(module):
    """Names of the Triton kernels that are written in the answer's file, tuned ones too."""
    names = set()
    for value in vars(module).values():
        kernel = value
        while type(kernel).__module__.startswith("triton.") and hasattr(kernel, "fn"):
            kernel = kernel.fn  # of a kernel, or of what tunes one
        if kernel is not value and kernel.__code__.co_filename == module.__file__:
            names.add(kernel.__name__)
    return names


def foreign_operations(call):
    """PyTorch operations that a call runs and may not, as a sentence, or None."""
    import torch
    import triton
    from torch.utils._python_dispatch import TorchDispatchMode

    found, homes = set(), [module.__path__[0] for module in (torch, triton)]

    def by_triton():
        """Whether Triton asks, and not the answer: its interpreter copies tensors."""
        callers = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(2)))
        asks = next(file for file in callers if not file.startswith(homes[0]))
        return asks.startswith(homes[1])

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
    """Of the GPU kernels that ran, one that is neither the answer's own nor a fill; a sentence, or
    None."""
    foreign = [
        name for name in names
        if name not in own and not any(part in name for part in ALLOWED_KERNELS)
    ]
    if foreign:
        return f"a kernel ran that is not in the answer: {foreign[0][:80]}"
    if not any(name in own for name in names):
        return "no kernel of the answer ran"
    return None


def remembers(task):
    """Whether the result follows inputs that are changed in place, as a sentence if not, or None.

    The second inputs are other numbers in the very same tensors: whatever an answer keeps from the
    first call, by address, by shape or by object, is now wrong.
    """
    task.fill(1)
    task.run()
    task.fill(2)
    if not task.right(task.run()):
        return ("after the inputs were changed in place, the result was still the old one: "
                "nothing may be kept")
    return None
