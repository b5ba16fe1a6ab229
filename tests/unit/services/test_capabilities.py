"""What services say of themselves: backends that they can do, resources that they share, how code is confined."""

from __future__ import annotations

import pytest

from kbrl_async.kernels.backends import backend, backends
from kbrl_async.kernels.sandbox import Isolation
from protocols.messages import BACKENDS
from protocols.quiet import resources_of
from services.runtime.capabilities import farm_caps, said
from services.runtime.quiet import shared_resources


def test_a_farm_offers_what_it_can_build_and_says_why_not_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    name = backends()[0]
    monkeypatch.setattr(type(backend(name)), "missing", lambda _: "its compiler is not installed")
    caps, lacking = farm_caps("c")
    assert name not in caps[BACKENDS].split(",")
    assert lacking[name] == "its compiler is not installed"
    assert set(caps[BACKENDS].split(",")) | set(lacking) >= set(backends())


def test_processes_on_one_gpu_name_the_same_resource_and_others_do_not() -> None:
    bench = shared_resources("cuda:1", {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert bench == shared_resources("cuda:1", {})
    assert bench == shared_resources("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})
    sampler = shared_resources("cuda", {"CUDA_VISIBLE_DEVICES": "0,1"})
    learner = shared_resources("cuda", {"CUDA_VISIBLE_DEVICES": "0"})
    assert set(bench) <= set(sampler)
    assert not set(bench) & set(learner)
    assert resources_of({"shares": ",".join(sampler)}) == frozenset(sampler)


def test_what_a_host_lacks_for_isolation_is_in_the_first_line_of_the_log() -> None:
    assert said(Isolation("full")) == {"isolation": "full"}
    assert said(Isolation("reduced", ("landlock",))) == {"isolation": "reduced", "missing": ["landlock"]}
