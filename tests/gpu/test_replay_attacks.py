"""A white-box attacker against replays on a GPU: what kernels can still do in a player, and what host code can do to
the recorder that serves others after it.

Each test asserts which rule fires, or that nothing is gained; and that the next candidate is judged as before.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.verify import Bench
from protocols.records import REPLAYED, BenchReport, Candidate, Fault, Problem
from tests.gpu.bench_candidates import ADD, GOOD, INLINE, MATMUL, nvrtc

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
Hosted = Callable[..., BenchReport]
VALUE = "x[i] * 2 + y[i] + shift"


@pytest.fixture
def hosted(gpu_bench: Bench, gpu_builder: Builder) -> Hosted:
    """What was built of a kernel, with `top` as more host code, whatever static checks say of that."""

    def run(top: str, body: str = GOOD, before: str = "", *, timing: bool = False) -> BenchReport:
        posed, honest = Problem("L1/01_test", 1, "test", ADD), with_variables(body, before)
        built = gpu_builder.build(Candidate(honest, "cuda-nvrtc"), posed)
        assert built.fault is Fault.OK, built.message
        found = {key: gpu_builder.store.path(address) for key, address in built.artifacts.items()}
        paths = {key: path for key, path in found.items() if path is not None}
        return gpu_bench.evaluate(posed, Candidate(top + honest, "cuda-nvrtc"), paths, timing=timing)

    return run


def with_variables(body: str, before: str) -> str:
    return nvrtc(body).replace('extern "C"', f'{before}\nextern "C"')


def is_replayed(report: BenchReport) -> bool:
    return (report.verdict.fault, report.verdict.trust) == (Fault.OK, REPLAYED)


def speedup(report: BenchReport) -> float:
    assert is_replayed(report), report.verdict
    assert report.timing is not None
    return report.timing.speedup


# ---- what a kernel can do in a player --------------------------------------------------------------------------------

SEEN = """
__device__ unsigned long long seen[64][3]; __device__ int known, launches;
"""
LEARNS = f"""
if (i == 0) {{
    int k = 0;
    while (k < known && seen[k][0] != (unsigned long long)x) k++;
    if (k == known && k < 64) {{
        seen[k][0] = (unsigned long long)x; seen[k][1] = (unsigned long long)y; seen[k][2] = (unsigned long long)out;
        known = k + 1;
    }}
    atomicAdd(&launches, 1);
}}
if (i < n) out[i] = {VALUE};
if (launches > FROM && i < n) for (int k = 0; k < known; k++)
    ((float *)seen[k][2])[i] = ((const float *)seen[k][0])[i] * 2 + ((const float *)seen[k][1])[i] + shift;
"""


@pytest.mark.parametrize("first", [2, 12, 40])
def test_a_kernel_that_learns_other_slots_places_forgets_them(judge: Judge, first: int) -> None:
    """Variables are put back before each call: it knows what was in the same timed run, and gains nothing."""
    source = with_variables(LEARNS.replace("FROM", str(first)).replace("\n", " "), SEEN)
    plain = speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True))
    assert speedup(judge(ADD, source, "cuda-nvrtc", timing=True)) < 1.1 * plain


def test_a_chain_can_not_be_answered_by_its_first_forward(judge: Judge) -> None:
    """It would know a chain's begin by the clock, and the places of its slots by then."""
    body = LEARNS.replace("FROM", "30").replace("\n", " ")
    skip = 'unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));'
    body = f"{skip} if (launches > 31 && t - last < 200000) return; if (i == 0) last = t; {body}"
    source = with_variables(body, SEEN + "__device__ unsigned long long last;")
    plain = speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True))
    assert speedup(judge(ADD, source, "cuda-nvrtc", timing=True)) < 1.1 * plain


@pytest.mark.alone
def test_a_kernel_that_is_right_of_usual_inputs_alone_once_it_has_counted_is_wrong(judge: Judge) -> None:
    """From its third forward of one timed run on: none that is checked by itself has one. Beside others a timed run may
    be one forward.
    """
    body = "if (i == 0) atomicAdd(&launches, 1); float a = i < n ? x[i] : 0, b = i < n ? y[i] : 0; "
    body += "if (launches > 2) a = fminf(fmaxf(a, -8), 8), b = fminf(fmaxf(b, -8), 8); "
    body += "if (i < n) out[i] = a * 2 + b + shift;"
    assert is_replayed(judge(ADD, with_variables(body.replace("> 2", "> 500"), SEEN), "cuda-nvrtc", timing=True))
    verdict = judge(ADD, with_variables(body, SEEN), "cuda-nvrtc", timing=True).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "wrong_when_timed"), verdict


@pytest.mark.alone
@pytest.mark.parametrize(("calls", "fault"), [(3, Fault.TIMEOUT), (25, Fault.OK)])
def test_a_kernel_that_ends_no_more_after_some_calls_is_killed(judge: Judge, calls: int, fault: Fault) -> None:
    """Sixteen calls are one timed run, fewer where others share the GPU and the reference seems long; its count starts
    anew in each. Not volatile, compilers leave such a loop out.
    """
    endless = f"if (launches > {calls}) while (((volatile const float *)x)[0] != 12345.678f) {{}}"
    body = f"if (i == 0) atomicAdd(&launches, 1); {endless} {GOOD}"
    found = judge(ADD, with_variables(body, SEEN), "cuda-nvrtc", timing=True).verdict
    assert found.fault is fault, found
    assert is_replayed(judge(ADD, nvrtc(), "cuda-nvrtc"))


WRITES = {
    "low": "*(volatile float *)4096 = 1;",
    "behind its output": "((volatile float *)out)[1L << 34] = 1;",
    "before its input": "((volatile float *)x)[-(1L << 34)] = 1;",
    "on the host": "*(volatile float *)0x7f0000000000 = 1;",
}


@pytest.mark.parametrize("where", WRITES)
def test_a_kernel_that_writes_elsewhere_faults_and_harms_nobody(judge: Judge, where: str) -> None:
    before = speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True))
    verdict = judge(ADD, nvrtc(f"{GOOD} if (i == 0) {{ {WRITES[where]} }}"), "cuda-nvrtc").verdict
    assert verdict.fault is Fault.ILLEGAL_ACCESS, verdict
    assert speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True)) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("place", [0x302000000, 0x304000000, 0x320000000, 0x7F0000000000, 0x7FFF00000000])
def test_what_the_driver_may_have_there_is_not_worth_writing_to(judge: Judge, place: int) -> None:
    """Where drivers put their own: it faults, or harms nobody who is judged by the same player."""
    before = speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True))
    body = f"if (i < 65536) ((volatile int *){place}L)[i] = -1; {GOOD}"
    verdict = judge(ADD, nvrtc(body), "cuda-nvrtc", timing=True).verdict
    assert verdict.fault in (Fault.OK, Fault.ILLEGAL_ACCESS, Fault.INCORRECT), verdict
    assert speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True)) == pytest.approx(before, rel=0.2)


WEIGHTED = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2048, 2048))
        self.shift = shift

    def forward(self, x):
        return x * 2 + self.weight + self.shift

def get_inputs():
    return [torch.randn(2048, 2048)]

def get_init_inputs():
    return [1.5]
"""


def weighted(load: str) -> str:
    source = nvrtc(f"if (i < n) {{ float w; {load} out[i] = x[i] * 2 + w + shift; }}")
    source = source.replace(
        "self.shift = shift", "self.shift = shift\n        self.weight = nn.Parameter(torch.empty(2048, 2048))"
    )
    return source.replace("forward(self, x, y)", "forward(self, x)").replace("(x, y, out", "(x, self.weight, out")


def test_weights_that_are_kept_in_l2_are_not_warm(judge: Judge) -> None:
    kept = (
        'unsigned long long p; asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p)); '
        'asm volatile("ld.global.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(w) : "l"(y + i), "l"(p));'
    )
    plain = speedup(judge(WEIGHTED, weighted("w = y[i];"), "cuda-nvrtc", timing=True))
    assert speedup(judge(WEIGHTED, weighted(kept), "cuda-nvrtc", timing=True)) < 1.08 * plain


def test_inputs_of_the_next_forward_fetched_ahead_gain_next_to_nothing(judge: Judge) -> None:
    body = LEARNS.partition("if (launches")[0].replace("\n", " ")
    ahead = "for (int k = 0; k < known; k++) if (i % 32 == 0 && i < n) "
    ahead += 'asm volatile("prefetch.global.L2 [%0];" :: "l"((const float *)seen[k][0] + i));'
    plain = speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True))
    assert speedup(judge(ADD, with_variables(body + ahead, SEEN), "cuda-nvrtc", timing=True)) < 1.1 * plain


@pytest.mark.parametrize(
    "body",
    [
        f'if (i < 4096) printf("%d", i); {GOOD}',
        f"if (i % 4096 == 0) malloc(64); {GOOD}",
        f"{GOOD} __nanosleep(100);",
        f'{GOOD} unsigned s; asm volatile("mov.u32 %0, %smid;" : "=r"(s)); if (s > 4096) out[0] = s;',
    ],
    ids=["printf", "device heap", "sleeps", "looks where it runs"],
)
def test_odd_kernels_are_no_frauds(judge: Judge, body: str) -> None:
    assert judge(ADD, nvrtc(body), "cuda-nvrtc", timing=True).verdict.fault is Fault.OK


# ---- forwards that know their inputs by place ------------------------------------------------------------------------

PRODUCT = MATMUL.replace("2048", "256")
BY_PLACE = '''
import torch
import torch.nn as nn
from kbrl_async.launch import cuda_kernel

SOURCE = r"""
extern "C" __global__ void product(const float *x, const float *y, const float *known, float *out, int own) {
    int row = blockIdx.x, column = threadIdx.x;
    float sum = known[row * 256 + column];
    if (own) { sum = 0; for (int k = 0; k < 256; k++) sum += x[row * 256 + k] * y[k * 256 + column]; }
    out[row * 256 + column] = sum;
}
"""

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = cuda_kernel(SOURCE, "product")
        self.first = None
        self.zeros = torch.zeros(256, 256, device="cuda")

    def forward(self, x, y):
        self.first = self.first or x.data_ptr()
        own = int(x.data_ptr() == self.first) if LIES else 1
        out = torch.empty_like(x)
        BODY
        self.kernel[256, 256](x, y, known, out, own)
        return out
'''
ANOTHER = "if not own: return torch.mm(x, y)\n        known = x"
THE_SAME = "known = torch.mm(self.zeros if own else x, y)"


@pytest.mark.parametrize(("body", "rule"), [(ANOTHER, "no_own_kernel"), (THE_SAME, "decoy_kernel")])
def test_what_works_itself_over_the_first_inputs_alone_is_no_own_work(judge: Judge, body: str, rule: str) -> None:
    """Over the others the library does: by other steps, or by the same on something else."""

    def judged(lies: bool) -> BenchReport:
        source = BY_PLACE.replace("BODY", body).replace("LIES", str(lies))
        return judge(PRODUCT, source, "cuda-nvrtc", timing=True)

    assert is_replayed(judged(False)), "who works itself over all of them"
    found = judged(True).verdict
    assert (found.fault, found.rule) == (Fault.CHEATING, rule), found


LARGEST = ADD.replace("x * 2 + y + self.shift", "torch.argmax(x, dim=-1)")
COPIES = """
import torch
import torch.nn as nn
from kbrl_async.launch import cuda_kernel

SOURCE = 'extern "C" __global__ void copied(const long long *x, long long *y) { y[threadIdx.x] = x[threadIdx.x]; }'

class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.kernel = cuda_kernel(SOURCE, "copied")

    def forward(self, x, y):
        found = torch.argmax(x, dim=-1)
        out = torch.empty_like(found)
        self.kernel[1, 1024](found, out)
        return out
"""


def test_a_kernel_that_copies_the_librarys_places_is_a_decoy(judge: Judge) -> None:
    found = judge(LARGEST, COPIES, "cuda-nvrtc", timing=True).verdict
    assert (found.fault, found.rule) == (Fault.CHEATING, "decoy_kernel"), found


JOINS = '''
import torch
import torch.nn as nn
from kbrl_async.launch import cuda_kernel

SOURCE = r"""
extern "C" __global__ void joined(const float *a, const float *b, float *out) {
    int half = 128 * 256, i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = i < half ? a[i] : b[i - half];
}
"""

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = cuda_kernel(SOURCE, "joined")

    def forward(self, x, y):
        a = torch.mm(x[:128], y)
        gap = torch.empty(4096, device="cuda")
        b = torch.mm(x[128:], y)
        out = torch.empty_like(x)
        self.kernel[256, 256](a, b, out)
        return out
'''


def test_a_kernel_that_joins_the_librarys_halves_is_a_decoy(judge: Judge) -> None:
    found = judge(PRODUCT, JOINS, "cuda-nvrtc", timing=True).verdict
    assert (found.fault, found.rule) == (Fault.CHEATING, "decoy_kernel"), found


# ---- what host code can do to its recorder ---------------------------------------------------------------------------

LIE = """
import sys, msgspec
from kbrl_async.kernels.verify import recording
child = sys.modules["kbrl_async.kernels.verify.cuda.record.child"]
honest = child.Recorder._written

def each(found, **more):
    changed = [replace(one, **{key: value(one) for key, value in more.items()}) for one in found.forwards]
    return replace(found, forwards=changed)

def lie(self, candidate, scribe, start):
    child.Recorder._written = honest
    found = honest(self, candidate, scribe, start)
    return CHANGED

replace = msgspec.structs.replace
child.Recorder._written = lie
"""
OUTPUT = "each(found, outputs=lambda one: [replace(one.outputs[0], {})])"
NODES = "each(found, nodes=lambda one: {})"
LIES = {
    "an output without end": OUTPUT.format("shape=(1 << 40,), strides=(0,)"),
    "a quantised output": OUTPUT.format("dtype='qint8'"),
    "an output behind all": OUTPUT.format("place=found.used"),
    "an image upside down": "replace(found, image=[(4096, 0)])",
    "more than there is": "replace(found, used=1 << 62)",
    "a kernel of others": NODES.format("[replace(node, artifact='0' * 64) for node in one.nodes]"),
    "a kernel by a library's name": NODES.format("[replace(node, name='cublasLt') for node in one.nodes]"),
    "more arguments": NODES.format("[replace(node, arguments=[*node.arguments, b'12345678']) for node in one.nodes]"),
    "a node that waits for itself": NODES.format("[replace(node, after=[0]) for node in one.nodes]"),
    "a fill across the arena's end": NODES.format("[recording.Memset(found.used - 4, 0, 4, 2, 1, 0)]"),
    "no forward": "replace(found, forwards=[])",
    "nonsense": "'nonsense'",
    "twelve megabytes of it": "replace(found, refused='', image=[(0, 0)] * 3000000)",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_forged_recording_is_not_done_and_ends_nobody(hosted: Hosted, judge: Judge, lie: str) -> None:
    verdict = hosted(LIE.replace("CHANGED", LIES[lie])).verdict
    assert verdict.fault in (Fault.OK, Fault.INCORRECT), verdict
    assert verdict.fault is Fault.INCORRECT or verdict.trust_reason, verdict
    assert is_replayed(judge(ADD, nvrtc(), "cuda-nvrtc"))


META = "one.outputs[0]"
OPERATORS = {
    "asks for more than there is": (
        'recording.Operator("aten::full", ["L", [["L", [["L", [["V", 1 << 42]]], ["V", 1.0]]], ["D", {}]]], [], '
        + f"[{META}])"
    ),
    "reads beyond": (
        'recording.Operator("aten::take", ["L", [["L", [["T", 0], ["T", 1]]], ["D", {}]]], '
        f"[{META}, replace({META}, dtype='int64', shape=(8,), strides=(1,))], "
        f"[replace({META}, shape=(8,), strides=(1,))])"
    ),
    "of no device": 'recording.Operator("aten::eye", ["L", [["L", [["V", 1 << 20]]], ["D", {}]]], [], ' + f"[{META}])",
    "gives another tensor": (
        'recording.Operator("aten::full", ["L", [["L", [["L", [["V", 8]]], ["V", 1.0]]], ["D", {}]]], [], '
        + f"[{META}])"
    ),
    "with the wrong arguments": f'recording.Operator("aten::mm", ["L", [["L", []], ["D", {{}}]]], [], [{META}])',
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("what", OPERATORS)
def test_an_operator_that_fails_in_a_player_ends_nobody(hosted: Hosted, judge: Judge, what: str, is_late: bool) -> None:
    """Also where the first slot, which is tried, has none."""
    changed = NODES.format(f"[{OPERATORS[what]}, *one.nodes]")
    if is_late:
        changed = f"replace(found, forwards=[found.forwards[0], *{changed}.forwards[1:]])"
    verdict = hosted(LIE.replace("CHANGED", changed)).verdict
    assert verdict.fault is not Fault.CHEATING, verdict
    assert is_replayed(judge(ADD, nvrtc(), "cuda-nvrtc"))


SLOWER = """
import sys, msgspec
forward = sys.modules["kbrl_async.kernels.verify.cuda.record.forward"]
if not hasattr(forward, "mine"):
    forward.mine = honest = forward.Scribe.write
    served = []

    def slower(self, one):
        made = honest(self, one)
        served.append(made)
        if len(served) < 40 or "candidate" not in sys.modules:
            return made
        nodes = []
        for turn in range(8):
            nodes += [msgspec.structs.replace(node, after=[len(nodes) - 1] if nodes else []) for node in made.nodes]
        return msgspec.structs.replace(made, nodes=nodes)

    forward.Scribe.write = slower
"""
WRONGER = """
import sys, msgspec
forward = sys.modules["kbrl_async.kernels.verify.cuda.record.forward"]
if not hasattr(forward, "mine"):
    forward.mine = honest = forward.Scribe.write
    mine = []

    def wronger(self, one):
        made = honest(self, one)
        mine.append(made)
        return made if len(mine) < 40 else msgspec.structs.replace(made, nodes=[])

    forward.Scribe.write = wronger
"""


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_who_spoils_the_recorder_makes_nobody_else_wrong(
    hosted: Hosted, judge: Judge, gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Of doubts, as many are decided alone."""
    monkeypatch.setattr(gpu_bench, "options", msgspec.structs.replace(gpu_bench.options, alone_share=share))
    assert hosted(WRONGER).verdict.fault is Fault.OK
    for _ in range(5):
        assert is_replayed(judge(ADD, nvrtc(), "cuda-nvrtc"))


def test_who_spoils_the_recorder_makes_nobody_else_slower(hosted: Hosted, judge: Judge) -> None:
    """In a group of answers to one problem, the slower others are, the more one's own is worth."""
    before = speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True))
    assert hosted(SLOWER).verdict.fault is Fault.OK
    after = [speedup(judge(ADD, nvrtc(), "cuda-nvrtc", timing=True)) for _ in range(5)]
    assert min(after) == pytest.approx(before, rel=0.2)


JUNK = (
    '__attribute__((section(".nv_fatbin"), used)) static const unsigned junk[16] = {0xBA55ED50u, 0x00100001u, 48u, 0u, '
)


@pytest.mark.parametrize("body", ["0x464C457Fu, 0x00010102u", "0u", "0xBA55ED50u, 0x00100001u, 0xFFFFFFF0u, 0u"])
def test_machine_code_that_is_none_ends_nobody(judge: Judge, body: str) -> None:
    source = INLINE.replace("#include <torch/extension.h>", f"#include <torch/extension.h>\n{JUNK}{body}}};")
    verdict = judge(ADD, source, "cuda").verdict
    assert verdict.fault is Fault.OK, verdict
    assert is_replayed(judge(ADD, nvrtc(), "cuda-nvrtc"))
