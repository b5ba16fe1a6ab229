#!/bin/bash
# A run on one rented machine that is reached by SSH (RunPod, Vast, Lambda, any cloud's VM). On the machine, in a checkout:
#   bash deploy/cloud/host.sh configs/gpu.yaml name=cloud max_minutes=60
# It goes on when the connection ends; the same command continues the run. See deploy/README.md.
set -euo pipefail

CONFIG=${1:?name a configuration, such as configs/gpu.yaml}
shift
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
STORE=${STORE:-runs}                     # on a disk that outlives the machine, such as RunPod's /workspace/runs
EXTRAS=${EXTRAS:-triton,cuda-build}      # empty on a machine without GPU

if ! command -v gcc >/dev/null || ! python3 -c 'import venv, ensurepip' 2>/dev/null; then
  as=()
  [ "$(id -u)" = 0 ] || as=(sudo)
  "${as[@]}" apt-get update -qq
  "${as[@]}" apt-get install -y -qq gcc g++ libc6-dev python3-venv python3-dev
fi
[ -x "$VENV/bin/kbrl" ] || { python3 -m venv "$VENV" && "$VENV/bin/pip" install --quiet ".${EXTRAS:+[$EXTRAS]}"; }

mkdir -p "$STORE"
# What is missing is said before anything costs money: GPUs, compilers, room, isolation.
"$VENV/bin/kbrl" train --dry-run --config "$CONFIG" "log_path=$STORE" "$@" >/dev/null
[ -s "$STORE/pid" ] && kill -0 "$(cat "$STORE/pid")" 2>/dev/null && { echo "a run is under way: tail -f $STORE/out" >&2; exit 3; }
setsid nohup "$VENV/bin/kbrl" train --config "$CONFIG" "log_path=$STORE" "$@" >>"$STORE/out" 2>&1 </dev/null &
echo $! >"$STORE/pid"
echo "started: tail -f $STORE/out; kill -TERM $! stops it in order, the same command goes on with it"
