"""Backend `c`: plain C functions."""
