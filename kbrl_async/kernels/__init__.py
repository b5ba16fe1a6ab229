"""Everything about one kernel, with no RL in sight: problems, backends, sandbox, verdicts, times."""
