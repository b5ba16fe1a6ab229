"""KernelBench's run folders: read, judged and written."""
