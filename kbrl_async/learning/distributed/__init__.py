"""One learner on several processes."""
