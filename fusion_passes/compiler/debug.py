"""Graphs as files: with a debug directory set, every compiled graph gets a folder with what it was before and after
each stage, a diff, the idioms, and the report.

    graph_000/before.py  idioms.txt  fused.py  after.py  changes.diff  report.txt
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

from torch.fx import Graph

from fusion_passes.compiler.report import GraphReport, Report
from fusion_passes.idioms import Idiom, Idioms


class GraphDump:
    """Writes the stages of one graph into a folder; does nothing where there is none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._before = ""

    @classmethod
    def open(cls, directory: Path | None) -> GraphDump:
        """The next free folder `graph_NNN` in `directory`; several processes may write there."""
        if directory is None:
            return cls(None)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return cls(_next_folder(directory))
        except OSError as error:
            raise RuntimeError(
                f"debug_dir (FUSION_PASSES_DEBUG) cannot be made, or not be written to: {error}"
            ) from error

    def graph(self, stage: str, graph: Graph) -> None:
        """Write the graph as it is now; after the last stage ("after"), also what changed."""
        if self._folder is None:
            return
        text = readable(graph)
        (self._folder / f"{stage}.py").write_text(text)
        if stage == "before":
            self._before = text
        elif stage == "after":
            diff = difflib.unified_diff(self._before.splitlines(True), text.splitlines(True), "before.py", "after.py")
            (self._folder / "changes.diff").write_text("".join(diff))

    def idioms(self, idioms: Idioms) -> None:
        """Write what was recognised, and what nearly was."""
        if self._folder is None:
            return
        lines = [_described(idiom) for idiom in idioms]
        lines += [f"{miss.node.name}: near miss of {miss.what}: {miss.reason}" for miss in idioms.near_misses]
        (self._folder / "idioms.txt").write_text("\n".join(lines) + "\n")

    def report(self, result: GraphReport) -> None:
        """Write what the rules decided."""
        if self._folder is not None:
            report = Report()
            report.add(result)
            (self._folder / "report.txt").write_text(f"{report}\n")


def _next_folder(directory: Path) -> Path:
    number = len(list(directory.glob("graph_*")))
    while True:
        folder = directory / f"graph_{number:03}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _described(idiom: Idiom) -> str:
    """`div: quantize(input=permute, scale=arg3_1, …)`: an idiom with all that it knows."""
    fields = [f.name for f in dataclasses.fields(idiom) if f.name not in ("output", "nodes")]
    attributes = ", ".join(f"{name}={getattr(idiom, name)}" for name in fields)
    covered = ", ".join(node.name for node in sorted(idiom.nodes))
    return f"{idiom.output.name}: {idiom}({attributes})\n    computed by {covered}"


def readable(graph: Graph) -> str:
    """The graph as Python with shapes, strides, devices and the user's source lines."""
    if graph.owning_module is None:
        return str(graph)
    return graph.owning_module.print_readable(print_output=False, include_stride=True, include_device=True)
