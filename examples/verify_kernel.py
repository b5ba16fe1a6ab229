"""One kernel of your own, verified and timed from Python.

    python examples/verify_kernel.py

The same as `kbrl verify --problem L1/13 --candidate FILE`: compiled, checked on secret inputs in a sandbox, and, if it
is correct, timed beside the reference. Nothing of it has to do with training.
"""

from __future__ import annotations

import kbrl_async

KERNEL = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r"""
#include <math.h>

void softmax(const float *x, float *y, long rows, long n) {
    for (long r = 0; r < rows; r++, x += n, y += n) {
        float top = x[0], sum = 0;
        for (long i = 1; i < n; i++) top = fmaxf(top, x[i]);
        for (long i = 0; i < n; i++) sum += y[i] = expf(x[i] - top);
        for (long i = 0; i < n; i++) y[i] /= sum;
    }
}
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "softmax")

    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        self.kernel(x, y, x.numel() // x.shape[-1], x.shape[-1])
        return y
'''


def main() -> None:
    result = kbrl_async.verify("L1/13_softmax", KERNEL)
    for stage in result.stages:
        print(f"{stage.name:12} {stage.fault:12} {stage.seconds:6.2f} s  {stage.detail}")
    if not result.ok:
        print(f"{result.fault}: {result.verdict.message}")
    elif (timing := result.timing) is not None:
        print(f"speedup {timing.speedup:.2f}× ({timing.lo:.2f} … {timing.hi:.2f}): {timing.claim}")


if __name__ == "__main__":
    main()
