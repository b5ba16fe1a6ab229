"""What a policy is told of backends `cpp` and `cuda`."""

from __future__ import annotations

from kbrl_async.kernels.backends import prompts
from kbrl_async.kernels.backends.checks.inline import RULES
from kbrl_async.kernels.backends.prompts import FRESH

_LOADER = "from torch.utils.cpp_extension import load_inline\n"
_SCALE = '''
SOURCE = r"""
{include}
torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    {body}
    return out;
}
"""
extension = load_inline(name="run", {arguments}, functions=["run"])

class ModelNew(nn.Module):
    def forward(self, x):
        return extension.run(x.contiguous())
```
'''
_INCLUDE = "#include <torch/extension.h>"
_CUDA_BODY = "scale<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());"
_CPP_BODY = """const float *from = x.data_ptr<float>();
    float *to = out.data_ptr<float>();
    for (long i = 0; i < x.numel(); i++) to[i] = 2.0f * from[i];"""
_HOST_GRIDS = {"gate": "(x.numel() + 255) / 256", "centre": "x.size(0)", "weighted": "(x.size(1) + 255) / 256"}
_HOST_OUT = dict.fromkeys(("gate", "centre"), "torch::empty_like(x)") | {
    "weighted": "torch::empty({x.size(1)}, x.options())"
}
_HOST_PASSED = {
    "gate": "x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), x.numel()",
    "centre": "x.data_ptr<float>(), out.data_ptr<float>(), x.size(0), x.size(1)",
    "weighted": "x.data_ptr<float>(), w.data_ptr<float>(), out.data_ptr<float>(), x.size(0), x.size(1)",
}
_HOST_PARAMETERS = {
    "gate": "torch::Tensor x, torch::Tensor y",
    "centre": "torch::Tensor x",
    "weighted": "torch::Tensor x, torch::Tensor w",
}


def _scale(include: str, body: str, arguments: str) -> str:
    text = _SCALE.replace("{include}", include).replace("{body}", body).replace("{arguments}", arguments)
    return prompts.HEAD + _LOADER + text


def _kernel(name: str, kernel: str, call: str, arguments: str) -> str:
    """A candidate over `load_inline`, whose C++ function is `launch`."""
    text = (
        f"{_INCLUDE}\n{kernel}\ntorch::Tensor launch({_HOST_PARAMETERS[name]}) {{\n"
        f"    auto out = {_HOST_OUT[name]};\n    {call}\n    return out;\n}}"
    )
    passed = {"gate": "x, y", "centre": "x", "weighted": "x, self.weight"}[name]
    made = f'extension = load_inline(name="launch_{name}", {arguments}, functions=["launch"])\n'
    contiguous = ", ".join(f"{a}.contiguous()" if a in ("x", "y") else a for a in passed.split(", "))
    return (
        f"{prompts.HEAD}{_LOADER}\n{prompts.source(text)}{made}\n"
        f"class ModelNew(nn.Module):\n{prompts.INIT[name]}\n    def forward(self, {prompts.ARGUMENTS[name]}):\n"
        f"        return extension.launch({contiguous})\n"
    )


def _cpp(name: str) -> str:
    return _kernel(name, prompts.LOOPS[name], f"run({_HOST_PASSED[name]});", "cpp_sources=SOURCE")


def _cuda(name: str) -> str:
    launch = f"run<<<{_HOST_GRIDS[name]}, 256>>>({_HOST_PASSED[name]});"
    declared = f'cpp_sources="torch::Tensor launch({_HOST_PARAMETERS[name]});", cuda_sources=SOURCE'
    return _kernel(name, prompts.IN_CUDA[name], launch, declared)


CONTRACTS = {
    "cpp": prompts.contract(
        "CPU kernels in C++",
        "that builds them with `load_inline(cpp_sources=…)`",
        _scale(_INCLUDE, _CPP_BODY, "cpp_sources=SOURCE"),
        "All arithmetic must happen in your C++ code; the library may do a sub-step, never the whole. "
        "Threads of your own can't be started; OpenMP and at::parallel_for can be used.\n" + FRESH + RULES,
    ),
    "cuda": prompts.contract(
        "CUDA kernels",
        "that builds them with `load_inline(cuda_sources=…)`",
        _scale(
            f"{_INCLUDE}\n" + prompts.SCALE_IN_CUDA.replace("{name}", "scale"),
            _CUDA_BODY,
            'cpp_sources="torch::Tensor run(torch::Tensor x);", cuda_sources=SOURCE',
        ),
        "Launch on the current stream. The library may do a sub-step, never the whole.\n" + FRESH + RULES,
    ),
}
SHOTS = {"cpp": prompts.shots(_cpp), "cuda": prompts.shots(_cuda)}
