"""Candidates that lean on ATen, bind in unusual ways, or take and give more than tensors."""

from __future__ import annotations

from benchmarks.verification.cuda_candidates.cases import Case

_KERNEL = """
__global__ void scale(const float* x, float* y, float by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = by * x[i];
}
static torch::Tensor scaled(const torch::Tensor& x, float by) {
  auto y = torch::empty_like(x);
  scale<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), by, x.numel());
  return y;
}
"""
_RUN = "torch::Tensor run(torch::Tensor x);"
_PAIR = "torch.randn(8, 16), torch.randn(16, 8)"

LIBRARY: list[Case] = [
    Case(
        "matmul_then_kernel",
        _KERNEL + "torch::Tensor run(torch::Tensor x, torch::Tensor y) { return scaled(torch::matmul(x, y), 2.0f); }",
        "torch::Tensor run(torch::Tensor x, torch::Tensor y);",
        call="extension.run(x, y)",
        reference="torch.matmul(x, y) * 2",
        inputs=_PAIR,
    ),
    Case(
        "ops_and_methods",
        _KERNEL
        + """
torch::Tensor run(torch::Tensor x) {
  auto flat = x.contiguous().view({-1}).reshape({x.size(0), x.size(1)});
  auto mean = flat.mean(1, /*keepdim=*/true);
  auto centred = at::sub(flat, mean);
  auto deviation = (centred * centred).sum({1}, true).sqrt().clamp_min(1e-3);
  return scaled((centred / deviation + 1.0 - 1).transpose(0, 1).contiguous(), 1.0f).t().clone();
}
""",
        _RUN,
        reference="(x - x.mean(1, True)) / ((x - x.mean(1, True)) ** 2).sum(1, True).sqrt().clamp_min(1e-3)",
    ),
    Case(
        "factories",
        _KERNEL
        + """
torch::Tensor run(torch::Tensor x) {
  auto options = torch::TensorOptions().dtype(torch::kFloat32).device(x.device());
  auto a = torch::zeros({x.size(0), x.size(1)}, options);
  auto b = torch::ones_like(x);
  auto c = torch::full({x.size(0), x.size(1)}, 0.5, x.options());
  auto d = torch::empty({2, 3}, torch::dtype(torch::kInt64).device(torch::kCUDA)).zero_().to(torch::kFloat32).sum();
  a.add_(b).mul_(c).fill_(1.0f);
  return scaled(x, 2.0f) * a + d;
}
""",
        _RUN,
    ),
    Case(
        "cat_stack_and_slices",
        _KERNEL
        + """
torch::Tensor run(torch::Tensor x) {
  auto halves = x.chunk(2, 1);
  auto joined = torch::cat({halves[0], halves[1]}, 1);
  auto both = torch::stack({joined, x}, 0);
  return scaled(both[0], 1.0f) + both.select(0, 1) + x.slice(0, 0, x.size(0)) - x.narrow(1, 0, x.size(1));
}
""",
        _RUN,
    ),
    Case(
        "max_with_indices",
        _KERNEL
        + """
torch::Tensor run(torch::Tensor x) {
  auto result = x.max(1);
  auto values = std::get<0>(result);
  auto softened = torch::softmax(x, 1).sum(1);
  return scaled(values.contiguous(), 1.0f) * softened;
}
""",
        _RUN,
        reference="x.max(1)[0]",
    ),
    Case(
        "functions_with_docs",
        _KERNEL + "torch::Tensor run(torch::Tensor x) { return scaled(x, 2.0f); }\n"
        "torch::Tensor other(torch::Tensor x) { return scaled(x, 3.0f); }",
        "torch::Tensor run(torch::Tensor x); torch::Tensor other(torch::Tensor x);",
        functions='{"run": "twice x", "other": "three times x"}',
        call="extension.other(x) - extension.run(x) + extension.run(x) / 2",
    ),
    Case(
        "module_by_hand",
        "#include <torch/extension.h>\n"
        + _KERNEL
        + """
torch::Tensor by(torch::Tensor x, double factor, int64_t times) { return scaled(x,
      static_cast<float>(factor * times)); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "scaling";
  m.def("run", &by, "x times a factor", py::arg("x"), py::arg("factor") = 2.0, py::arg("times") = 1);
}
""",
        "",
        functions="",
        call="extension.run(x) / 2 + extension.run(x, factor=0.5, times=2)",
    ),
    Case(
        "scalars_and_options",
        _KERNEL
        + """
torch::Tensor run(torch::Tensor x, double a, int64_t b, bool c, c10::optional<torch::Tensor> bias, std::string mode) {
  TORCH_CHECK(mode == "plain" || mode == "double", "unknown mode ", mode);
  auto y = scaled(x, static_cast<float>(a) * b * (c ? 1.0f : 0.0f));
  return bias.has_value() ? y + bias.value() : y;
}
""",
        "torch::Tensor run(torch::Tensor x, double a, int64_t b, bool c, c10::optional<torch::Tensor> bias, "
        "std::string mode);",
        call='extension.run(x, 1.0, 2, True, None, "plain")',
    ),
    Case(
        "several_results",
        _KERNEL
        + """
std::vector<torch::Tensor> run(torch::Tensor x) { return {scaled(x, 1.0f), scaled(x, 2.0f)}; }
std::tuple<torch::Tensor, int64_t> sized(torch::Tensor x) { return {scaled(x, 1.0f), x.numel()}; }
""",
        "std::vector<torch::Tensor> run(torch::Tensor x); std::tuple<torch::Tensor, int64_t> sized(torch::Tensor x);",
        functions='["run", "sized"]',
        call="extension.run(x)[0] + extension.sized(x)[0] * (extension.sized(x)[1] / x.numel())",
    ),
    Case(
        "list_of_tensors_and_shape",
        _KERNEL
        + """
torch::Tensor run(std::vector<torch::Tensor> xs, std::vector<int64_t> shape) {
  auto sum = torch::zeros(shape, xs[0].options());
  for (const auto& x : xs) sum += scaled(x, 1.0f);
  return sum;
}
""",
        "torch::Tensor run(std::vector<torch::Tensor> xs, std::vector<int64_t> shape);",
        call="extension.run([x, x], list(x.shape))",
    ),
    Case(
        "in_place_and_void",
        _KERNEL + "void run(torch::Tensor x, torch::Tensor out) { out.copy_(scaled(x, 2.0f)); }",
        "void run(torch::Tensor x, torch::Tensor out);",
        call="(lambda out: (extension.run(x, out), out)[1])(torch.empty_like(x))",
    ),
    Case(
        "scalar_result",
        _KERNEL + "double run(torch::Tensor x) { return scaled(x, 2.0f).sum().item<float>(); }",
        "double run(torch::Tensor x);",
        call="torch.full((), extension.run(x), device=x.device)",
        reference="x.sum() * 2",
    ),
    Case(
        "wrong_argument",
        _KERNEL + "torch::Tensor run(torch::Tensor x, int64_t n) { return scaled(x, n); }",
        "torch::Tensor run(torch::Tensor x, int64_t n);",
        call='extension.run(x, "two")',
        raises="incompatible function arguments",
    ),
    Case(
        "device_properties",
        "#include <ATen/cuda/CUDAContext.h>\n"
        + _KERNEL
        + """
torch::Tensor run(torch::Tensor x) {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK(properties->multiProcessorCount > 0, "no multiprocessors");
  return scaled(x, 2.0f);
}
""",
        _RUN,
    ),
    Case(
        "cublas",
        "#include <ATen/cuda/CUDAContext.h>\n#include <cublas_v2.h>\n"
        + _KERNEL
        + """
torch::Tensor run(torch::Tensor x, torch::Tensor y) {
  const int m = x.size(0), k = x.size(1), n = y.size(1);
  auto out = torch::empty({m, n}, x.options());
  const float alpha = 2.0f, beta = 0.0f;
  cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, m, k, &alpha, y.data_ptr<float>(), n, x.data_ptr<float>(), k, &beta,
              out.data_ptr<float>(), n);
  return scaled(out, 1.0f);
}
""",
        "torch::Tensor run(torch::Tensor x, torch::Tensor y);",
        call="extension.run(x, y)",
        reference="torch.matmul(x, y) * 2",
        inputs=_PAIR,
        extra='extra_ldflags=["-lcublas"]',
    ),
    Case(
        "full_headers_needed",
        "#include <torch/extension.h>\n"
        + _KERNEL
        + "torch::Tensor run(torch::Tensor x) { return scaled(torch::nn::functional::relu(x), 2.0f); }\n",
        _RUN,
        reference="torch.relu(x) * 2",
    ),
]
