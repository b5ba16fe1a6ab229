"""Verifying on a CUDA GPU."""
