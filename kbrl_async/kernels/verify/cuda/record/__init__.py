"""Recording a candidate's forward on a GPU as data: what its process does, and how the bench drives it."""
