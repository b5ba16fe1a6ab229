"""Rewards: from a rollout's record to a number, and from numbers to advantages. Pure: no files, clocks or tensors."""
