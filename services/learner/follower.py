"""The whole life of a rank that is not the first: it computes what rank 0 says (`ranks`), and speaks to nobody else."""

from __future__ import annotations

import os
import sys

from kbrl_async.errors import KbrlError
from services.learner import ranks
from services.runtime.nanny import CHILD_MARK, die_with_parent


def follow() -> None:
    """Until rank 0 says that it is over; ends the process."""
    try:
        _follow()
    except KbrlError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    os._exit(0)  # threads of the backend may outlive the interpreter


def _follow() -> None:
    die_with_parent()
    ranks.leave_in_time()
    from services.runtime.service import Service, choose_run

    if CHILD_MARK not in os.environ:  # a launcher's: nobody has chosen the run for it
        os.environ["HONCHO_PROCESS_NAME"] = f"learner.rank{os.environ['RANK']}"
        choose_run()
    service = Service.start("learner")
    ranks.check_launcher(service.config.learner.processes)
    import torch

    from kbrl_async.runs.config import learner_threads
    from services.learner.policy import make_trainer

    service.pin(service.layout.learner)
    torch.set_num_threads(learner_threads(service.config, service.layout))
    process_group = ranks.join(service.device)
    assert process_group is not None
    base = process_group.receive_text()
    service.log.info("follows", rank=process_group.rank, of=process_group.size)
    trainer = make_trainer(service.config, base, service.device, process_group)
    trainer.follow()
    trainer.close()
