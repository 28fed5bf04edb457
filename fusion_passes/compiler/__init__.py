"""From a user's `torch.compile` to the fusions: config, registration, the pass manager, reports, caches.

`inductor` is the only module of it that knows Inductor's private surface.
"""
