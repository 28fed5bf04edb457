"""What the Hopper kernels share, in Gluon (Triton 3.6 and 3.7): tile sizes, parts of the softmax, TMA descriptors."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7

ROWS = gl.constexpr(64)  # query rows of one consumer
SLACK = gl.constexpr(8)  # with lazy rescaling a row keeps its maximum until a score is 2**8 above it
LOWEST = gl.constexpr(-3.4028234663852886e38)  # a maximum that is never -inf: (-inf) - (-inf) would be NaN
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def partial_sum(p):
    """Row sums over the keys that one thread holds; the rest of the sum is done once, at the end of the tile."""
    # The layout that the sum of a reshape has, in a form that does not depend on the width of p.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 8],
    )
    return gl.convert_layout(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1), layout, assert_trivial=True)


@gluon.jit
def scores(q, k, N: gl.constexpr, KW: gl.constexpr):
    """Q K^T of one key block, in flight; wait for it.  KW: elements of 32 bytes, along head_dim."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, KW])
    zero = gl.zeros([ROWS, N], gl.float32, layout)
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def scale_rows(x, factor):
    """x times one factor a row."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[:, None]


GLUON_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])


class _Descriptor(TensorDescriptor):
    def __post_init__(self) -> None:
        """Nothing: each kernel has checked the same before, and checks take most of the time of a launch."""


def descriptor(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """TMA descriptor of a tensor whose last dimension is contiguous."""
    # The stride of a dimension of size 1 means nothing, can be anything, and TMA checks it.
    strides = [
        16 * x.shape[-1] if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    return _Descriptor(x, list(x.shape), [*strides, 1], list(box), _layout(box, x.dtype))
