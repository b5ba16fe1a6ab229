"""What the zygote of an audit on a CPU does once for all of its children: a process's first operator over tensors
without memory imports nine hundred modules of torch, which takes seconds.
"""

import torch

torch.cos(torch.empty(1, device="meta"))
