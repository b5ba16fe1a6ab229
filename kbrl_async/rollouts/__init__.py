"""From a problem to a scored group: prompts, turns, rewards, retrieval, the buffer of groups."""
