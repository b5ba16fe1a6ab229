"""Rewards: from a rollout's record to a number, from numbers to advantages, and the book of groups in between.

Owns scoring and the life of groups. Pure: no sockets, files, clocks or tensors.
"""
