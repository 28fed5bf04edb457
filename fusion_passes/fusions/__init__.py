"""Fusions: what a rule is (`rule`), the library's own, one file each, and those of users (`traced`)."""

NAMES = (
    "query_quant",
    "rope_quant_kv_write",
    "attention_quant",
    "rms_norm_quant",
)
"""The library's own, in the order in which they are tried: what opens a graph for others comes first, then the most
specific.  `<name>.py` has the rule; its switch, its environment variable and its rows in `list`, `doctor` and the docs
follow from the two."""
