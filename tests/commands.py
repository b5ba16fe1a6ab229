"""What `tests/e2e/test_docs.py` does with each command of the pages. People read this list: every entry has its reason.

A new command that reads or makes files needs no entry. One that takes minutes, or things that a test host lacks, does:
it is then parsed, its settings are resolved and its files looked for, but it is not run.
"""

from __future__ import annotations

from collections.abc import Mapping

READING = ("config", "problems", "verify", "index", "prepare", "top", "logs", "summary", "report", "compare", "inspect",
           "replay", "export", "plan", "keys", "runs", "completion", "profile")  # fmt: skip
"""Commands of kbrl that end in seconds and leave nothing but files."""

NOT_RUN: Mapping[str, tuple[str, ...]] = {
    "serves until it is stopped: tests/e2e/test_serving.py, tests/unit/lab/report/test_live.py": (
        "kbrl serve",
        "kbrl serve --broker processes.timing_bench=1",
    ),
    "installs into .venv: CI installs the same lists": (
        "make install",
        "make run",
        ". .venv/bin/activate",
        "pip install 'kbrl-async[otel]'",
        "pip install 'kbrl-async[vllm]'",
        "pip install 'kbrl-async[mcp]'",
        "pip install './environments/kbrl_kernels[verifiers]'",
        "pip install './environments/kbrl_kernels[inspect]'",
        "pip install './environments/kbrl_kernels[openenv]'",
        "pip install -e '.[triton,cuda-build]'",
        "pip install 'kbrl-async[serve]'",
        "pip install 'kbrl-async[verl]'",
        "pip install 'kbrl-async[trl]'",
        "pip install 'kbrl-async[areal]'",
        "pip install 'kbrl-async[openrlhf]'",
        "pip install 'kbrl-async[wandb,mlflow]'",
        "pip install 'kbrl-async[tinker]'",
    ),
    "serves until its client goes: tests/unit/lab/test_mcp_server.py, tests/environments": (
        "kbrl mcp",
        "kbrl mcp --skill",
        "kbrl mcp --http 8765",
        "python -m kbrl_kernels.openenv_server --port 8000",
    ),
    "needs another library and a model: tests/environments": (
        "vf-eval kbrl-kernels -n 4 -m MODEL --env.taskset.task.mode refine",
        "inspect eval kbrl_kernels/kernels --model openai/MODEL -T mode=tools",
    ),
    "needs the tinker library: tests/e2e/test_tinker.py": (
        "python -m tests.tinker_service --port 8490 --key tml-anything",
        "python -m tests.tinker_demo",
        "TINKER_API_KEY=tml-anything kbrl train learner.engine=tinker sampler.engine=tinker"
        " sampler.base_url=http://127.0.0.1:8490 lora_rank=16 learning_rate=2e-3 eval_samples=0 name=tinker",
    ),
    "trains for minutes: tests/e2e/test_run.py has runs": (
        "kbrl train level=1 seed=1 name=level-1",
        "kbrl train problems=my_problems level=1 name=mine",
        "kbrl train seed=1 name=second",
        "kbrl train prompt.option=raicl prompt.index=index prompt.examples=3",
        "kbrl train metrics.prometheus_port=9464",
        "kbrl train metrics.wandb_project=kernels",
        "kbrl train metrics.mlflow_uri=sqlite:///mlflow.db",
        "kbrl train metrics.otlp_endpoint=http://127.0.0.1:4318/v1/traces",
        "kbrl train method=sft name=taught",
        "kbrl train method=sft demonstrations.files=chats.jsonl,more/,runs/default name=taught-by-files",
        "kbrl train --config configs/fusion_best_of_n.yaml name=best-of-n",
        "python -m benchmarks.learning methods --folder fusion --seeds 0,1,2 --write",
    ),
    "harms a run for minutes: tests/chaos/test_kill_each_process.py": (
        "kbrl chaos --train --random 20 --seed 1",
        "kbrl chaos --train --random 100 --seed 2 --every 4 max_steps=60 max_minutes=30",
        "kbrl chaos --random 10 --faults kill,stop",
        "kbrl chaos --train --plan plan.toml --config configs/smoke.yaml",
    ),
    "asks and verifies for minutes: tests/e2e/test_eval.py has an evaluation": (
        "kbrl eval default --samples 8 --heldout",
        "kbrl eval default --samples 4 --heldout",
        "kbrl eval small --samples 4 --heldout",
        "kbrl eval default --problems tasks.jsonl",
        "kbrl eval small --problems grammar:500 --samples 4 name=probe",
    ),
    "searches for a minute or more: tests/unit/cli/test_optimize.py has searches": (
        "kbrl optimize my_module.py",
        "kbrl optimize my_module.py --policy runs/default",
        "kbrl optimize my_module.py --seconds 300 --turns 4 --examples runs/default",
        "kbrl optimize my_module.py --from my_kernel.py",
        "kbrl optimize layers.py:bias_gelu --inputs 'torch.randn(512, 1024), torch.randn(1024)'",
        "kbrl optimize package.layers:GatedNorm --init 1024 --inputs-from package.layers:make_inputs",
    ),
    "times for minutes on a quiet core: tests/unit/cli/test_bench.py": (
        "kbrl bench --aa --ab --pairs 1000 --minutes 8 --trials trials.jsonl",
    ),
    "needs a rented host: tests/unit/deploy holds the files": (
        "git clone ADDRESS-OF-THIS-REPOSITORY kbrl-async && cd kbrl-async",
        "STORE=/workspace/runs bash deploy/cloud/host.sh configs/gpu.yaml name=cloud max_minutes=60",
        ".venv/bin/kbrl top /workspace/runs/cloud",
        ".venv/bin/kbrl plan /workspace/runs/cloud",
    ),
    "needs what trains for minutes before it: tests/unit/evaluation and tests/unit/lab try the same": (
        "kbrl compare start=fusion/evals/start-0,fusion/evals/start-1 "
        "grpo=fusion/evals/grpo-0,fusion/evals/grpo-1 sft=fusion/evals/sft-0,fusion/evals/sft-1",
        "kbrl problems generate 100 --near runs/default --seed 5 --out edge",
        "kbrl plan default --verifiers --rollouts-per-hour 100000",
        "kbrl train problems=edge model_name=runs/default name=on-the-edge",
        "kbrl train --dry-run problems=grammar:500 exclude=runs/evals/probe",
    ),
    "needs the hub or an endpoint": (
        "kbrl index build --output index",
        "kbrl index build GPUMODE/KernelBook archive.parquet my-kernels --output index",
        "kbrl optimize my_module.py --policy https://host/v1 model_name=NAME sampler.api_key_env=MY_KEY …",
    ),
    "needs a KernelBench checkout or run: tests/unit/kernels/funnel/test_runs.py, tests/unit/cli/test_audit.py": (
        "kbrl verify --run runs/mine --workers 2",
        "kbrl problems audit ~/KernelBench/KernelBench --level 2 …",
        "python scripts/benchmark_eval_analysis.py …",
    ),
    "trains at a model's shape for minutes: tests/e2e/test_rehearse.py": (
        "kbrl rehearse --model ./toy --length 400:1.3 max_steps=3 batch_size=2 group_size=4 level=1",
        "kbrl rehearse --model Qwen2.5-7B --length 4000:1.6 --config model.yaml max_steps=20 --price H200=3.5",
        "kbrl rehearse --model Qwen2.5-7B --length 1200:1.4 --price H200=3.5 lora_rank=32 max_steps=20 "
        "batch_size=4 group_size=4 level=1 max_tokens=7168 placement=one_gpu backend=cuda-nvrtc "
        "sampler.engine=vllm sampler.slots=64 sampler.memory_share=.3 sampler.compile=false "
        "learner.token_budget=8192 learner.memory_gb=45 learner.epochs=1 learner.minibatches=1 "
        "learner.checkpoint_every=50 learner.keep_checkpoints=1 processes.timing_bench=2 "
        "timing_bench.memory_share=.24 timing_bench.shares_with=[sampler,learner,timing_bench]",
        "kbrl rehearse --model Qwen3-8B --length 1000:1.3 lora_rank=0 placement=split "
        "learner.processes=2 learner.shard=true learner.optimizer=adamw "
        "learner.token_budget=16384 learner.epochs=1 learner.minibatches=1 "
        "learner.memory_gb=110 learner.checkpoint_every=50 learner.keep_checkpoints=1 "
        "sampler.engine=vllm sampler.slots=128 "
        "sampler.memory_share=.9 sampler.compile=false level=1 batch_size=4 group_size=8 "
        "max_steps=20 processes.timing_bench=2 timing_bench.per_gpu=2 "
        "timing_bench.shares_with=[timing_bench]",
    ),
    "needs GPUs and a model": (
        "kbrl train --config model.yaml name=one-gpu",
        "kbrl train --config configs/gpu.yaml",
        "kbrl train --config configs/gpu.yaml max_minutes=11",
        "KBRL_CONFIG=configs/gpu_split.yaml honcho start -c timing_bench=2",
        "CUDA_VISIBLE_DEVICES=0 python -m services.learner",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 5"
        " --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m services.learner",
        "CUDA_VISIBLE_DEVICES=1 HONCHO_PROCESS_NAME=sampler.1 python -m services.sampler",
    ),
    "serves until it is stopped: tests/e2e/test_run.py and tests/chaos start the same": (
        "python -m services.broker",
        "python -m services.reward_aggregator",
        "python -m services.compile_farm",
        "honcho start -c compile_farm=2",
        "KBRL_PROCESSES__VERIFIER=2 honcho start -c verifier=2",
        "tensorboard --logdir runs",
        "prometheus --config.file=deploy/prometheus/prometheus.yml",
    ),
    "binds fixed ports of this host": (
        "kbrl prepare broker.submit=tcp://127.0.0.1:5755 broker.work=tcp://127.0.0.1:5756",
    ),
    "needs another host: tests/chaos/test_workers_of_other_hosts.py": (
        "kbrl worker compile --connect tcp://broker:5756 --keys host7-compile",
        "kbrl worker bench --connect tcp://broker:5756 --keys host7",
        "kbrl worker verify --connect tcp://broker:5756 --keys host8",
        "kbrl top --connect tcp://host:5757 --keys observer",
    ),
    "needs root, a cluster or a queue: tests/unit/deploy holds the files": (
        "sudo -u kbrl .venv/bin/kbrl prepare name=long max_steps=100000 max_minutes=null",
        "sudo systemctl enable --now kbrl@{broker,learner,sampler,compile_farm,timing_bench,reward_aggregator}",
        "sudo systemctl enable --now kbrl-worker@{compile,bench}",
        "install -D -m 644 deploy/kubernetes/profiles/kbrl-sandbox.json …",
        "apparmor_parser -r deploy/kubernetes/profiles/kbrl-sandbox.apparmor",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        "kubectl apply -k deploy/kubernetes/overlays/gpu",
        "for role in compile bench sampler; do ; kubectl …",
        "sbatch --nodes=4 deploy/slurm/run.sbatch name=long backend=cuda max_minutes=null",
        "sbatch --array=1-32 …",
        "sbatch --gpus=1 deploy/slurm/node.sbatch …",
    ),
}
"""Reason → commands that are only parsed and resolved; `…` at the end stands for the rest."""
