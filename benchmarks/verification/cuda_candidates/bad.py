"""Candidates that must not compile: an error of each kind that policies write."""

from __future__ import annotations

from benchmarks.verification.cuda_candidates.cases import Case

_ONE = "torch::Tensor run(torch::Tensor x);"
_GOOD = """
__global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}
"""
_BODY = "twice<<<1, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel()); return y; }"


def _bad(name: str, cuda: str, cpp: str = _ONE, functions: str = '["run"]', extra: str = "") -> Case:
    return Case(name, cuda, cpp, functions=functions, extra=extra, compiles=False)


_RUN = "torch::Tensor run(torch::Tensor x) { auto y = torch::empty_like(x); " + _BODY

BAD: list[Case] = [
    _bad("missing_semicolon", _GOOD.replace("threadIdx.x;", "threadIdx.x") + _RUN),
    _bad("missing_brace", _GOOD.rstrip().rstrip("}") + _RUN),
    _bad("missing_header", "#include <no/such/header.h>\n" + _GOOD + _RUN),
    _bad("undeclared_variable", _GOOD.replace("2.0f * x[i]", "factor * x[i]") + _RUN),
    _bad("undeclared_kernel", _GOOD.replace("void twice", "void thrice") + _RUN),
    _bad("wrong_template_arguments", "template <int N>" + _GOOD + _RUN.replace("twice<<<", "twice<float><<<")),
    _bad("type_mismatch", _GOOD + _RUN.replace("y.data_ptr<float>()", "y")),
    _bad("too_few_arguments", _GOOD + _RUN.replace(", x.numel())", ")")),
    _bad("const_violation", _GOOD.replace("y[i] =", "x[i] =") + _RUN),
    _bad("host_function_in_kernel", "float host(float v) { return v; }" + _GOOD.replace("x[i]", "host(x[i])") + _RUN),
    _bad("no_such_method", _GOOD + _RUN.replace("x.numel()", "x.number_of_elements()")),
    _bad("no_such_function", _GOOD + _RUN.replace("torch::empty_like", "torch::blank_like")),
    _bad("wrong_operator_arguments", _GOOD + _RUN.replace("torch::empty_like(x)", 'torch::softmax(x, "rows")')),
    _bad("function_not_defined", _GOOD),
    _bad("function_not_declared", _GOOD + _RUN, "", '["run"]'),
    _bad("declared_otherwise", _GOOD + _RUN, "torch::Tensor run(torch::Tensor x, int n);"),
    _bad("bound_name_is_unknown", _GOOD + _RUN, _ONE, '["run", "walk"]'),
    _bad(
        "too_much_shared_memory",
        _GOOD.replace(
            "int i =",
            "__shared__ float big[20000]; big[threadIdx.x] = n; __syncthreads(); y[0] = big[n % 256]; int i =",
        )
        + _RUN,
    ),
    _bad("bad_ptx", _GOOD.replace("2.0f * x[i];", '2.0f; asm volatile("no.such.instruction;");') + _RUN),
    _bad("defined_twice", _GOOD + _GOOD + _RUN),
    _bad("defined_in_both_halves", _GOOD + _RUN, "torch::Tensor run(torch::Tensor x) { return x; }"),
    _bad(
        "stream_without_header",
        _GOOD + _RUN.replace("<<<1, 256>>>", "<<<1, 256, 0, at::cuda::getCurrentCUDAStream()>>>"),
    ),
    _bad(
        "guard_without_header",
        "#include <c10/cuda/CUDAStream.h>\n"
        + _GOOD
        + _RUN.replace("auto y", "c10::cuda::CUDAGuard g(x.device()); auto y"),
    ),
    _bad("macro_fails", "#error this candidate gives up\n" + _GOOD + _RUN),
    _bad("static_assertion", _GOOD + 'static_assert(sizeof(float) == 8, "floats are doubles");' + _RUN),
    _bad("python_in_cuda", _GOOD.replace("float* y", "y: torch.Tensor") + _RUN),
    _bad(
        "half_operators_are_off",
        _GOOD.replace("2.0f * x[i]", "__half2float(__float2half(x[i]) + __float2half(x[i]))") + _RUN,
    ),
    _bad(
        "intrinsic_of_a_newer_gpu",
        _GOOD.replace("int i =", 'asm volatile("tcgen05.wait::ld.sync.aligned;"); int i =') + _RUN,
    ),
]
