"""What the tests of rules share."""

import sys

import pytest


@pytest.fixture
def hopper(monkeypatch):
    """What the rules ask of the machine is answered as by an H100 or H200 with Triton 3.6."""
    answers = {
        "device_capability": lambda device: (9, 0),
        "device_name": lambda device: None,
        "triton_version": lambda: (3, 6),
    }
    for name, module in list(sys.modules.items()):
        for question, answer in answers.items():
            if name.startswith("fusion_passes.") and hasattr(module, question):
                monkeypatch.setattr(module, question, answer)
