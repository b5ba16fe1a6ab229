"""Backend `triton`."""
