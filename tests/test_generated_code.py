"""What the tests read from generated code: a reader that overlooks something would let them pass."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.generated_code import allocations

CODE = """
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
buf0 = empty_strided_cuda((4, 8, ), (8, 1), torch.float32)
buf1 = empty_strided_cuda((), (), torch.float32)
buf2 = empty_strided_cpu_pinned((3,), (1,), torch.int64)
"""


def test_allocations():
    assert allocations(CODE) == [32, 1, 3]


@pytest.mark.parametrize("shape", ["s77, 8", "8*(s77 // 2), 1", "u0"])
def test_an_allocation_of_symbolic_sizes_is_not_overlooked(shape):
    with pytest.raises(AssertionError, match="symbolic sizes"):
        allocations(CODE + f"buf3 = empty_strided_cuda(({shape}), (8, 1), torch.float32)")


def test_inductor_still_writes_them_like_that():
    def fn(x):
        return (x @ x.T).relu() @ x

    def code(dynamic):
        torch.compiler.reset()
        return run_and_get_code(torch.compile(fn, dynamic=dynamic), torch.randn(7, 9))[1][0]

    assert allocations(code(False)) == [49, 63]
    with pytest.raises(AssertionError, match="symbolic sizes"):
        allocations(code(True))
