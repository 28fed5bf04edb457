"""Fusions that a user writes as two functions: `TracedRule`."""
