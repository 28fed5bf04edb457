"""Without a CUDA card the kernels run in Triton's interpreter, on CPU tensors, in the process of the other tests.

Triton 3.6's interpreter gets some numbers wrong that the compiler gets right, and ignores arguments that a kernel does
not have; both are mended here.
"""

import inspect

import pytest
import torch

from fusion_passes.quant import FP8_DTYPES, saturate

INTERPRETED = not torch.cuda.is_available()


def mend_interpreter() -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import triton.language as tl

    torch_dtypes = {
        "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    }  # fmt: skip
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

    def convert_float(data, source, target, rounding):
        # Theirs rounds bf16 down, and FP8 wrongly: half up, subnormals, NaN.
        x = torch.from_numpy(data.copy()).view(torch_dtypes[source.scalar.name]).float()
        dtype = torch_dtypes[target.scalar.name]
        x = saturate(x, dtype) if dtype in FP8_DTYPES else x.to(dtype)
        return x.view(unsigned[x.element_size()]).numpy()

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def dot_of_values(self, a, b, *rest):
        # Theirs multiplies the bit patterns of bf16.
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_to_fp(x, tl.float32, None) for x in (a, b))
        return dot(self, a, b, *rest)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope):
        # Theirs calls int() on an array of shape [1] for the bounds of a loop, an error since NumPy 2.4.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    run = interpreter.GridExecutor.__call__
    options = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}

    def run_what_is_known(self, *tensors, **named):
        unknown = named.keys() - options - {*inspect.signature(self.fn).parameters}
        if unknown:  # what the compiler says, too
            raise KeyError(f"{self.fn.__name__} has no argument {', '.join(sorted(unknown))}")
        return run(self, *tensors, **named)

    interpreter.GridExecutor.__call__ = run_what_is_known
    interpreter._convert_float = convert_float
    builder.create_dot = dot_of_values
    interpreter._patch_lang_tensor = patch_tensor_for_numpy


if INTERPRETED:
    mend_interpreter()
