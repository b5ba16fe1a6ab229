"""Verifying on a CPU."""
