"""Each format, from samples that have its shape: what is taken, what is left out and why, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.importing import Found, read
from kbrl_async.kernels.problems.contract import parse_problem
from kbrl_async.kernels.problems.model_contract import arguments, load

MODEL = """import torch
import torch.nn as nn


class {name}(nn.Module):
    def __init__(self{init}):
        super().__init__()

    def forward(self, x{extra}):
        return torch.relu(x) * 2


def get_inputs({inputs}):
    return [torch.randn({shape})]
"""
INITS = "\n\ndef get_init_inputs():\n    return []\n"


def model(
    name: str = "Model", init: str = "", extra: str = "", inputs: str = "", shape: str = "4, 8", inits: bool = True
) -> str:
    text = MODEL.format(name=name, init=init, extra=extra, inputs=inputs, shape=shape)
    return text + (INITS if inits else "")


def outputs_of(found: Found) -> torch.Tensor:
    """It is a problem of our contract, and runs."""
    assert not found.left_out
    module = load("imported", parse_problem(found.source, f"L1/{found.name}").source)
    args, words = arguments(module.get_init_inputs())
    out = module.Model(*args, **words)(*module.get_inputs())
    assert isinstance(out, torch.Tensor)
    return out


def test_robust_kbench_gives_get_inputs_and_the_constructor_what_its_configuration_says(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "level_2" / "task_3"
    task.mkdir(parents=True)
    text = model(
        init=", features=1", extra=", fn=None", inputs="rows=1, features=1", shape="rows, features", inits=False
    )
    (task / "func_forward.py").write_text(text)
    parts = {
        "single_input_configs": [{"rows": 3}],
        "single_shared_configs": [{"features": 5}],
        "single_init_configs": [{}],
    }
    (task / "config_forward.json").write_text(json.dumps(parts))
    name, found = read(str(tmp_path))
    (one,) = found
    assert (name, one.level) == ("robust-kbench", 2)
    assert outputs_of(one).shape == (3, 5)


def test_multikernelbench_takes_the_largest_group_of_the_json_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "reference" / "index"
    folder.mkdir(parents=True)
    text = """import json
import os

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2


def get_input_groups():
    with open(os.path.join(os.path.dirname(__file__), "relu.json"), "r") as file:
        cases = [json.loads(line) for line in file if line.strip()]
    return [[torch.randn(case["inputs"][0]["shape"])] for case in cases]


def get_init_inputs():
    return []
"""
    (folder / "relu.py").write_text(text)
    lines = [{"inputs": [{"name": "x", "shape": shape}]} for shape in ([3], [7, 9], [0, 1000])]
    (folder / "relu.json").write_text("\n".join(map(json.dumps, lines)))
    (folder / "plain.py").write_text(model())
    (folder / "alone.py").write_text(text)
    name, found = read(str(tmp_path))
    alone, plain, relu = found
    assert name == "multikernelbench"
    assert outputs_of(relu).shape == (7, 9)
    assert outputs_of(plain).shape == (4, 8)
    assert alone.left_out == "no JSON beside it"


@pytest.mark.parametrize(
    "row",
    [
        {"python_code": model("GetMask"), "entry_point": "GetMask", "licenses": ["MIT"], "repo_link": "https://x"},
        {"pytorch_code": model(inits=False)},
        {"reward_model": {"ground_truth": model("Net")}, "extra_info": {"entry_point": "Net", "uuid": 7}},
        {"code": model(), "level": 2, "name": "3_Relu.py"},
    ],
)
def test_rows_of_data_sets_are_read_by_their_columns(tmp_path: Path, row: dict[str, object]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    name, found = read(str(tmp_path / "rows.jsonl"))
    (one,) = found
    assert name == "rows"
    assert outputs_of(one).shape == (4, 8)
    assert (one.license, one.origin) == (("MIT", "https://x") if "licenses" in row else ("", "rows.jsonl:1"))
    assert one.level == row.get("level", 1)


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    table = pyarrow.table({"python_code": [model("A"), model("B")], "entry_point": ["A", "B"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert [outputs_of(one).shape for one in read(str(tmp_path))[1]] == [(4, 8), (4, 8)]


def test_a_row_that_is_none_is_left_out_with_a_reason_and_the_next_is_read(tmp_path: Path) -> None:
    rows = ["{", "[1]", json.dumps({"x": 1}), json.dumps({"code": "def ("}), json.dumps({"code": model()})]
    rows.insert(4, json.dumps({"code": model("A"), "entry_point": "class"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    reasons = [one.left_out for one in read(str(tmp_path / "rows.jsonl"))[1]]
    assert reasons == [
        "a line is not JSON",
        "a line is not JSON",
        "no source in it",
        "does not parse",
        "entry point is no name",
        "",
    ]


def definition(**changes: object) -> dict[str, object]:
    return {
        "name": "gemm",
        "axes": {"M": {"type": "var"}, "K": {"type": "const", "value": 8}},
        "inputs": {"A": {"shape": ["M", "K"], "dtype": "float32"}, "s": {"shape": None, "dtype": "float32"}},
        "reference": "import torch\n\ndef run(A, s):\n    return A * s",
    } | changes


def test_flashinfer_trace_binds_axes_and_scalars_by_the_first_workload(tmp_path: Path) -> None:
    for folder in ("definitions/gemm", "workloads/gemm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "definitions/gemm/gemm.json").write_text(json.dumps(definition()))
    integers = {"A": {"shape": ["M"], "dtype": "int32"}}
    (tmp_path / "definitions/gemm/index.json").write_text(json.dumps(definition(inputs=integers)))
    (tmp_path / "definitions/gemm/none.json").write_text("[]")
    workload = {"axes": {"M": 5}, "inputs": {"A": {"type": "random"}, "s": {"type": "scalar", "value": 3.0}}}
    (tmp_path / "workloads/gemm/gemm.jsonl").write_text(json.dumps({"definition": "gemm", "workload": workload}))
    name, found = read(str(tmp_path))
    gemm, index, none = found
    assert name == "flashinfer-trace"
    assert outputs_of(gemm).shape == (5, 8)
    assert index.left_out == "integers whose meaning the definition does not say"
    assert none.left_out == "is no definition"


def test_tritonbench_draws_new_values_of_the_shapes_that_its_test_calls_with(tmp_path: Path) -> None:
    text = f"""import torch


def scaled(x, factor, keep=True):
    return x * factor

{"#" * 60}
import torch

def test_scaled():
    results = {{}}
    a = torch.tensor([[1.0, -2.0]], device='cuda')
    results["1"] = scaled(a, 2.0, keep=False)
    return results
"""
    (tmp_path / "scaled.py").write_text(text)
    (tmp_path / "bare.py").write_text(text.partition("#")[0] + "#" * 60 + "\n")
    name, found = read(str(tmp_path))
    bare, scaled = found
    assert name == "tritonbench"
    assert bare.left_out == "no function, or no test of it"
    assert outputs_of(scaled).shape == (1, 2)
    assert not torch.equal(outputs_of(scaled), outputs_of(scaled))


def test_plain_modules_and_functions_with_example_inputs_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        model("Net").partition("def get_inputs")[0] + "example_inputs = (torch.ones(2, 3),)\n"
    )
    (tmp_path / "b.py").write_text(
        "def f(x):\n    return x + 1\n\n\ndef example_inputs():\n    import torch\n\n    return [torch.ones(5)]\n"
    )
    (tmp_path / "c.py").write_text("def f(x):\n    return x\n")
    name, found = read(str(tmp_path))
    net, function, bare = found
    assert name == "modules"
    assert outputs_of(net).shape == (2, 3)
    assert outputs_of(function).tolist() == [2.0] * 5
    assert bare.left_out == "no get_inputs and no example_inputs"


def test_a_place_that_is_none_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="holds no problems of a known format"):
        read(str(tmp_path))
    with pytest.raises(ProblemError, match="there is no"):
        read(str(tmp_path / "nothing"))
    with pytest.raises(ProblemError, match="no format 'x'"):
        read(str(tmp_path), "x")
