"""No module imports itself by way of others. Which wing may import which: the contracts in pyproject.toml."""

from __future__ import annotations

import grimp
import networkx


def test_no_imports_go_in_a_circle() -> None:
    found = grimp.build_graph("kbrl_async", "services", "protocols", cache_dir=None)
    graph = networkx.DiGraph([(m, n) for m in found.modules for n in found.find_modules_directly_imported_by(m)])
    assert [sorted(ring) for ring in networkx.strongly_connected_components(graph) if len(ring) > 1] == []
