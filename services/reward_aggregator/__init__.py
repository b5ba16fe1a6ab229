"""Reward aggregator: owns groups, the only place where a reward is computed."""
