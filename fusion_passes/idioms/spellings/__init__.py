"""Spellings of the idioms: plain torch functions, one file for each idiom.  Tests run them, the docs show them."""
