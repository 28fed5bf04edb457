"""Models on the library's layers, and how they are loaded from a checkpoint."""
