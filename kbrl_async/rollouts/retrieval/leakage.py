"""The leak rules: which examples a problem may never see, in training or evaluation. Pure.

::

    example ─ same problem? same code? same operations? near copy? of the problem itself   ─▶ refused
            └ the same four, of any guarded (held-out) problem                             ─▶ refused
            └ none                                                                         ─▶ may be shown

* same problem: the identifiers are equal;
* same code: the normalised syntax trees are equal, names and constants hidden;
* same operations: the forwards run the same operations in the same order, in whatever style they are written;
* near copy: the embeddings are at least as similar as `near_copy` of the embedder.

Every example is judged by itself, so a search that misses some of them can't let one through.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kbrl_async.rollouts.retrieval.embedders import Vectors
from kbrl_async.rollouts.retrieval.store import Facts

SAME_PROBLEM, SAME_CODE, SAME_OPERATIONS, NEAR_COPY = "same problem", "same code", "same operations", "near copy"


class Protected(msgspec.Struct, frozen=True):
    """Problems whose solutions may not be shown: arrays with one row each."""

    problems: NDArray[np.uint64]
    codes: NDArray[np.uint64]
    chains: NDArray[np.uint64]
    vectors: Vectors


def refused(facts: Facts, vectors: Vectors, protected: Protected, near_copy: float) -> list[str]:
    """For each example the first rule that it breaks, or an empty text.

    :param facts: `n` rows of what is known of the examples, `vectors` their embeddings (n × dimension).
    """
    if not len(protected.codes):
        return [""] * len(facts)
    similar = (vectors @ protected.vectors.T).max(axis=1) >= near_copy if len(facts) else np.zeros(0, bool)
    rules: Sequence[tuple[str, NDArray[np.bool_]]] = (
        (SAME_PROBLEM, np.isin(facts["problem"], protected.problems) & (facts["problem"] != 0)),
        (SAME_CODE, np.isin(facts["code"], protected.codes)),
        (SAME_OPERATIONS, np.isin(facts["chain"], protected.chains) & (facts["chain"] != 0)),
        (NEAR_COPY, similar),
    )
    return [next((rule for rule, hit in rules if hit[row]), "") for row in range(len(facts))]
