"""Timing on a CUDA GPU."""
