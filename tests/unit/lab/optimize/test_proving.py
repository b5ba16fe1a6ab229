"""The last step: what is on disk is what was verified, or there is nothing on disk."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import InfraError, UserError
from kbrl_async.kernels.funnel import Result
from kbrl_async.lab.optimize import evidence, proving, session
from kbrl_async.lab.optimize.evidence import Facts, SearchResult
from kbrl_async.lab.optimize.search import Budget, Search, SearchOptions
from kbrl_async.lab.optimize.targets import UserModule
from kbrl_async.lab.optimize.tree import Judgement
from protocols.records import Candidate, Fault, Problem
from tests.unit.lab.optimize.making import PROBLEM, result, right, wrong

TARGET = UserModule(PROBLEM, PROBLEM, "function", "act", "my_module.act", ("x", "y"))


class Disk:
    """A verifier that looks at the folder while it is asked."""

    def __init__(self, folder: Path, judge: Callable[[str], Result]) -> None:
        self._folder, self._judge = folder, judge
        self.seen: list[str] = []
        self.visible: list[list[str]] = []

    def verify(self, problem: Problem, candidate: Candidate) -> Result:
        self.seen.append(candidate.source)
        self.visible.append([path.name for path in self._folder.iterdir() if not path.name.startswith(".")])
        return self._judge(candidate.source)

    def restart(self) -> None: ...


def texts(*sources: str) -> dict[int, str]:
    """The files of these attempts, by number."""
    return {n: proving.render(TARGET, text, "optimized_x.py", "c", "small", "1.0") for n, text in enumerate(sources)}


def lo_in(text: str) -> Result:
    """The speedup that the source itself says, as `# lo 3.0`; wrong where it says none."""
    found = text.partition("# lo ")[2].split()
    return result(lo=float(found[0])) if found else result(Fault.INCORRECT)


def prove(
    folder: Path, *sources: str, judge: Callable[[str], Result] = lo_in, slower: bool = False
) -> proving.Proof | None:
    verifier = Disk(folder, judge)
    path = folder / "optimized_x.py"
    proof, finals = proving.prove(texts(*sources), PROBLEM, verifier, path, "c", slower)
    assert len(finals) == len(sources)
    assert not any("optimized_x.py" in names for names in verifier.visible), "no file before its proof"
    assert [p for p in folder.iterdir() if p.name.startswith(".")] == [], "nothing hidden is left"
    return proof


def test_the_surest_of_the_finalists_is_written_whatever_the_search_thought(tmp_path: Path) -> None:
    proof = prove(tmp_path, "# lo 1.2", "# lo 3.0", "# lo 2.0")
    assert proof is not None
    assert proof.winner.attempt == 1
    assert "# lo 3.0" in (tmp_path / "optimized_x.py").read_text()


def test_what_was_verified_are_the_very_bytes_of_the_file(tmp_path: Path) -> None:
    verifier = Disk(tmp_path, lo_in)
    path = tmp_path / "optimized_x.py"
    proof, _ = proving.prove(texts("# lo 3.0"), PROBLEM, verifier, path, "c")
    assert proof is not None
    assert path.read_text() == verifier.seen[0]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == proof.winner.sha256


def test_where_time_is_over_the_best_one_is_still_examined(tmp_path: Path) -> None:
    named = texts("# lo 1.2", "# lo 3.0")
    verifier = Disk(tmp_path, lo_in)
    proof, finals = proving.prove(named, PROBLEM, verifier, tmp_path / "optimized_x.py", "c", is_over=lambda: True)
    assert proof is not None
    assert [final.attempt for final in finals] == [0]


def test_a_kernel_that_does_not_hold_a_second_time_is_not_written(tmp_path: Path) -> None:
    assert prove(tmp_path, "lucky once") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sources", "slower", "winner"),
    [
        (("# lo 2.0", "# lo 2.1", "# lo 2.3"), False, 2),  # 2.1 lies within what the first one may be
        (("# lo 2.0", "# lo 2.1"), False, 0),
        (("# lo 0.5", "# lo 0.9"), True, 1),
        (("# lo 0.5", "# lo 0.9"), False, None),
        (("# lo 0.9", "# lo 0.5"), True, 0),
        (("wrong", "# lo 2.0", "# lo 2.1"), False, 2),
    ],
)
def test_what_is_written_is_never_slower_than_what_was_there(
    tmp_path: Path, sources: tuple[str, ...], slower: bool, winner: int | None
) -> None:
    """Another takes its place only where its whole interval lies above the first one's speedup, here 1.1 × lo."""
    path, verifier = tmp_path / "optimized_x.py", Disk(tmp_path, lo_in)
    proof, _ = proving.prove(texts(*sources), PROBLEM, verifier, path, "c", slower, to_beat=0)
    assert (None if proof is None else proof.winner.attempt) == winner


def test_a_time_that_others_disturbed_is_none_that_another_beats(tmp_path: Path) -> None:
    def judge(text: str) -> Result:
        quiet = lo_in(text)
        assert quiet.timing is not None
        stopped = "disturbed" if "lo 1.5" in text else "cap"
        return msgspec.structs.replace(quiet, timing=msgspec.structs.replace(quiet.timing, stopped=stopped))

    path, verifier = tmp_path / "optimized_x.py", Disk(tmp_path, judge)
    proof, _ = proving.prove(texts("# lo 1.5", "# lo 9.0"), PROBLEM, verifier, path, "c", to_beat=0)
    assert proof is not None
    assert proof.winner.attempt == 0


def test_where_time_is_over_the_best_one_is_still_compared_with_what_was_there(tmp_path: Path) -> None:
    path, verifier = tmp_path / "optimized_x.py", Disk(tmp_path, lo_in)
    named = texts("# lo 1.2", "# lo 3.0", "# lo 4.0")
    proof, finals = proving.prove(named, PROBLEM, verifier, path, "c", is_over=lambda: True, to_beat=0)
    assert [final.attempt for final in finals] == [0, 1]
    assert proof is not None
    assert proof.winner.attempt == 1


def finalists(*los: float, slower: bool = False) -> list[int]:
    """Numbers of those that are examined again; the first was there."""
    search = Search(SearchOptions(Budget()), random.Random(0), 0.0)
    search.begin_with("0", "me", 0.0)
    search.judged(0, right(los[0]))
    for number, lo in enumerate(los[1:], start=1):
        search.plant(f"{number}", "others", 0.0)
        search.judged(number, right(lo))
    return [attempt.number for attempt in session.finalists(SearchResult(TARGET, search, FACTS), slower)]


def test_what_was_there_is_examined_again_however_slow_it_is() -> None:
    assert finalists(0.5, 2.0, 3.0, 4.0, 5.0) == [0, 4, 3, 2]
    assert finalists(3.5, 2.0, 3.0, 4.0) == [0, 3, 2]
    assert finalists(0.5, 0.6) == []
    assert finalists(0.5, 0.6, slower=True) == [0, 1]


def test_a_source_with_a_docstring_and_imports_of_the_future_is_still_a_module() -> None:
    source = '"""Mine."""\nfrom __future__ import annotations\n'
    made = proving.render(TARGET, source, "optimized_x.py", "c", "me", "1.0")
    names: dict[str, object] = {}
    exec(compile(made, "made", "exec", dont_inherit=True), names)
    assert names["__doc__"] == "Mine."
    assert "\n# Written by me: every line" in made


@pytest.mark.parametrize("source", ["", '"""Mine."""\n'])
def test_a_name_of_a_file_is_never_code(source: str) -> None:
    for ending in ("\n", "\r", "\0", "\x85", "\u2028", '"""\n', "\\"):
        author = f"the author of a{ending}import os.py"
        made = proving.render(TARGET, source, "x.py", "c", author, "1.0")
        assert not any(isinstance(node, ast.Import) for node in ast.parse(made).body), repr(ending)


def test_a_proven_kernel_that_is_not_faster_needs_the_flag(tmp_path: Path) -> None:
    assert prove(tmp_path, "# lo 0.9") is None
    assert list(tmp_path.iterdir()) == []
    assert prove(tmp_path, "# lo 0.9", slower=True) is not None
    assert (tmp_path / "optimized_x.py").is_file()


def test_a_wrong_one_is_not_written_with_the_flag_either(tmp_path: Path) -> None:
    assert prove(tmp_path, "wrong", slower=True) is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changes_after_its_proof_is_not_announced(tmp_path: Path) -> None:
    def judge(text: str) -> Result:
        hidden = next(path for path in tmp_path.iterdir() if path.name.startswith("."))
        hidden.write_text("something else")
        return lo_in(text)

    with pytest.raises(InfraError, match="has changed since it was verified"):
        prove(tmp_path, "# lo 3.0", judge=judge)
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_stays_when_nothing_is_proven(tmp_path: Path) -> None:
    (tmp_path / "optimized_x.py").write_text("old")
    verifier = Disk(tmp_path, lo_in)
    proof, _ = proving.prove(texts("wrong"), PROBLEM, verifier, tmp_path / "optimized_x.py", "c")
    assert proof is None
    assert (tmp_path / "optimized_x.py").read_text() == "old"


def test_a_folder_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be written"):
        proving.prove(texts("# lo 2"), PROBLEM, Disk(tmp_path, lo_in), tmp_path / "no" / "x.py", "c")


def test_the_file_says_how_to_use_it_and_offers_the_old_name(tmp_path: Path) -> None:
    prove(tmp_path, "class ModelNew:\n    def __call__(self, x, y):\n        return x + y  # lo 2.0\n")
    names: dict[str, object] = {}
    exec((tmp_path / "optimized_x.py").read_text(), names)
    assert "Usage: from optimized_x import act" in str(names["__doc__"])
    assert names["act"](1, 2) == 3  # type: ignore[operator]


# ── evidence ─────────────────────────────────────────────────────────────────────────────────────────────────────


def searched() -> Search:
    search = Search(SearchOptions(Budget()), random.Random(0), 0.0)
    for source, judgement in (("slow | one", right(0.5)), ("bad", wrong(passed=3)), ("good", right(2.0))):
        ask = search.ask(1.0)
        assert ask is not None
        search.wrote(ask.number, source, 10)
        search.judged(ask.number, judgement)
    search.stop("time")
    return search


FACTS = Facts("small", "compact", "c", 12.0, {"seconds": 10})


def test_the_evidence_holds_what_was_tried_and_what_came_of_it(tmp_path: Path) -> None:
    proof = prove(tmp_path, "# lo 3.0")
    found = SearchResult(TARGET, searched(), FACTS, proof)
    document = evidence.document(found)
    assert document["written"]["sha256"] == hashlib.sha256((tmp_path / "optimized_x.py").read_bytes()).hexdigest()
    assert document["proof"]["timing"]["lo"] == 3.0
    assert [node["judgement"]["fault"] for node in document["tree"]] == ["ok", "incorrect", "ok"]
    assert {document["sources"][node["source_sha256"]] for node in document["tree"]} == {"slow | one", "bad", "good"}
    assert {"torch", "python", "kbrl-async"} <= document["versions"].keys()
    text = evidence.markdown(found)
    assert "Proven right; 3.30× (3.00 … 3.60) the speed of the module: proven faster." in text
    assert "a CPU" in text


def test_without_a_proof_the_errors_of_the_best_attempts_are_shown() -> None:
    text = evidence.markdown(SearchResult(TARGET, searched(), FACTS))
    assert "none was proven faster" in text
    assert "incorrect, 3 of 10 input sets" in text


def test_a_disturbed_measurement_is_called_that() -> None:
    quiet = result(lo=1.0)
    assert quiet.timing is not None
    disturbed = msgspec.structs.replace(quiet, timing=msgspec.structs.replace(quiet.timing, stopped="disturbed"))
    said = evidence.conclusion(SearchResult(TARGET, searched(), FACTS, finals=(proving.Final(0, disturbed, ""),)))
    assert "others used the core" in said


def test_the_tree_shows_the_best_first_and_each_below_its_parent() -> None:
    search = Search(SearchOptions(Budget()), random.Random(0), 0.0)
    tree = search.tree
    for number, (parent, judgement) in enumerate([(None, wrong()), (None, wrong("compile")), (1, right(2.0))]):
        tree.ask(parent, 0.0)
        tree.write(number, f"{number}", 1)
        tree.judge(number, judgement)
    assert evidence.tree_lines(search) == ["1 compile", "  2 correct 2.20× [2.00, 2.40]", "0 mismatch 0/10"]


def test_the_author_of_what_was_written_is_named_in_the_file_and_in_the_evidence() -> None:
    search = Search(SearchOptions(Budget()), random.Random(0), 0.0)
    search.plant("taken", "L1/01_tanh of runs/one", 0.0)
    search.tree.ask(0, 0.0)
    search.tree.ask(None, 0.0)
    authors = [evidence.author(search, number, "small") for number in range(3)]
    assert authors == [
        "L1/01_tanh of runs/one, and taken as it was found there",
        "small, beginning with what was written by L1/01_tanh of runs/one",
        "small",
    ]
    for number, author in enumerate(authors):
        found = SearchResult(TARGET, search, FACTS, proving.Proof("x.py", proving.Final(number, result(), "")))
        assert evidence.document(found)["written"]["author"] == author
        assert f"| written by | {author} |" in evidence.markdown(found)
        made = proving.render(TARGET, "", "x.py", "c", author, "1.0")
        assert f"\nWritten by {author}: every line of code but those of the last part, " in made


@pytest.mark.parametrize(("source", "named"), [('#pragma GCC optimize("Ofast")', True), ("#include <math.h>", False)])
def test_the_written_file_names_options_that_change_arithmetic(source: str, named: bool) -> None:
    made = proving.render(TARGET, source, "x.py", "c", "small", "1.0")
    assert ("Compiled with -Ofast: sums may be reordered" in made.split('"""')[1]) == named


@pytest.mark.parametrize(
    ("judgement", "words"),
    [
        (right(2.0), "what the author of mine.py wrote: correct 2.20× [2.00, 2.40]"),
        (wrong(passed=3), "what the author of mine.py wrote: incorrect, 3 of 10 input sets: no"),
        (None, "what the author of mine.py wrote: not verified: time"),
    ],
)
def test_what_became_of_the_kernel_to_begin_with_is_told(judgement: Judgement | None, words: str) -> None:
    search = Search(SearchOptions(Budget()), random.Random(0), 0.0)
    assert evidence.began_with(search) == ""
    search.begin_with("mine", "the author of mine.py", 0.0)
    if judgement is None:
        search.lost(0, "not verified: time")
    else:
        search.judged(0, judgement)
    assert evidence.began_with(search) == words
    found = SearchResult(TARGET, search, FACTS, proving.Proof("x.py", proving.Final(0, result(), "")))
    assert f"| began with | {words} |" in evidence.markdown(found)
    assert evidence.document(found)["began_with"] == 0
    assert evidence.conclusion(found).endswith("Nothing faster was found than the kernel to begin with.")


def test_a_kernel_that_was_taken_from_elsewhere_is_marked_in_the_tree() -> None:
    search = Search(SearchOptions(Budget()), random.Random(0), 0.0)
    search.plant("taken", "a policy of run one, for L1/01_tanh", 0.0)
    search.tree.judge(0, right(2.0))
    assert evidence.tree_lines(search) == ["0 correct 2.20× [2.00, 2.40], by a policy of run one, for L1/01_tanh"]
