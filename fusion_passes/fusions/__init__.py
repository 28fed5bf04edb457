"""Fusions: what a rule is (`rule`), the library's own, one file each (`builtin` has their order), and `traced` ones."""
