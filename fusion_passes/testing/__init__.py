"""Tools for tests of graph passes: capture the graphs that a pass would see, run them, print them, compare FP8 codes.

Capturing generates no code, so it takes a fraction of a compilation, and CUDA graphs can be captured on a machine
without a GPU (`capture_cuda`).  A captured graph is a copy: rewriting it changes nothing else, and `run` executes it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fusion_passes.quant import codes, dtype_name

INPUTS = "fusion_passes_inputs"
"""Key of the owning module's meta under which a captured graph keeps the values that it was run with."""

aten = torch.ops.aten


def capture(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    mark_dynamic: Sequence[tuple[Tensor, int]] = (),
    **kwargs: Any,
) -> list[Graph]:
    """The post-grad graphs of `torch.compile(fn)(*args, **kwargs)`, as a post-grad custom post pass sees them.

    fn: a function or module; it is run once, uncompiled, so that every graph after a graph break is captured too.
    mark_dynamic: pairs (tensor, dimension) for `torch._dynamo.mark_dynamic`.
    Returns one graph for each graph that Inductor would compile (in training the backward's too, where it is run);
    `run(graph)` runs it on the values that fn was run with.  Inference: call it under `torch.no_grad()`.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx, fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    graphs: list[Graph] = []

    def inner_compile(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        recorded: list[Graph] = []

        def record(graph: Graph) -> None:
            recorded.append(_copy(graph))

        view_to_reshape(gm)
        with torch.no_grad():
            fake_mode = fake_tensor_prop(gm, example_inputs)
        hooks = {"post_grad_custom_post_pass": record, "post_grad_custom_pre_pass": None}
        with V.set_fake_mode(fake_mode), inductor_config.patch(hooks):
            post_grad_passes(gm, bool(options.get("is_inference")))
        graphs.extend(recorded)

        def run_uncompiled(inputs: list[Any]) -> Any:
            values = list(inputs)
            inputs.clear()
            for graph in recorded:
                assert graph.owning_module is not None
                graph.owning_module.meta.setdefault(INPUTS, tuple(values))
            return gm(*values)

        run_uncompiled._boxed_call = True  # type: ignore[attr-defined]
        return run_uncompiled

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=inner_compile)

    torch._dynamo.reset()
    for tensor, dimension in mark_dynamic:
        torch._dynamo.mark_dynamic(tensor, dimension)
    try:
        with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            torch.compile(fn, backend=backend, dynamic=dynamic)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return graphs


def capture_cuda(
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "cudnn",
    mark_dynamic: Sequence[tuple[Tensor, int]] = (),
    **kwargs: Any,
) -> Graph:
    """The post-grad graph of `fn` on CUDA, without a GPU: traced on fake CUDA tensors.

    fn: a function or module, unmodified; its calls of `scaled_dot_product_attention` become what `backend` makes of
        them: "cudnn", "flash", "efficient" or "math".
    args, kwargs: tensors (their shape, strides and dtype are used, and their values by `run`), anything else as it is.
    mark_dynamic: pairs (tensor, dimension) of sizes to keep symbolic; equal sizes share a symbol.
    Returns one graph whose inputs are the tensors among args and kwargs in order, then the module's parameters and
    buffers.  The whole of fn is traced in one go, so it must not depend on values.  A symbolic size is a `sym_size`
    node in this graph, where Inductor's has an input.
    """
    if backend not in EXPANSIONS:
        raise ValueError(f"backend must be one of {', '.join(EXPANSIONS)}, got {backend!r}")
    if backend == "math" and mark_dynamic and not torch.cuda.is_available():
        raise ValueError("the math backend with symbolic sizes can only be captured with CUDA")
    return _traced(fn, args, kwargs, ExpandSDPA(backend), "cuda:0", mark_dynamic)


def capture_traced(
    fn: Callable[..., Any], *args: Any, mark_dynamic: Sequence[tuple[Tensor, int]] = (), **kwargs: Any
) -> Graph:
    """The post-grad graph of `fn` on the CPU, made as `capture_cuda` makes one: what it says of fn and of the result
    holds here too.

    Dynamo is left out, which makes it many times as fast as `capture`; what Dynamo does before, such as another graph
    after a graph break, is left out too.
    """
    return _traced(fn, args, kwargs, nullcontext(), "cpu", mark_dynamic)


def _traced(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expand: AbstractContextManager[Any],
    device: str,
    mark_dynamic: Sequence[tuple[Tensor, int]],
) -> Graph:
    """See `capture_cuda`.  expand: what the attention becomes."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    state: dict[str, Tensor] = {}
    if isinstance(fn, torch.nn.Module):
        state = {**dict(fn.named_parameters()), **dict(fn.named_buffers())}
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inputs = [leaves[i] for i in positions] + list(state.values())

    def flat(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for position, tensor in zip(positions, tensors, strict=False):
            filled[position] = tensor
        given, named = torch.utils._pytree.tree_unflatten(filled, spec)
        if not isinstance(fn, torch.nn.Module):
            return _tensors(fn(*given, **named))
        weights = dict(zip(state, tensors[len(positions) :], strict=True))
        return _tensors(torch.func.functional_call(fn, weights, given, named))

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [_fake(tensor, mode, device, [dim for t, dim in mark_dynamic if t is tensor]) for tensor in inputs]
    recorded: list[Graph] = []
    import torch._inductor.config as inductor_config

    def record(graph: Graph) -> None:
        recorded.append(_copy(graph))
        raise _RecordedError

    with ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(_without_cuda())
        for context in (mode, torch.no_grad(), enable_python_dispatcher(), V.set_fake_mode(mode)):
            stack.enter_context(context)
        functional = dispatch_functionalize(flat, mode=FunctionalTensorMode())
        compiling = mock.patch("torch.compiler._is_compiling_flag", True)  # or models look at values, as if run
        with expand, compiling:
            gm = make_fx(functional, select_decomp_table(), tracing_mode="real")(*fakes)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        gm = joint_graph_passes(gm) or gm
        view_to_reshape(gm)
        hooks = {"post_grad_custom_post_pass": record, "post_grad_custom_pre_pass": None}
        stack.enter_context(inductor_config.patch(hooks))
        with suppress(_RecordedError):
            post_grad_passes(gm, True)
    (graph,) = recorded
    assert graph.owning_module is not None
    graph.owning_module.meta[INPUTS] = tuple(inputs)
    return graph


class _RecordedError(Exception):
    """The graph is recorded; what comes after the hook would take its time."""


def _copy(graph: Graph) -> Graph:
    """A copy with the meta values of all nodes, owned by a module of its own."""
    assert graph.owning_module is not None
    return GraphModule(graph.owning_module, copy.deepcopy(graph)).graph


def _tensors(result: Any) -> Any:
    """The tensors of a module's output, whatever holds them."""
    return tuple(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor))


def _fake(tensor: Tensor, mode: FakeTensorMode, device: str, dynamic: Sequence[int]) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if not dynamic:
        return FakeTensor(mode, meta, torch.device(device))
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DUCK if dim in dynamic else DimDynamic.STATIC for dim in range(tensor.ndim)]
    symbolic = mode.from_tensor(meta, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    with mode:
        return torch.empty_strided(symbolic.shape, symbolic.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Let fake CUDA tensors be traced by a torch that has no CUDA: what would look for a device is done without it."""
    if torch.cuda.is_available():
        yield
        return
    from torch._subclasses import fake_impls

    def pad(fake_mode: FakeTensorMode, func: Any, x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
        shape = list(x.shape)
        for i in range(len(pad) // 2):
            shape[-1 - i] += pad[2 * i] + pad[2 * i + 1]
        return x.new_empty(shape)

    table = {aten.constant_pad_nd.default: pad}
    with mock.patch.dict(fake_impls.op_implementations_dict, table), _WithoutCUDA():
        yield


class _WithoutCUDA(TorchFunctionMode):
    """Calls that look for a device, by the ops that they stand for; and Inductor's constant folding on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
                return _index(args[0], list(items))
            if all(isinstance(item, Tensor) or item == slice(None) for item in items):
                return aten.index.Tensor(args[0], [item if isinstance(item, Tensor) else None for item in items])
        if func is Tensor.__invert__:
            return aten.bitwise_not.default(args[0])
        if func is Tensor.contiguous and not args[0].is_contiguous(**kwargs):
            return aten.clone.default(args[0], **{"memory_format": torch.contiguous_format, **kwargs})
        if func is torch.tensor and type(args[0]) in (bool, int, float) and "cuda" in str(kwargs.get("device")):
            dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
            return torch.full((), args[0], dtype=dtype, device=kwargs["device"])
        if "device" in kwargs and _get_current_dispatch_mode() is None:
            kwargs = _on_cpu(kwargs)
        return func(*args, **kwargs)


def _index(x: Tensor, items: list[Any]) -> Tensor:
    rest = x.ndim - sum(item is not None and item is not Ellipsis for item in items)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * rest
    dim = 0
    for item in items:
        if type(item) is int:
            x = x.select(dim, item)
            continue
        if item is None:
            x = x.unsqueeze(dim)
        elif item != slice(None):
            x = aten.slice.Tensor(x, dim, item.start, item.stop, 1 if item.step is None else item.step)
        dim += 1
    return x


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of an op that makes a tensor, for the CPU."""
    device = kwargs.get("device")
    return (
        {**kwargs, "device": torch.device("cpu")}
        if device is not None and torch.device(device).type == "cuda"
        else kwargs
    )


# What scaled_dot_product_attention becomes on CUDA: ATen/native/transformers/attention.cpp, torch 2.11 to 2.13


def _bool_to_additive(mask: Tensor | None, dtype: torch.dtype, masked: float = -math.inf) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), masked, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device))


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    masked = -65504.0 if torch.__version__ < "2.12" else -math.inf
    bias = _bool_to_additive(mask, q.dtype, masked)
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, False, 0.0, causal, False, scale=scale)[0]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    if mask is not None:
        raise ValueError("the flash backend takes no mask")
    head_dim = q.shape[-1]
    q, k, v = (F.pad(x, (0, -head_dim % 8)) if head_dim % 8 else x for x in (q, k, v))
    scale = head_dim**-0.5 if scale is None else scale
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
    return out[..., :head_dim] if head_dim % 8 else out


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    if gqa and q.shape[1] != k.shape[1]:
        raise ValueError("the efficient backend does not take fewer KV heads")
    bias = _bool_to_additive(mask, q.dtype)
    if bias is not None:
        kv_len = bias.shape[-1]
        if kv_len % 8:
            bias = F.pad(bias, (0, 8 - kv_len % 8))[..., :kv_len]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, 0.0, causal, scale=scale)[0]


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool) -> Tensor:
    bias = _bool_to_additive(mask, q.dtype)
    return aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, causal, None, scale=scale, enable_gqa=gqa)[0]


EXPANSIONS: Mapping[str, Callable[..., Tensor]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
"""Backend -> what it makes of scaled_dot_product_attention."""


class ExpandSDPA(TorchFunctionMode):
    """Within it, scaled_dot_product_attention calls the op of one CUDA backend, whoever calls it."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.expansion = EXPANSIONS[backend]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._expand(*args, **(kwargs or {}))

    def _expand(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p:
            raise ValueError("dropout is not simulated")
        return self.expansion(query, key, value, attn_mask, is_causal, scale, enable_gqa)


class _OnCPU(Interpreter):
    """Runs a graph on the device of its inputs, the attention ops of CUDA by the math form on the CPU."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = _on_cpu(kwargs)
        name = target._schema.name if hasattr(target, "_schema") else ""
        if name in _CUDA_ATTENTION:
            names = [argument.name for argument in target._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            mask = given.get("attn_bias", given.get("attn_mask"))
            q, k, v = given["query"], given["key"], given["value"]
            causal, scale = given.get("is_causal", False), given.get("scale")
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            return (_strided_like(name, q, out),)
        return super().call_function(target, args, kwargs)


def _strided_like(name: str, query: Tensor, out: Tensor) -> Tensor:
    """The output in the memory layout of the CUDA op: [batch, len, heads, dim] for the efficient one, else q's."""
    if "efficient" in name:
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.empty_like(query).copy_(out) if out.shape == query.shape else out.contiguous()


_CUDA_ATTENTION = frozenset(f"aten::_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash", "efficient"))


def run(graph: Graph, *inputs: Any) -> Any:
    """The outputs of a graph, computed op by op without code generation.

    inputs: one value for each placeholder; without any, those that the graph was captured with.  A CUDA graph runs on
    CPU tensors: its attention ops are computed by torch's CPU attention.
    """
    module = graph.owning_module
    assert module is not None
    if not inputs:
        inputs = module.meta[INPUTS]
    with torch.no_grad():
        return _OnCPU(module, graph=graph).run(*inputs)


def print_graph(graph: Graph) -> str:
    """The graph one node a line, as `name: dtype[shape] = op(args)`; the same for the same graph, for expect tests."""
    lines = []
    for node in graph.nodes:
        arguments = [_show(arg) for arg in node.args] + [f"{key}={_show(arg)}" for key, arg in node.kwargs.items()]
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_type(node)}")
        elif node.op == "output":
            lines.append(f"return {_show(node.args[0])}")
        elif node.op == "call_function":
            target = (
                str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", node.target)
            )
            lines.append(f"{node.name}: {_type(node)} = {target}({', '.join(arguments)})")
        else:
            lines.append(f"{node.name}: {_type(node)} = {node.op} {node.target}")
    return "\n".join(lines)


def _type(node: Node) -> str:
    val = node.meta.get("val")
    if isinstance(val, Tensor):
        return f"{_dtype(val.dtype)}[{', '.join(str(size) for size in val.shape)}]"
    return (
        "(" + ", ".join(type(v).__name__ for v in val) + ")" if isinstance(val, (tuple, list)) else type(val).__name__
    )


def _dtype(dtype: torch.dtype) -> str:
    name = dtype_name(dtype)
    return name.replace("bfloat", "bf").replace("float8_", "f8").replace("float", "f").replace("int", "i")


def _show(arg: Any) -> str:
    if isinstance(arg, Node):
        return arg.name
    if isinstance(arg, (tuple, list)):
        return "[" + ", ".join(_show(item) for item in arg) + "]"
    return _dtype(arg) if isinstance(arg, torch.dtype) else str(arg)


def same_codes(a: Tensor, b: Tensor, max_steps: int = 1) -> float:
    """The share of FP8 codes in which a and b differ, from 0 to 1.

    Raises AssertionError where shape or dtype differ, or a code differs by more than `max_steps` representable values.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(f"{a.dtype} {list(a.shape)} is not {b.dtype} {list(b.shape)}")
    steps = (codes(a) - codes(b)).abs()
    if steps.numel() and int(steps.max()) > max_steps:
        worst = int(steps.argmax())
        raise AssertionError(
            f"{int((steps > max_steps).sum())} of {steps.numel()} codes differ by more than {max_steps} steps; "
            f"the worst is {a.flatten()[worst].float():g} where {b.flatten()[worst].float():g} was expected"
        )
    return float((steps != 0).float().mean()) if steps.numel() else 0.0
