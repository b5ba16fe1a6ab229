"""Sampling: engines that turn prompts into tokens and log-probs, each under a known policy version.

Owns served weights and KV caches. Never touches sockets, rewards or gradients.
"""
