"""Replays a run, or one batch of it. `python -m services.replay RUN_DIR [--batch ID] [--no-train] [--json]`

`kbrl replay` starts it as a process of its own: the middle floor imports no service.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kbrl_async.errors import KbrlError


def main() -> int:
    parser = argparse.ArgumentParser(prog="kbrl replay", description="replay a run or a batch")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--batch", default="")
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from services.replay import batches, runs

    try:
        if args.batch:
            return batches.replay(args.run_dir, args.batch, as_json=args.json)
        return runs.replay(args.run_dir, with_learner=not args.no_train, as_json=args.json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KbrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
