"""Timing on a CPU."""
