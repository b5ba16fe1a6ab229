"""The archive of a run."""
