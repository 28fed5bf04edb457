"""The code that Inductor generates, to be read: for the CPU, and for CUDA without a card."""

import math
import re
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_code
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fusion_passes
from fusion_passes import PassConfig, PostGradPassManager, Report, testing
from fusion_passes.compiler.inductor import HOOK

H200 = {
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "L2_cache_size": 50 << 20,
    "shared_memory_per_block_optin": 227 << 10,
    "total_memory": 140 << 30,
    "name": "NVIDIA H200",
}
CUDA = torch.device("cuda:0")


def cpp_code(fn, *inputs, config: PassConfig) -> str:
    """What `fusion_passes.compile` makes of fn, which returns one tensor, on the CPU."""
    torch.compiler.reset()
    with torch.no_grad():
        return _wrapper(get_code(fusion_passes.compile(fn, config), *inputs)[0])


def triton_code(fn, *inputs, config: PassConfig) -> str:
    """The same for CUDA: the graph is captured on the CPU, moved to fake CUDA tensors, rewritten and lowered.

    No kernel is compiled; what Inductor would ask of a card is answered as by an H200."""
    with torch.no_grad():
        (graph,) = testing.capture(fn, *inputs)
    module = graph.owning_module
    mode = FakeTensorMode()
    fakes = moved_to_cuda(graph, mode)
    manager = PostGradPassManager(config, Report())
    with ExitStack() as stack:
        for context in (*_a_card(), testing._without_cuda(), mode, V.set_fake_mode(mode), torch.no_grad()):
            stack.enter_context(context)
        record_original_output_strides(module)
        with inductor_config.patch({HOOK: fusion_passes.compiler.inductor.hook_value([manager])}):
            post_grad_passes(module, True)
        lowering = GraphLowering(module, example_inputs=fakes, is_inference=True)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*fakes)
        code = lowering.codegen()[0]
    return _wrapper(getattr(code, "value", code))


def moved_to_cuda(graph: Graph, mode: FakeTensorMode) -> list[FakeTensor]:
    """Make a graph that was captured on the CPU one of fake CUDA tensors: its inputs."""
    fakes = []
    for node in graph.nodes:
        if node.op == "placeholder":
            fakes.append(on_cuda(node.meta["val"], mode))
        if "eager_input_vals" in node.meta:
            node.meta["eager_input_vals"] = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda x: on_cuda(x, mode), node.meta["eager_input_vals"]
            )
        node.kwargs = {key: CUDA if isinstance(arg, torch.device) else arg for key, arg in node.kwargs.items()}
    with ExitStack() as stack:
        for context in (*_a_card(), testing._without_cuda(), mode, V.set_fake_mode(mode), torch.no_grad()):
            stack.enter_context(context)
        FakeTensorProp(graph.owning_module, mode).propagate_dont_convert_inputs(*fakes)
    return fakes


def on_cuda(x: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    return FakeTensor(mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), CUDA)


def _a_card():
    import torch._inductor.scheduler as scheduler

    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(**H200),
    }
    yield from (mock.patch.object(torch.cuda, name, answer) for name, answer in answers.items())
    known = {key: H200[key] for key in ("multi_processor_count", "major", "regs_per_multiprocessor", "warp_size")}
    known["max_threads_per_multi_processor"] = H200["max_threads_per_multi_processor"]
    properties = DeviceProperties(type="cuda", index=0, cc=90, **known)
    yield mock.patch.object(DeviceProperties, "create", staticmethod(lambda device: properties))
    yield mock.patch.object(scheduler, "has_triton", return_value=True)
    yield mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="none")


def _wrapper(code: str) -> str:
    """Without the part that benchmarks the module."""
    return code.split("def get_args")[0].split("def benchmark_compiled_module")[0]


def allocations(code: str) -> list[int]:
    """Elements of each buffer that the wrapper allocates.  Symbolic sizes are an AssertionError: compile such a
    program with static shapes, so that no allocation is overlooked."""
    counts = []
    for shape in re.findall(r"\bempty_strided_\w+\(\((.*?)\), \(", code):
        sizes = [size.strip() for size in shape.split(",") if size.strip()]
        assert all(size.isdigit() for size in sizes), f"an allocation of symbolic sizes, ({shape})"
        counts.append(math.prod(map(int, sizes)))
    return counts


def kernels_that_quantize(code: str) -> list[str]:
    """The source of each generated kernel in which FP8 codes are made."""
    sources = re.findall(r"(?:async_compile|triton)\w*\.?\w*\('?.*?'''(.*?)'''", code, re.DOTALL)
    return [source for source in sources if re.search(r"float8e4nv|Float8_e4m3fn", source)]
