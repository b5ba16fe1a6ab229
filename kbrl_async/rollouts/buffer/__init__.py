"""The rollout buffer: which groups are open, ready, in a batch, or ended."""
