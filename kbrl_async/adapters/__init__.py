"""Rewards for other trainers: each module is what one of them loads by its path."""
