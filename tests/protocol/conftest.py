"""What tests of the ledger begin with."""

from __future__ import annotations

import pytest

from tests.protocol.desk import Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()
