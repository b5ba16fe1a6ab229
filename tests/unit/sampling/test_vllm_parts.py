"""What the vLLM engine is made of: installation, arguments, live versions, drafts, the judge of canaries."""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.errors import ConfigError, MissingTool, PolicyMismatch
from kbrl_async.sampling.canary import check_temperature, judge
from kbrl_async.sampling.proof import Prover
from kbrl_async.sampling.vllm.options import arguments, check_installed, set_environment
from kbrl_async.sampling.vllm.versions import Draft, LiveVersions, Served
from kbrl_async.sampling.vllm.worker import watch
from protocols.records import PolicyVersion
from tests.unit.sampling.fake_vllm import vllm_options

KNOWN = frozenset(
    {
        *("model", "dtype", "seed", "max_num_seqs", "logprobs_mode", "enable_prefix_caching", "skip_tokenizer_init"),
        *("max_model_len", "gpu_memory_utilization", "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"),
    }
)


def installed(**versions: str) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return version_of


def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(MissingTool, match=r"not installed here\. .*pip install 'kbrl-async\[vllm\]'.*torch 2\.11"):
        check_installed(installed(torch="2.13.0"))


def test_a_vllm_of_another_torch_is_named_with_both() -> None:
    with pytest.raises(MissingTool, match=r"vLLM 0\.26\.0 is built for torch 2\.11, and torch 2\.13\.0\+cpu is"):
        check_installed(installed(vllm="0.26.0", torch="2.13.0+cpu"), lambda _: ["torch==2.11.0", "numpy"])


def test_a_vllm_of_this_torch_will_do() -> None:
    assert check_installed(installed(vllm="0.26.0", torch="2.11.0+cu130"), lambda _: ["torch==2.11.0"]) == "0.26.0"


def test_room_is_made_for_all_live_versions_and_the_one_that_is_proven() -> None:
    made = arguments(vllm_options("m", lora_rank=12, max_staleness=2, roles=3), KNOWN)
    assert (made["max_loras"], made["max_cpu_loras"], made["max_lora_rank"]) == (15, 15, 16)


def test_arguments_that_a_neighbouring_version_lacks_are_left_out() -> None:
    assert arguments(vllm_options("m"), KNOWN).keys() <= KNOWN


@pytest.mark.parametrize(
    ("device", "eager", "compiles", "expected"),
    [("cuda", False, True, None), ("cuda", False, False, "FULL_DECODE_ONLY"), ("cuda", True, False, None),
     ("cpu", False, False, None)],
)  # fmt: skip
def test_without_compiling_there_are_graphs_of_decoding_alone(
    device: str, eager: bool, compiles: bool, expected: str | None
) -> None:
    known = KNOWN | {"compilation_config", "enforce_eager"}
    given = arguments(vllm_options("m", device=device, eager=eager, compile=compiles), known)
    assert given.get("compilation_config", {}).get("cudagraph_mode") == expected


def test_a_vllm_without_processed_logprobs_is_refused() -> None:
    with pytest.raises(MissingTool, match="no logprobs_mode"):
        arguments(vllm_options("m"), KNOWN - {"logprobs_mode"})


@pytest.mark.parametrize("rank", [513, 1024])
def test_ranks_that_vllm_has_no_kernels_for_are_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"lora_rank={rank}"):
        arguments(vllm_options("m", lora_rank=rank), KNOWN)


def test_what_somebody_has_set_in_the_environment_stays() -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "8"}
    set_environment("cpu", 3, environment)
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["OMP_NUM_THREADS"]) == ("8", "3")


@given(st.lists(st.sampled_from(["serve", "acquire", "release", "retire"]), max_size=60))
def test_adapters_go_exactly_when_nobody_holds_them_and_a_newer_one_serves(steps: list[str]) -> None:
    live, held, loaded, version = LiveVersions(), [], set(), -1
    for step in ["serve", *steps]:
        if step == "serve":
            version += 1
            named = live.name_adapters(version, [("", f"v{version}")])
            live.serve(named)
            loaded |= {one.lora_id for one in named}
        elif step == "acquire":
            held.append(live.acquire())
            assert held[-1].version == version
        elif step == "release" and held:
            live.release(held.pop(0))
        elif step == "retire":
            loaded -= {one.lora_id for one in live.retire()}
            live.release(newest := live.acquire())
            in_use = {one.lora_id for one in [*held, newest]}
            assert loaded == in_use


def test_a_role_without_an_adapter_of_its_own_gets_the_main_one() -> None:
    live = LiveVersions()
    live.serve(live.name_adapters(3, [("", "a"), ("verifier", "b")]))
    assert [live.acquire(role).name for role in ("solver", "verifier")] == ["policy-v3", "policy-v3-verifier"]


def test_a_draft_that_is_continued_keeps_what_it_has() -> None:
    draft = Draft([1, 2], 5)
    draft.add([3, 4], [-0.3, -0.4], 7)
    assert (draft.so_far, draft.left, draft.policy_version) == ([1, 2, 3, 4], 3, 7)
    draft.add([5], [-0.5], 7)
    draft.add([6], [-0.6], 8)
    assert (draft.logprobs, draft.spans) == ([-0.3, -0.4, -0.5, -0.6], [(7, 3), (8, 1)])


def noisy(values: list[float], sigma: float, rng: random.Random) -> list[float]:
    return [value + rng.gauss(0, sigma) for value in values]


def test_the_noise_of_bf16_raises_no_alarm_however_near_the_version_before_is() -> None:
    rng = random.Random(0)
    published = [rng.uniform(-6, 0) for _ in range(100)]
    for distance in (1e-4, 1e-3, 1e-2, 1e-1):
        for _ in range(200):
            served = noisy(published, 0.03, rng)
            judge("policy v2", served, published, {"policy v1": noisy(published, distance, rng)}, 0.08)


@pytest.mark.parametrize("moved", [0.0, 1e-3, 1e-2])
def test_what_the_learner_published_is_noisy_too(moved: float) -> None:
    """Seen with Qwen3-8B at a rate of 1e-6: the noise of what is published is in the difference from each other one."""
    rng = random.Random(0)
    for _ in range(200):
        before = [rng.uniform(-6, 0) for _ in range(400)]
        true = noisy(before, moved, rng)
        others = {"policy v1": noisy(before, 0.03, rng)}
        judge("policy v2", noisy(true, 0.03, rng), noisy(true, 0.03, rng), others, 0.08)


def test_a_stale_version_is_found_where_all_are_noisy() -> None:
    rng = random.Random(0)
    for _ in range(200):
        before = [rng.uniform(-6, 0) for _ in range(400)]
        true = noisy(before, 0.06, rng)
        others = {"policy v1": noisy(before, 0.03, rng)}
        with pytest.raises(PolicyMismatch, match="canary log-probs of policy v1"):
            judge("policy v2", noisy(before, 0.03, rng), noisy(true, 0.03, rng), others, 0.2)


def test_a_stale_version_is_found_under_the_noise_of_bf16() -> None:
    rng = random.Random(0)
    published = [rng.uniform(-6, 0) for _ in range(100)]
    stale = noisy(published, 0.05, rng)
    with pytest.raises(PolicyMismatch, match="what is served as policy v2 has the canary log-probs of policy v1"):
        judge("policy v2", noisy(stale, 0.03, rng), published, {"policy v1": stale}, 0.08)


def test_of_several_stale_versions_the_nearest_is_named() -> None:
    rng = random.Random(0)
    oldest = [rng.uniform(-6, 0) for _ in range(100)]
    older = noisy(oldest, 0.2, rng)
    published = noisy(older, 0.2, rng)
    with pytest.raises(PolicyMismatch, match="log-probs of policy v1"):
        judge("policy v2", noisy(older, 0.01, rng), published, {"policy v0": oldest, "policy v1": older}, 0.08)


@pytest.mark.parametrize("layers", [36, 64])
def test_a_version_nobody_has_trained_is_the_base_however_deep_the_model_is(layers: int) -> None:
    """Seen with LoRA of Qwen3-32B: rounding in 64 layers makes more of a difference than in 36."""
    rng = random.Random(0)
    published = [rng.uniform(-6, 0) for _ in range(60)]
    base = noisy(published, 0.1, rng)
    manifest = PolicyVersion(0, None, 0, "lora", "", list(range(61)), published)

    async def score(_ids: list[int]) -> list[float]:
        return noisy(base, 1e-3, rng)

    proving = Prover("bfloat16", layers).prove(manifest, "", score, score)
    if layers == 64:
        asyncio.run(proving)
        return
    with pytest.raises(PolicyMismatch, match=r"of the base model \(off by 0\.00\d+, and from its own by 0\.(09|1)"):
        asyncio.run(proving)


def test_logprobs_that_are_no_numbers_prove_nothing() -> None:
    with pytest.raises(PolicyMismatch, match="no usable log-probs"):
        judge("policy v1", [float("nan")], [-1.0], {}, 0.1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_the_temperature_is_measured(temperature: float) -> None:
    rows = [[(z, z / temperature - 2.0) for z in (-0.1, -2.0, -5.0)]]
    assert check_temperature(rows, temperature) == pytest.approx(temperature)


def test_raw_logprobs_in_place_of_processed_ones_are_another_temperature() -> None:
    with pytest.raises(PolicyMismatch, match=r"at temperature 1 where 0\.7 was asked for"):
        check_temperature([[(z, z) for z in (-0.1, -2.0, -5.0)]], 0.7)


def noisy_rows(spread: float, noise: float, temperature: float, seed: int) -> list[list[tuple[float, float]]]:
    """What two kernels give of eight tokens at three positions."""
    rng = random.Random(seed)
    true = [[rng.gauss(-5.0, spread) for _ in range(8)] for _ in range(3)]
    return [[(z + rng.gauss(0, noise), z / temperature + rng.gauss(0, noise)) for z in row] for row in true]


@pytest.mark.parametrize("seed", range(50))
def test_noise_of_bf16_between_tokens_that_are_nearly_alike_is_no_wrong_temperature(seed: int) -> None:
    check_temperature(noisy_rows(spread=0.25, noise=0.03, temperature=1.0, seed=seed), 1.0)


@pytest.mark.parametrize("temperature", [0.8, 1.3])
@pytest.mark.parametrize("seed", range(20))
def test_noise_of_bf16_hides_no_wrong_temperature_where_tokens_differ(temperature: float, seed: int) -> None:
    with pytest.raises(PolicyMismatch, match="at temperature"):
        check_temperature(noisy_rows(spread=2.0, noise=0.03, temperature=temperature, seed=seed), 1.0)


def test_what_follows_no_line_is_no_noise() -> None:
    with pytest.raises(PolicyMismatch, match="at temperature"):
        check_temperature(noisy_rows(spread=0.25, noise=1.0, temperature=1.0, seed=1), 1.0)


def test_an_adapter_is_named_by_its_version() -> None:
    assert Served(17).name == "policy-v17"


def test_a_worker_ends_when_its_sampler_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sampler:
        ended = threading.Event()
        threading.Thread(target=watch, args=(sampler.pid, ended.set, 0.01), daemon=True).start()
        assert not ended.wait(0.1)
        sampler.kill()
    assert ended.wait(30)
