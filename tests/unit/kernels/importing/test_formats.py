"""Each format, from samples that have its shape: what is taken, what is left out and why, and that it runs."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.importing import Found, read
from kbrl_async.kernels.problems.contract import parse_problem
from kbrl_async.kernels.problems.declared import declared
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
        {"reward_model": json.dumps({"ground_truth": model("Net")}), "extra_info": json.dumps({"entry_point": "Net"})},
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


def test_only_the_rows_own_class_is_renamed_and_the_helpers_of_its_finder_are_there(tmp_path: Path) -> None:
    text = model("Upsample", init=", config").replace("super().__init__()", "super().__init__(); assert config.a == 1")
    text = text.replace("torch.relu(x)", "nn.Upsample(scale_factor=1)(x[None])[0]")
    text = "from _paritybench_helpers import _mock_config\n" + text.replace("x[None]", "x[None, :]")
    text = text.replace("return []", "return [[], {'config': _mock_config(a=1)}]")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"python_code": text, "entry_point": "Upsample"}) + "\n")
    (one,) = read(str(tmp_path))[1]
    assert outputs_of(one).shape == (4, 8)


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


def trace(place: Path, workloads: list[dict[str, object]], **definitions: dict[str, object]) -> list[Found]:
    for folder in ("definitions/gemm", "workloads/gemm"):
        (place / folder).mkdir(parents=True)
    for stem, one in definitions.items():
        (place / f"definitions/gemm/{stem}.json").write_text(json.dumps(one))
    lines = [json.dumps({"definition": "gemm", "workload": workload}) for workload in workloads]
    (place / "workloads/gemm/gemm.jsonl").write_text("\n".join(lines))
    name, found = read(str(place))
    assert name == "flashinfer-trace"
    return list(found)


def gemm_at(rows: int) -> dict[str, object]:
    return {"axes": {"M": rows}, "inputs": {"A": {"type": "random"}, "s": {"type": "scalar", "value": 3.0}}}


def test_workloads_of_flashinfer_trace_are_workloads_and_the_largest_is_the_usual_one(tmp_path: Path) -> None:
    integers = {"A": {"shape": ["M"], "dtype": "int32"}}
    (gemm, index) = trace(
        tmp_path, [gemm_at(5), gemm_at(3), gemm_at(5)], gemm=definition(), index=definition(inputs=integers)
    )
    assert outputs_of(gemm).shape == (5, 8)
    rows = declared(gemm.source).workloads
    assert [(row.shape, row.weight) for row in rows] == [({"M": 3, "s": 3.0}, 1.0), ({"M": 5, "s": 3.0}, 2.0)]
    assert index.left_out == "integers whose meaning the definition does not say"


def test_what_is_no_definition_of_flashinfer_trace_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "definitions/x").mkdir(parents=True)
    (tmp_path / "definitions/x/none.json").write_text("[]")
    assert [one.left_out for one in read(str(tmp_path))[1]] == ["is no definition"]


PAGED: dict[str, object] = {
    "axes": {"batch_size": {"type": "var"}, "len_indptr": {"type": "var"}, "num_kv_indices": {"type": "var"},
             "num_pages": {"type": "const", "value": 7}},
    "constraints": ["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
    "inputs": {"kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
               "kv_indices": {"shape": ["num_kv_indices"], "dtype": "int32"}},
    "reference": "import torch\n\ndef run(offsets, pages):\n    return torch.cat([offsets, pages]).float()",
}  # fmt: skip


def test_integers_of_flashinfer_trace_are_drawn_by_what_their_names_mean(tmp_path: Path) -> None:
    (one,) = trace(tmp_path, [], gemm=PAGED)
    out = outputs_of(one)
    offsets, pages = out[:9], out[9:]
    assert (int(offsets[0]), int(offsets[-1]), len(pages)) == (0, 64, 64)
    assert (offsets.diff() >= 0).all()
    assert pages.min() >= 0
    assert pages.max() < 7


def test_flashinfer_trace_calls_by_names_and_has_tensors_of_no_dimension(tmp_path: Path) -> None:
    inputs = {"scale": {"shape": [], "dtype": "float32"}, "x": {"shape": ["M"], "dtype": "float32"}}
    reference = "def run(x, scale):\n    return x[0] * 0 + scale + scale.dim()"
    (one,) = trace(tmp_path, [], gemm=definition(inputs=inputs, reference=reference))
    assert float(outputs_of(one)) == 0.125


HELPER = "def _one(x):\n    return 1\n\n\n"


@pytest.mark.parametrize(
    ("reference", "named"),
    [
        (HELPER + "def scaled(s, A):\n    return A * s * _one(A)", {}),
        (HELPER.replace("_", "") + "def gemm(s, A):\n    return A * s * one(A)", {}),
        (HELPER.replace("_", "") + "def scaled(s, A):\n    return A * s", {"entry_point": "main.py::scaled"}),
        ("def scaled(s, A):\n    return A * s\n\n\ndef get_inputs():\n    return []", {}),
        ("class Gemm:\n    def __call__(self, A, s):\n        return A * s\n\n\nrun = Gemm()", {}),
    ],
)
def test_a_reference_of_flashinfer_trace_may_have_another_name_than_run(
    tmp_path: Path, reference: str, named: dict[str, object]
) -> None:
    (one,) = trace(tmp_path, [gemm_at(5)], gemm=definition(reference=reference, **named))
    assert one.left_out == ""
    assert outputs_of(one).shape == (5, 8)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("def a(A, s):\n    return A\n\ndef b(A, s):\n    return s", "several functions in its reference, none named"),
        ("", "without a reference"),
        (None, "without a reference"),
        ("import torch", "without a reference"),
        ("def run(", "does not parse"),
    ],
)  # fmt: skip
def test_what_has_no_one_function_is_left_out_and_says_so(tmp_path: Path, reference: str | None, reason: str) -> None:
    (one,) = trace(tmp_path, [], gemm=definition(reference=reference))
    assert one.left_out == reason


@pytest.mark.parametrize("path", ["blob/kept.safetensors", "../kept.safetensors"])
def test_integers_in_a_file_stand_in_the_text_and_a_path_out_of_the_place_is_not_read(
    tmp_path: Path, path: str
) -> None:
    place = tmp_path / "place"
    (place / "blob").mkdir(parents=True)
    save_file({"kv_indptr": np.array([0, 2, 5], dtype="int32")}, place / path)
    kept = {"type": "safetensors", "path": path, "tensor_key": "kv_indptr"}
    workload = {"axes": {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 5}, "inputs": {"kv_indptr": kept}}
    (one,) = trace(place, [workload], gemm=PAGED)
    assert ("_KV_INDPTR = [[0, 2, 5]]" in one.source) == (".." not in path)


def argument(name: str) -> dict[str, object]:
    return {"as_tensor": {"name": name}}


def given(**arguments: object) -> list[dict[str, object]]:
    return [{"name": name, "arg": value, "kind": 1} for name, value in arguments.items()]


def archive(path: Path, target: str = "torch.ops.aten.linear.default", output: str = "linear") -> Path:
    """As `torch.export.save` writes one: `linear(x, weight) + steps`, the batch of any size."""
    batch = {"as_expr": {"expr_str": "Symbol('s0', positive=True, integer=True)", "hint": {"as_int": 3}}}
    sizes = {"x": (7, [batch, {"as_int": 4}]), "p_w": (7, [{"as_int": 2}, {"as_int": 4}]), "b_s": (5, [{"as_int": 2}])}
    graph = {
        "tensor_values": {name: {"dtype": dtype, "sizes": size} for name, (dtype, size) in sizes.items()},
        "nodes": [
            {"target": "torch.ops.aten._assert_scalar.default", "inputs": [], "outputs": []},
            {"target": target, "inputs": given(input=argument("x"), weight=argument("p_w")),
             "outputs": [argument(output)]},
            {"target": "torch.ops.aten.add.Tensor", "inputs": given(self=argument(output), other=argument("b_s")),
             "outputs": [argument("add")]},
        ],
    }  # fmt: skip
    signature = {
        "input_specs": [
            {"parameter": {"arg": {"name": "p_w"}, "parameter_name": "w"}},
            {"buffer": {"arg": {"name": "b_s"}, "buffer_name": "s"}},
            {"user_input": {"arg": argument("x")}},
        ],
        "output_specs": [{"user_output": {"arg": argument("add")}}],
    }
    program = {
        "graph_module": {"graph": graph, "signature": signature},
        "range_constraints": {"s0": {"min_val": 2, "max_val": None}},
    }
    config = {"config": {"s": {"path_name": "weight_0", "use_pickle": False}}}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("net/models/model.json", json.dumps(program))
        file.writestr("net/data/weights/model_weights_config.json", json.dumps(config))
        file.writestr("net/data/constants/model_constants_config.json", json.dumps({"config": {}}))
        file.writestr("net/data/weights/weight_0", np.array([10, 20], dtype="int64").tobytes())
    return path


def test_an_archive_of_torch_export_is_read_as_its_graph(tmp_path: Path) -> None:
    archive(tmp_path / "net.pt2")
    name, found = read(str(tmp_path))
    (net,) = found
    assert (name, net.origin, net.level) == ("modules", "net.pt2", 1)
    assert outputs_of(net).shape == (3, 2)
    assert "torch.tensor([10, 20], dtype=torch.int64)" in net.source
    assert declared(net.source).free == {"s0": (2, 12)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output": "x); import os"}, "a name that is none of Python's"),
        ({"output": "self"}, "a name that is none of Python's"),
        ({"target": "torch.ops.mine.evil.default"}, "it calls torch.ops.mine.evil.default"),
        ({"target": "os.system"}, "it calls os.system"),
        ({"target": "torch.ops.aten.x(1) or y.default"}, "it calls torch.ops.aten.x(1) or y.default"),
    ],
)
def test_an_archive_of_a_stranger_puts_no_code_into_the_text(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    archive(tmp_path / "net.pt2", **changes)
    assert [one.left_out for one in read(str(tmp_path / "net.pt2"))[1]] == [reason]


def test_a_broken_archive_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.pt2").write_bytes(b"PK nothing")
    assert [one.left_out for one in read(str(tmp_path))[1]] == ["is no archive of torch.export that can be read"]


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
    assert results["1"] is not None
    b = torch.tensor([[1.0, -2.0, 3.0]], device='cuda')
    factor = torch.randn(3)
    results["2"] = scaled(b, factor=factor, keep=False)
    return results
"""
    (tmp_path / "scaled.py").write_text(text)
    (tmp_path / "bare.py").write_text(text.partition("#")[0] + "#" * 60 + "\n")
    name, found = read(str(tmp_path))
    bare, scaled = found
    assert name == "tritonbench"
    assert bare.left_out == "no function, or no test of it"
    assert outputs_of(scaled).shape == (1, 3)
    assert "results" not in scaled.source
    assert not torch.equal(outputs_of(scaled), outputs_of(scaled))


def test_tritonbench_is_found_in_a_checkout_of_it(tmp_path: Path) -> None:
    """The JSON files beside it, of prompts, were taken for rows, and each was left out."""
    folder = tmp_path / "data" / "TritonBench_T_v1"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("def one(x):\n    return x\n\n" + "#" * 60 + "\n")
    (tmp_path / "data" / "prompts.jsonl").write_text('{"file": "one.py"}\n')
    (tmp_path / "run.py").write_text("import torch\n")
    for place in (tmp_path, tmp_path / "data", folder):
        name, found = read(str(place))
        assert (name, [one.origin for one in found]) == ("tritonbench", ["one.py"])


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
    assert outputs_of(function).shape == (5,)
    assert not torch.equal(outputs_of(function), outputs_of(function)), "the same example each time is drawn again"
    assert not torch.equal(outputs_of(net), outputs_of(net))
    assert bare.left_out == "no get_inputs and no example_inputs"


def test_a_layer_of_torchs_own_class_is_a_module(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef scale(x):\n    return x * 2\n\n\nclass Scaled(nn.Linear):\n"
        "    def forward(self, x):\n        return scale(super().forward(x))\n\n\nclass Last(Scaled):\n    pass\n\n\n"
        "example_inputs = [torch.rand(3, 4)]\n\n\ndef get_init_inputs():\n    return [4, 5]\n"
    )
    (one,) = read(str(tmp_path))[1]
    assert outputs_of(one).shape == (3, 5)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MIT License\n\nCopyright (c) 2023 Someone\n", "MIT"),
        ("\n   Apache License\n   Version 2.0, January 2004\n", "Apache-2.0"),
        ("Redistribution and use in source …\n3. Neither the name of …", "BSD-3-Clause"),
        ("\nMy own words\nand more", "My own words"),
    ],
)
def test_files_of_a_checkout_have_its_licence_unless_they_say_their_own(tmp_path: Path, text: str, name: str) -> None:
    place = tmp_path / "checkout" / "inner"
    place.mkdir(parents=True)
    (tmp_path / "LICENSE").write_text("of somebody else")
    (place / "a.py").write_text(model("Net"))
    (place / "b.py").write_text(model("Net") + "\nLICENSE = 'CC0'\n")
    assert [one.license for one in read(str(place))[1]] == ["", "CC0"]
    (place.parent / ".git").mkdir()
    (place.parent / "LICENSE").write_text(text)
    assert [one.license for one in read(str(place))[1]] == [name, "CC0"]


def test_a_place_that_is_none_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="holds no problems of a known format"):
        read(str(tmp_path))
    with pytest.raises(ProblemError, match="there is no"):
        read(str(tmp_path / "nothing"))
    with pytest.raises(ProblemError, match="no format 'x'"):
        read(str(tmp_path), "x")


@pytest.mark.parametrize(
    ("place", "name"),
    [("kernelbook", "GPUMODE/KernelBook"), ("drkernel", "hkust-nlp/drkernel-rl-data"), ("owner/rows", "owner/rows")],
)
def test_a_data_set_of_the_hub_is_read_row_by_row(monkeypatch: pytest.MonkeyPatch, place: str, name: str) -> None:
    source = "import torch\n\n\nclass Twice(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    source += "\n\ndef get_inputs():\n    return [torch.rand(4)]\n"
    asked: list[str] = []

    def load(wanted: str) -> dict[str, Iterator[dict[str, Any]]]:
        asked.append(wanted)
        extra = {"entry_point": "Twice", "uuid": 7}
        other = {"reward_model": {"ground_truth": source}, "extra_info": extra}
        return {"train": iter([{"python_code": source, "entry_point": "Twice", "licenses": ["MIT"]}, other, {}])}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    form, found = read(place)
    first, second, third = found
    assert (form, asked) == ("rows", [name])
    assert "class Model(" in first.source
    assert "class Model(" in second.source
    assert (first.license, first.origin, second.name, third.left_out) == (
        "MIT",
        f"{name} train 1",
        "7",
        "no source in it",
    )
