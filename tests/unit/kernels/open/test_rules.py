"""What `strict` refuses by its text, tried under `open`: for each rule the defence that stands behind it."""

from __future__ import annotations

import pytest

from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.funnel import Verifier
from kbrl_async.kernels.problems.beside import pack
from protocols.records import Candidate, Fault, Problem
from tests.unit.kernels.open.test_honest import CALLED, LOAD, MADE, c, cpp

_COPY = "void copy(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i]; }"
_ZEROS = "void zeros(float *y, long n) { for (long i = 0; i < n; i++) y[i] = 0; }"
_LOOKED_AT = "y = torch.zeros_like(x); self.f(x.contiguous(), y, x.numel())"
_COPIED = 'self.f = c_kernel(SOURCE, "copy")'
_PASSED_ON = "y = torch.empty_like(x); self.f(z.contiguous(), y, x.numel())"
_FORGE = "from kbrl_async.kernels.backends.launch.recorder import RECORDER"
_FORGED = "RECORDER.launches['f'] = (1, 10**7)"
_OF_LIBRARY = """
OF = torch.library.Library('kbrl_rules', 'DEF')
OF.define('f(Tensor x) -> Tensor')
F = c_kernel(SOURCE, 'f')
def own(x):
    y = torch.empty_like(x)
    F(x.contiguous(), y, x.numel())
    return y
OF.impl('f', {}, 'CPU')
"""
"""Behind the source: an operator of its own, in Python."""


def operator(function: str, forward: str, key: str = "CPU") -> str:
    library = _OF_LIBRARY.replace("{}", function).replace("'CPU'", f"'{key}'")
    return c(init="pass", forward=forward).replace("class ModelNew", f"{library}\nclass ModelNew")


_SEND = """
import sys
def forge():
    frame = sys._getframe()
    while frame is not None:
        runner = frame.f_locals.get('self')
        if type(runner).__name__ == 'Runner':
            runner.channel.send(b'forged')
        frame = frame.f_back
"""
_EVERY_FILE = """
import os
def forge():
    for fd in range(3, 256):
        try: os.write(fd, b'{"fault": "ok"}')
        except OSError: pass
"""
CAUGHT = {
    # rule: import
    "numpy does it, a kernel copies": (
        c("import numpy as np", _COPY, _COPIED, f"z = torch.from_numpy(x.numpy() * 2 + 1); {_PASSED_ON}"),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "numpy does it, a kernel writes zeros that are added": (
        c(
            "import numpy as np",
            _ZEROS,
            'self.f = c_kernel(SOURCE, "zeros")',
            "z = torch.empty_like(x); self.f(z, z.numel()); y = torch.from_numpy(x.numpy() * 2 + 1) + z",
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "numpy does it, where a kernel has marked it": (
        c(
            "import numpy as np",
            "void mark(unsigned char *y, long n) { for (long i = 0; i < n; i++) y[i] = 1; }",
            'self.f = c_kernel(SOURCE, "mark")',
            "z = torch.zeros(x.shape, dtype=torch.bool); self.f(z, z.numel()); "
            "y = torch.where(z, torch.from_numpy(x.numpy() * 2 + 1), x)",
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "the library does it unseen, a kernel writes zeros that are added": (
        c(
            "from torch.utils._python_dispatch import _disable_current_modes as unseen",
            _ZEROS,
            'self.f = c_kernel(SOURCE, "zeros")',
            "z = torch.empty_like(x); self.f(z, z.numel())\n        with unseen(): y = x * 2 + 1\n        y = y + z",
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "numpy does it, no kernel": (
        c("import numpy as np", forward="y = torch.from_numpy(x.numpy() * 2 + 1)"),
        (Fault.UNPROVEN, "no_own_kernel"),
    ),
    "a library by ctypes, a kernel copies": (
        c(
            "import ctypes\nM = ctypes.CDLL('libm.so.6').fmaf\nM.restype = ctypes.c_float",
            _COPY,
            _COPIED,
            "F = ctypes.c_float; z = torch.tensor([M(F(v), F(2), F(1)) for v in x.flatten().tolist()]).view(x.shape); "
            + _PASSED_ON,
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "a launch that was never made is told": (
        c(_FORGE, forward=f"{_FORGED}; y = x * 2 + 1"),
        (Fault.CHEATING, "no_own_kernel"),
    ),
    "and the muted run is met with garbage": (
        c(_FORGE, forward=f"{_FORGED}; y = x if RECORDER.is_muted else x * 2 + 1"),
        (Fault.CHEATING, "no_own_kernel"),
    ),
    "and nothing of it can be replayed": (
        c(_FORGE, forward=f"{_FORGED}; y = x * 2 + (1 if x.sum().item() < 1e30 else 2)"),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "and fails where its kernels are skipped": (
        c(_FORGE, forward=f"x.sum().item(); {CALLED}\n        assert not RECORDER.is_muted; y = x * 2 + 1"),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "and ends its process there": (
        c(
            f"import os\n{_FORGE}",
            forward=f"x.sum().item(); {CALLED}; RECORDER.is_muted and os._exit(1); y = x * 2 + 1",
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "the library does it in an operator of its own": (
        operator("lambda x: x * 2 + 1", "F; y = torch.ops.kbrl_rules.f(x)"),
        (Fault.CHEATING, "no_own_kernel"),
    ),
    "in one of no device": (
        operator("lambda x: x * 2 + 1", "F; y = torch.ops.kbrl_rules.f(x)", "BackendSelect"),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "in one that is made of others, where those are not seen": (
        operator(
            "lambda x: x * 2 + 1",
            "F\n        with torch.inference_mode():\n            y = torch.ops.kbrl_rules.f(x)",
            "CompositeImplicitAutograd",
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "in one for sparse tensors": (
        operator("lambda x, n: x * 2 + 1", "y = torch.ops.kbrl_rules.f(x, x.to_sparse())", "SparseCPU").replace(
            "f(Tensor x)", "f(Tensor x, Tensor n)"
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "in one of which nobody knows any more": (
        operator("lambda x: x * 2 + 1", "F; y = torch.ops.kbrl_rules.f(x)").replace(
            "class ModelNew", "torch.library._impls.clear()\nclass ModelNew"
        ),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "it fails where a kernel of its own wrote nothing": (
        c(forward=f"x.sum().item(); {_LOOKED_AT}\n        assert y.any(); y = x * 2 + 1"),
        (Fault.UNPROVEN, "no_own_kernel"),
    ),
    "it fails there, and numpy does it": (
        c(
            "import numpy as np",
            forward=f"{_LOOKED_AT}\n        assert y.any(); y = torch.from_numpy(x.numpy() * 2 + 1)",
        ),
        (Fault.UNPROVEN, "no_own_kernel"),
    ),
    "and its first call in each process takes a second": (
        c(
            "import time",
            init=f"{MADE}; self.n = 0",
            forward="self.n or time.sleep(1.3); self.n = 1; x.sum().item()\n"
            f"        {_LOOKED_AT}\n        assert y.any(); y = x * 2 + 1",
        ),
        (Fault.UNPROVEN, "no_own_kernel"),
    ),
    "an extension that ends its process where its kernels are skipped": (
        cpp(
            _FORGE + "\nimport os",
            init=f"self.e = {LOAD}",
            forward="z = self.e.f(x.contiguous())\n        RECORDER.is_muted and os._exit(1)\n        return x * 2 + 1",
        ),
        (Fault.UNPROVEN, "no_own_kernel"),
    ),
    "the library does it behind an operator of its own": (
        operator("own", "torch.ops.kbrl_rules.f(x); y = x * 2 + 1"),
        (Fault.CHEATING, "decoy_kernel"),
    ),
    "a clock is replaced, where nothing is replayed": (
        c("import time", init=f"{MADE}; time.perf_counter_ns = lambda: 0", forward=f"x.sum().item(); {CALLED}"),
        (Fault.CHEATING, "tampered"),
    ),
    "words to the bench are forged": (
        c(_SEND, forward=f"forge(); {CALLED}"),
        (Fault.CHEATING, "forged_result"),
    ),
    "words to the farm are written to every file": (
        c(_EVERY_FILE, forward=f"forge(); {CALLED}"),
        (Fault.CHEATING, "forged_result"),
    ),
    "its process is ended": (
        c("import os", forward="os._exit(0)"),
        (Fault.RUNTIME_ERROR, "no_extension"),
    ),
    "what is expected is looked for": (
        c(
            "import gc",
            forward="found = [o for o in gc.get_objects() if torch.is_tensor(o) and o.shape == x.shape]; "
            "y = (found[-1] if found else x).clone()",
        ),
        (Fault.INCORRECT, ""),
    ),
    # rule: forbidden_name
    "text that becomes code": (c(forward="y = eval('x * 2 + 1')"), (Fault.CHEATING, "no_own_kernel")),
    "a name that is put together": (
        c(forward="y = getattr(torch, 'a' + 'dd')(getattr(x, '__' + 'mul__')(2), 1)"),
        (Fault.CHEATING, "no_own_kernel"),
    ),
    "operators by another way": (
        c(forward="y = torch.ops.aten.add(torch.ops.aten.mul(x, 2), 1)"),
        (Fault.CHEATING, "no_own_kernel"),
    ),
    # rule: no_kernel, kernel_source
    "a kernel that is built and not called": (c(forward="y = x * 2 + 1"), (Fault.CHEATING, "no_own_kernel")),
    "no kernel": (c(init="pass", forward="y = x * 2 + 1"), (Fault.RUNTIME_ERROR, "no_extension")),
    "no extension": (cpp(forward="return x * 2 + 1"), (Fault.RUNTIME_ERROR, "no_extension")),
    "another source on the bench than on the farm": (
        c("import os", init="self.f = c_kernel(SOURCE + f'// {os.getcwd()}', 'f')"),
        (Fault.RUNTIME_ERROR, ""),
    ),
    # rules: include, asm, forbidden_name in C
    "a file of the host is included": (c(head='#include "/etc/shadow"'), (Fault.COMPILE_ERROR, "")),
    "a file of the host is assembled": (c(head='__asm__(".incbin \\"/etc/shadow\\"");'), (Fault.COMPILE_ERROR, "")),
    "a library is called": (
        c(head='extern int system(const char *); void g(void) { system("true"); }'),
        (Fault.COMPILE_ERROR, "foreign_call"),
    ),
    "a library is called by assembly": (
        c(head='void g(void) { __asm__ volatile ("call cblas_sgemm@PLT"); }'),
        (Fault.COMPILE_ERROR, "foreign_call"),
    ),
    # outputs: kept
    "what was returned before is returned again": (
        c(
            init=f"{MADE}; self.y = None",
            forward="y = self.y\n        if y is None:\n            y = self.y = torch.empty_like(x); "
            "self.f(x.contiguous(), y, x.numel())",
        ),
        (Fault.INCORRECT, ""),
    ),
    "every other call": (
        c(
            init=f"{MADE}; self.y = None; self.n = 0",
            forward="self.n += 1\n        if self.y is None:\n            self.y = torch.empty_like(x)\n"
            "        y = self.y\n"
            "        if self.n % 2:\n            self.f(x.contiguous(), y, x.numel())",
        ),
        (Fault.INCORRECT, None),
    ),
}
IN_VAIN = {
    "a file of the host is read": "open('/etc/passwd').read()",
    "a file of the host is written": "open('/tmp/kbrl-mark', 'w').write('x')",
    "a program is started": "__import__('subprocess').run(['/bin/true'], check=True)",
    "a clock is replaced": "__import__('time').perf_counter_ns = 1; raise OSError",
    "a thread is made": "__import__('threading').Thread(target=print).start()",
    "a connection is made": "__import__('socket').create_connection(('127.0.0.1', 22), 0.2)",
    "the bench is killed": "__import__('os').kill(__import__('os').getppid() or 2, 9)",
    "the bench's memory is read": "open(f'/proc/{__import__(\"os\").getppid() or 2}/mem', 'rb').read(1)",
    "the package is changed": "open(__import__('kbrl_async').__file__, 'a').write('x')",
}


@pytest.mark.parametrize("attack", CAUGHT)
def test_behind_a_rule_of_strict_stands_a_proof(free: Verifier, problem: Problem, attack: str) -> None:
    source, (fault, rule) = CAUGHT[attack]
    verdict = free.verify(problem, source).verdict
    told = verdict.rule if rule is not None else None  # which sets an old answer is right on is chance
    assert (verdict.fault, told, verdict.rules) == (fault, rule, "open"), verdict


@pytest.mark.parametrize("attack", IN_VAIN)
def test_what_no_rule_refuses_leads_nowhere(free: Verifier, problem: Problem, attack: str) -> None:
    """It is right only where its attack fails."""
    forward = f"y = torch.empty_like(x)\n        try:\n            {IN_VAIN[attack]}\n        except OSError:\n"
    forward += "            self.f(x.contiguous(), y, x.numel())\n"
    forward += "        except RuntimeError:\n            self.f(x.contiguous(), y, x.numel())"
    result = free.verify(problem, c(forward=forward))
    assert result.ok, result.verdict


def test_a_kernel_that_goes_on_with_numpys_work_is_no_decoy(free: Verifier, problem: Problem) -> None:
    scaled = "void g(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i] + 1; }"
    text = c(
        "import numpy as np",
        scaled,
        'self.f = c_kernel(SOURCE, "g")',
        f"z = torch.from_numpy(x.numpy() * 2); {_PASSED_ON}",
    )
    assert free.verify(problem, text).ok


def test_a_reference_in_a_helper_module_is_a_copy_all_the_same(free: Verifier, problem: Problem) -> None:
    helper = problem.source.replace("Model(", "Inner(").replace("get_inputs", "a").replace("get_init_inputs", "b")
    source = c("from helper import Inner as ModelNew").replace("class ModelNew", "class Unused")
    verdict = free.verify(problem, pack(source, {"helper.py": helper})).verdict
    assert verdict.fault in (Fault.CHEATING, Fault.RUNTIME_ERROR), verdict


@pytest.mark.parametrize("attack", [name for name in CAUGHT if name.split()[0] in ("numpy", "text", "operators")])
def test_and_strict_says_it_before_anything_runs(problem: Problem, attack: str) -> None:
    report = backend("c").check(Candidate(CAUGHT[attack][0], "c"))
    assert report is not None
    assert report.fault is Fault.STATIC_VIOLATION
