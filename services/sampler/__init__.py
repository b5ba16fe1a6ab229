"""Sampler: prompts in, tokens with behaviour log-probs out."""
