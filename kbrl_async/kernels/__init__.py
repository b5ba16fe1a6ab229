"""Everything about one kernel, with no reinforcement learning in sight."""
