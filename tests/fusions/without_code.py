"""Compile with everything but code generation: the graphs and guards are real, the rewritten graph is run op by op.

Writing and compiling C++ takes most of a compilation's time on the CPU, and most tests are not about it.
"""

from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, fake_tensor_prop
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V

from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.compiler.inductor import HOOK
from fusion_passes.testing import print_graph

FUSE = PassConfig(profitability="ignore")
STOCK = PassConfig(level="O0")


class WithoutCode:
    """`fn`, compiled.  Call it; then look at what was compiled.

    before, after: text of each graph before and after our passes.  new_guards: what they added to the shape guards.
    inference: for each graph, whether it was compiled for inference.
    """

    def __init__(self, fn, config: PassConfig = FUSE, *, dynamic: bool | None = None) -> None:
        self.report = Report()
        self.manager = PostGradPassManager(config, self.report)
        self.before: list[str] = []
        self.after: list[str] = []
        self.new_guards: list[list[Any]] = []
        self.inference: list[bool] = []
        self._compiled = torch.compile(fn, backend=self._backend, dynamic=dynamic, fullgraph=True)

    def __call__(self, *args, **kwargs):
        return self._compiled(*args, **kwargs)

    def _backend(self, gm, example_inputs):
        return compile_fx(gm, example_inputs, inner_compile=self._compile_graph)

    def _compile_graph(self, gm, example_inputs, **options):
        view_to_reshape(gm)
        with torch.no_grad():
            mode = fake_tensor_prop(gm, example_inputs)
        self.inference.append(bool(options.get("is_inference")))
        with V.set_fake_mode(mode), inductor_config.patch({HOOK: self._watched(mode.shape_env)}):
            post_grad_passes(gm, self.inference[-1])

        def run(inputs):
            values = list(inputs)
            inputs.clear()
            return gm(*values)

        run._boxed_call = True
        return run

    def _watched(self, shape_env):
        def run(graph):
            self.before.append(print_graph(graph))
            guards = len(shape_env.guards) if shape_env else 0
            self.manager(graph)
            self.new_guards.append(list(shape_env.guards[guards:]) if shape_env else [])
            self.after.append(print_graph(graph))

        return run

    @property
    def fused(self) -> int:
        """Number of places that were fused."""
        return self.report.count()


def shape_env_of(graph):
    """That of the symbolic sizes of a graph's inputs."""
    vals = (node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    sizes = (size for val in vals if isinstance(val, torch.Tensor) for size in val.shape)
    return next(size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))
