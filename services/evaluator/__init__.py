"""Evaluator: asks a policy for n answers a problem, and says what they are worth."""
