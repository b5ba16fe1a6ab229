"""Candidates of backend `cpp`: the same bindings and operators, on the CPU."""

from __future__ import annotations

from benchmarks.verification.cuda_candidates.cases import Case

_LOOP = """
static torch::Tensor scaled(const torch::Tensor& x, float by) {
  auto y = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); i++) b[i] = by * a[i];
  return y;
}
"""

HOST: list[Case] = [
    Case(
        "host_loop",
        cpp=_LOOP + "torch::Tensor run(torch::Tensor x) { return scaled(x, 2.0f); }",
        extra='extra_cflags=["-O3"]',
    ),
    Case(
        "host_openmp",
        cpp="""
#include <omp.h>
torch::Tensor run(torch::Tensor x) {
  auto y = torch::empty_like(x);
  auto a = x.accessor<float, 2>(), b = y.accessor<float, 2>();
  #pragma omp parallel for
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) b[i][j] = 2 * a[i][j];
  return y;
}
""",
        extra='extra_cflags=["-O2", "-fopenmp", "-ffast-math"], extra_ldflags=["-fopenmp"]',
    ),
    Case(
        "host_dispatch",
        cpp="""
template <typename T> void twice(const T* x, T* y, int64_t n) { for (int64_t i = 0; i < n; i++) y[i] = x[i] + x[i]; }
torch::Tensor run(torch::Tensor x) {
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "twice", [&] {
    twice<scalar_t>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
  });
  return y;
}
""",
        inputs="torch.randn(4, 64).half()",
    ),
    Case(
        "host_operators",
        cpp=_LOOP
        + """
torch::Tensor run(torch::Tensor x) {
  auto y = torch::relu(x.matmul(x.t())) + torch::ones({x.size(0), x.size(0)}, x.options()) * 0.5;
  auto parts = y.chunk(2, 0);
  return scaled(torch::cat({parts[0], parts[1]}, 0).mean(1), 2.0f);
}
""",
        reference="(torch.relu(x @ x.t()) + 0.5).mean(1) * 2",
    ),
    Case(
        "host_module_by_hand",
        cpp=_LOOP
        + """
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("run", [](torch::Tensor x, double by) { return scaled(x, by); }, "scale", py::arg("x"), py::arg("by") = 2.0);
}
""",
        functions="",
    ),
    Case(
        "host_check_fails",
        cpp='torch::Tensor run(torch::Tensor x) { TORCH_CHECK(x.dim() == 3, "got ", x.sizes()); return x; }',
        raises="got [4, 64]",
    ),
    Case(
        "host_wrong_dtype",
        cpp="torch::Tensor run(torch::Tensor x) { return x.data_ptr<double>() ? x : x; }",
        raises="expected scalar type Double but found Float",
    ),
    Case(
        "host_not_implemented",
        cpp="torch::Tensor run(torch::Tensor x) { "
        'AT_DISPATCH_INTEGRAL_TYPES(x.scalar_type(), "bits", [&] {}); return x; }',
        raises="\"bits\" not implemented for 'Float'",
    ),
    Case(
        "host_wrong_count",
        cpp="torch::Tensor run(torch::Tensor x, int64_t n) { return x; }",
        raises="incompatible function arguments",
    ),
    Case(
        "host_operator_raises",
        cpp="torch::Tensor run(torch::Tensor x) { return x.view({7}); }",
        raises="shape '[7]' is invalid for input of size 256",
    ),
    Case("host_syntax_error", cpp="torch::Tensor run(torch::Tensor x) { return x }", compiles=False),
    Case("host_no_such_method", cpp="torch::Tensor run(torch::Tensor x) { return x.doubled(); }", compiles=False),
    Case("host_not_defined", cpp="torch::Tensor run(torch::Tensor x);", compiles=False),
]
