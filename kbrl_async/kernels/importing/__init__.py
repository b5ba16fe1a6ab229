"""Other people's problem sets as folders of our contract: `kbrl problems import SOURCE OUT`.

::

    place ─format─▶ Found … ─▶ near a held-out problem? seen before? ─▶ audit (confined, with limits, several at once)
                                                                         └▶ OUT/level*/*.py, index.toml, import.jsonl

Invariants
* A row is hostile code: it is parsed here and run only by an audit's confined child.
* What a run has decided is in `import.jsonl`; the next one goes on behind it.
* Every row is accounted for: taken, or left out with a reason.
"""

from kbrl_async.kernels.importing.found import Found, LeftOut
from kbrl_async.kernels.importing.importer import JOURNAL, ImportedRow, Importer
from kbrl_async.kernels.importing.places import FORMATS, read

__all__ = ["FORMATS", "JOURNAL", "Found", "ImportedRow", "Importer", "LeftOut", "read"]
