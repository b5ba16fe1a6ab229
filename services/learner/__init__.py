"""Learner: owns the weights and versions of the policy."""
