"""CUDA's driver API, as far as torch has no name for it."""
