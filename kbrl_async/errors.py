"""Every error that a person can meet, as one tree. Each says its cause and its cure in one line (I12).

::

    KbrlError
    ├── UserError                exit code 2: something that was asked for is wrong
    │   ├── ConfigError          a key or value of the configuration
    │   │   └── PromptTooLong    one prompt that the model's context can't hold; ends its rollout, nothing else
    │   ├── ProblemError         a problem file that does not hold the KernelBench contract
    │   └── CheckpointError      a checkpoint or policy that can't be read
    ├── HostError                exit code 3: this machine lacks something
    │   ├── MissingTool          a program or library
    │   ├── AddressTaken         a socket address or lock held by somebody else
    │   └── DiskFull             no space left
    └── RunError                 exit code 4: the run can't go on
        ├── PolicyMismatch       the sampler serves another policy than the learner published (I8)
        ├── NonFiniteLoss        a loss or gradient that is not finite; weights are untouched
        └── InfraError           a worker, sandbox or device failed; retried elsewhere, never scored (I4)
            ├── TransferBroken   a worker of the engine got no weights, or a part of them, from the learner
            └── SessionLost      a service of others knows its session, or what it held for us, no more
"""

from __future__ import annotations


class KbrlError(Exception):
    """Root of the tree. `str(error)` is one line: the cause, then the cure."""

    exit_code = 1

    def __init__(self, cause: str, cure: str = "") -> None:
        self.cause = cause
        self.cure = cure
        super().__init__(f"{cause}. {cure}" if cure else cause)


class UserError(KbrlError):
    exit_code = 2


class ConfigError(UserError):
    """A key is unknown or a value is out of range; names the key, its origin and the nearest right one."""


class PromptTooLong(ConfigError):  # noqa: N818
    """A prompt and its longest answer exceed the model's context: this rollout fails with a reason, others go on."""


class ProblemError(UserError):
    """A problem file does not parse or lacks `Model`, `get_inputs` or `get_init_inputs`."""


class CheckpointError(UserError):
    """A checkpoint or policy folder is missing, truncated or of another model."""


class HostError(KbrlError):
    exit_code = 3


class MissingTool(HostError):  # noqa: N818 - reads as the sentence it prints
    """A program or library that the configuration needs is not on this host."""


class AddressTaken(HostError):  # noqa: N818
    """Somebody else holds the address or the lock file."""


class DiskFull(HostError):  # noqa: N818
    """No space is left where the run writes."""


class RunError(KbrlError):
    exit_code = 4


class PolicyMismatch(RunError):  # noqa: N818
    """Canary log-probs differ from the manifest's: the sampler would serve another policy (I8)."""


class NonFiniteLoss(RunError):  # noqa: N818
    """A loss or gradient was NaN or infinite; the step was not taken."""


class InfraError(RunError):
    """Infrastructure failed under a task; it is retried elsewhere and never becomes a reward (I4)."""


class TransferBroken(InfraError):  # noqa: N818
    """Weights did not come from the learner, or not all of them; the engine that asked for them is well."""


class SessionLost(InfraError):  # noqa: N818
    """A service of others knows its session, or what it held for us, no more: a new session is begun."""
