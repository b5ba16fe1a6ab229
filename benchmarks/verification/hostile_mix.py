"""Candidates for `mix`: templates whose verdict is known, made different by a number. Nothing here is executed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from protocols.records import Fault

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2 + 0.5

def get_inputs():
    return [torch.randn(16, 64)]

def get_init_inputs():
    return []
"""
_PYTHON = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

TAG = {tag}
SOURCE = r'''
#include <math.h>
{declare}
void f(const float *restrict x, float *restrict y, long n) {{
  static long variant = {variant};
  {before}
  for (long i = 0; i < n{less}; i++) y[i] = {formula};
  {after}
  (void)variant;
}}
'''

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
        self.kernel = c_kernel(SOURCE, "f")

    def forward(self, x):
        {forward}
        y = torch.empty_like(x)
        self.kernel(x, y, x.numel())
        {then}
        return y
"""
_FORGE = """import os
        for fd in range(3, 64):
            try:
                os.write(fd, b"x" * 64)
            except OSError:
                pass"""
_RIGHT = "tanhf(x[i]) * 2 + 0.5f"


class Template(msgspec.Struct, frozen=True):
    """What is put into the right answer, and the one verdict that it must get."""

    name: str
    share: float
    expected: Fault
    parts: dict[str, str] = {}
    replace: tuple[str, str] = ("", "")
    is_raw: bool = False
    """Goes to the bench without the farm's checks, as if those had been fooled."""


def _c(name: str, share: float, expected: Fault, **parts: str) -> Template:
    return Template(name, share, expected, parts)


def _raw(name: str, share: float, expected: Fault, **parts: str) -> Template:
    return Template(name, share, expected, parts, is_raw=True)


TEMPLATES = (
    # right, in several ways; what a raw one tries in vain does not make it wrong
    _c("right", 24, Fault.OK),
    _c("right_other_formula", 6, Fault.OK, formula="2 * (1 - 2 / (expf(2 * x[i]) + 1)) + 0.5f"),
    _raw("kills_everybody", 2, Fault.OK, declare="extern int kill(int, int);", before="kill(-1, 9); kill(1, 9);"),
    _raw("raises_sigkill", 1, Fault.OK, declare="extern int raise(int);", before="raise(9); raise(19);"),
    _raw("opens_host_files", 2, Fault.OK, declare="extern int open(const char *, int, ...);",
       before='if (open("/etc/passwd", 0) >= 0 || open("/tmp/kbrl-mark", 0101, 0600) >= 0) return;'),
    _raw("opens_a_socket", 1, Fault.OK, declare="extern int socket(int, int, int);",
       before="if (socket(2, 1, 0) >= 0) return;"),
    _raw("changes_modes", 1, Fault.OK, declare="extern int chmod(const char *, unsigned);",
       before='if (chmod("/tmp", 01777) == 0) return;'),
    _raw("leaves_shared_memory", 1, Fault.OK,
       declare="extern int shmget(int, long, int);\nextern int memfd_create(const char *, int);",
       before='if (shmget(4242, 4096, 01600) >= 0 || memfd_create("mark", 0) >= 0) return;'),
    _raw("fills_its_scratch", 1, Fault.OK, declare="""extern int creat(const char *, int);
extern long write(int, const void *, long);
extern int close(int);""",
       before='int fd = creat("junk", 0600); for (int k = 0; k < 64; k++) write(fd, x, n * 4); close(fd);'),
    _raw("talks_a_lot", 1, Fault.OK, declare="extern int printf(const char *, ...);",
       before='for (int k = 0; k < 2000; k++) printf("{\\"fault\\": \\"ok\\"}\\n");'),
    _raw("forks_in_python", 1, Fault.RUNTIME_ERROR, init="import os; os.fork()"),
    _raw("reads_the_environment_of_init", 1, Fault.RUNTIME_ERROR, init="open('/proc/1/environ', 'rb').read()"),
    _raw("lists_other_candidates", 1, Fault.RUNTIME_ERROR, init="import os; os.listdir('/tmp')"),
    _raw("leaves_a_thread", 1, Fault.RUNTIME_ERROR, init="import threading; threading.Thread(target=print).start()"),
    _raw("removes_its_artifact", 1, Fault.RUNTIME_ERROR, forward="import os; os.unlink(self.kernel._library._name)"),
    _raw("exits_in_python", 1, Fault.RUNTIME_ERROR, forward="import os; os._exit(0)"),
    _raw("forges_a_result", 1, Fault.CHEATING, forward=_FORGE),
    # wrong
    _c("wrong_formula", 8, Fault.INCORRECT, formula="tanhf(x[i]) * 2 + 0.25f"),
    _c("last_element_missing", 5, Fault.INCORRECT, less=" - 1"),
    _c("zeros", 3, Fault.INCORRECT, formula="0"),
    _c("nan", 2, Fault.INCORRECT, formula="0.0f / 0.0f"),
    _c("nothing_written", 2, Fault.INCORRECT, before="return;"),
    _c("wrong_shape", 2, Fault.INCORRECT, then="return y.reshape(-1)"),
    # never built
    Template("no_code", 2, Fault.FORMAT_ERROR, replace=("class ModelNew", "class SomethingElse")),
    Template("broken_python", 2, Fault.FORMAT_ERROR, replace=("def forward(self, x):", "def forward(self x:")),
    Template("imports_ctypes", 2, Fault.STATIC_VIOLATION, replace=("import torch\n", "import torch, ctypes\n")),
    _c("includes_the_password_file", 2, Fault.STATIC_VIOLATION, declare='#include "/etc/passwd"'),
    _c("inline_assembly", 1, Fault.STATIC_VIOLATION, before='__asm__("hlt");'),
    _c("does_not_compile", 6, Fault.COMPILE_ERROR, before="undeclared = 1;"),
    _c("calls_what_no_kernel_needs", 2, Fault.COMPILE_ERROR,
       declare="extern int kill(int, int);", before="kill(-1, 9);"),
    # crashing
    _c("null_pointer", 3, Fault.ILLEGAL_ACCESS, before="*(volatile int *)(n - n) = 1;"),
    _c("far_out_of_bounds", 2, Fault.ILLEGAL_ACCESS, before="((float *)x)[1L << 40] = 1;"),
    _c("endless_recursion", 1, Fault.ILLEGAL_ACCESS,
       declare="""static volatile long depth;
static long deep(long k) { volatile char a[4096]; a[0] = k; depth++; return deep(k + 1) + a[0]; }""",
       before="y[0] = deep(n);"),
    _c("division_by_zero", 1, Fault.RUNTIME_ERROR, before="volatile long z = n - n; y[0] = n / z;"),
    _raw("exits_with_success", 2, Fault.RUNTIME_ERROR, declare="extern void _exit(int);", before="_exit(0);"),
    _c("python_error", 3, Fault.RUNTIME_ERROR, forward="x = x.no_such_method()"),
    _c("error_in_the_constructor", 1, Fault.RUNTIME_ERROR, init="raise ValueError('no')"),
    _c("memory_bomb", 1, Fault.OUT_OF_MEMORY, forward="junk = torch.empty(1 << 42)"),
    _c("loops_in_the_kernel", 1, Fault.TIMEOUT, before="for (volatile long k = 0; ; k++);"),
    _c("loops_in_python", 1, Fault.TIMEOUT, forward="while True: pass"),
    _c("loops_in_the_constructor", 0.5, Fault.TIMEOUT, init="while True: pass"),
    # cheating
    _c("changes_its_input", 2, Fault.CHEATING, before="((float *)x)[0] = 0;"),
    _c("returns_one_buffer", 1, Fault.INCORRECT, init="self.kept = None",
       then="self.kept = y if self.kept is None else self.kept.copy_(y); y = self.kept"),
    _c("uses_torch_alone", 2, Fault.CHEATING, forward="return torch.tanh(x) * 2 + 0.5"),
)  # fmt: skip


class Made(msgspec.Struct, frozen=True):
    task_id: str
    template: str
    source: str
    expected: Fault
    is_raw: bool
    c_source: str


def source_of(template: Template, tag: int, variant: int) -> str:
    parts = {"declare": "", "before": "", "after": "", "less": "", "formula": _RIGHT} | {
        "init": "pass",
        "forward": "pass",
        "then": "pass",
    }
    text = _PYTHON.format(tag=tag, variant=variant, **(parts | template.parts))
    return text.replace(*template.replace) if template.replace[0] else text


def candidates_of(count: int, variants: int, seed: int = 0) -> Iterator[Made]:
    """Every template at least once; each source differs, and each template compiles at most `variants` times."""
    rng = random.Random(seed)
    shares = [template.share for template in TEMPLATES]
    more = rng.choices(TEMPLATES, shares, k=max(0, count - len(TEMPLATES)))
    chosen = [*TEMPLATES, *more][:count]
    rng.shuffle(chosen)
    for number, template in enumerate(chosen):
        source = source_of(template, number, number % variants)
        c_source = source.split("r'''")[1].split("'''")[0]
        yield Made(f"c{number:05d}", template.name, source, template.expected, template.is_raw, c_source)
