"""The fault of Inductor that `docs/inductor-softmax-dim.md` describes, and that the passes do not make it worse."""

import re
from pathlib import Path

import torch

import fusion_passes
from tests.fusions.without_code import FUSE


def test_the_fault_that_the_page_describes_is_there():
    """Once torch has mended it, the page says since when."""
    page = Path(__file__).parents[1] / "docs" / "inductor-softmax-dim.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    told = {}
    torch._dynamo.reset()
    exec(code, told)
    tensors = told["query"], told["key"], told["value"]
    over_keys = torch.softmax(tensors[0] @ tensors[1].mT * 0.25, -1) @ tensors[2]
    assert (told["compiled"] - told["eager"]).abs().max() > 0.9
    torch.testing.assert_close(told["compiled"], over_keys)
    torch._dynamo.reset()
    with torch.no_grad():
        ours = fusion_passes.compile(told["over_queries"], FUSE)(*tensors)
    assert torch.equal(ours, told["compiled"])
