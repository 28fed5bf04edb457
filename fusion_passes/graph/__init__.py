"""FX graphs, without a model of what they compute: reading nodes, views, writes, symbolic sizes, and editing.

Nothing here knows an idiom or a fusion.
"""
