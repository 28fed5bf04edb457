"""A place in a graph that a fusion may take: which nodes it stands for, what it reads, and how it is declined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from fusion_passes.graph.symbolic import known

Call = Callable[..., Node]
"""`call(op, *args, **kwargs)`: add a node to the graph, with its meta value computed."""


class DeclinedError(Exception):
    """A condition of a rule does not hold; the text is the reason that the user reads."""


@dataclass(frozen=True, eq=False)
class Match:
    """One place where the structure of a rule's pattern was found.

    `output`: the node whose value the replacement takes over, with its shape, strides and dtype.
    `nodes`: what the replacement makes dead, the outputs among them.  The manager refuses the match where another node
    reads one of them (it would be computed twice).
    `inputs`: the tensors that the replacement reads.  The manager refuses the match where one of them is written to
    between the first of `nodes` and the last output.
    `side_outputs`: further nodes that are taken over, like `output`, by a replacement with several results.
    """

    output: Node
    nodes: frozenset[Node]
    inputs: tuple[Node, ...]
    side_outputs: tuple[Node, ...] = field(default=(), kw_only=True)

    @property
    def outputs(self) -> tuple[Node, ...]:
        """All that is taken over, in the order of the replacement's results."""
        return (self.output, *self.side_outputs)

    @property
    def site(self) -> Node:
        """The node whose place in the user's model the report names."""
        return self.output

    def require(self, condition: bool | torch.SymBool, reason: str) -> None:
        """Decline with `reason` unless `condition` provably holds; a symbolic condition adds no guard."""
        if not known(condition):
            raise DeclinedError(reason)
