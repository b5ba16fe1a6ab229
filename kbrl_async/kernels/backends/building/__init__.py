"""What backends build with: the artifact store, confined tools, and the processor that a build is for."""

from kbrl_async.kernels.backends.building.processor import check_processor
from kbrl_async.kernels.backends.building.store import ArtifactStore

__all__ = ["ArtifactStore", "check_processor"]
