"""Which problem comes next, and which stage of rewards it is paid by: both follow moving rates. Pure and replayable.

::

    whole groups ─▶ success per problem and turn ─▶ weights of the next draw
    batches trained ─▶ rates of the last batches ─▶ stage1 ─▶ stage2 ─▶ stage3
                                                 ├▶ P(above a level | at it or above) .1 → .5
                                                 └▶ sets that a wrong kernel meets 3 → 6 → all, tolerances 10 → 3 → 1

Invariants
* The state is a function of what was observed, in order: a journal that is replayed gives the same choices (I9).
* A stage never goes back; each change says why.
* Nothing is fed in the order of scoring, failures first: groups come when their last rollout has ended, batches are of
  such groups.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.settings import Curriculum
from protocols.records import Problem, Strictness

STAGES = ("stage1", "stage2", "stage3")


RISES = 2
"""strictness=rising: rises after which everything is checked."""
RATE = 0.2
"""Weight of the newest rollout in a problem's success estimate."""
FLOOR = 0.1
"""kind=learnable: weight of a problem that is always, or never, solved, against 1 for one solved half of the time."""
BETWEEN = 0.1, 0.9
"""kind=learnable: shares of right kernels between which a problem is gone back to up to `visits` times; below, once."""
HALF = 10
"""kind=learnable: batches after which half of what a problem is expected to give is what all give by now."""


Weighted = list[tuple[Problem, float]]


class BatchRates(msgspec.Struct, frozen=True):
    compiled: float
    correct: float


class CurriculumState(msgspec.Struct, frozen=True):
    """All that a curriculum remembers."""

    stage: str
    share: float
    success: dict[str, dict[int, float]]
    recent: list[BatchRates]
    rises: int = 0
    batches: int = 0
    met: dict[str, int] = {}
    """Batches that had been trained when a problem's last rollout ended."""
    visits: dict[str, int] = {}
    """Groups of a problem that were admitted."""
    under_way: dict[str, int] = {}
    """Those of them that have not ended."""


class CurriculumTracker:
    """Fed by the run's state; `stage` and `pick` are its answers."""

    def __init__(self, settings: Curriculum, problems: Sequence[Problem], seed: int) -> None:
        self.settings = settings
        self.stage = STAGES[0]
        self.share = settings.first_share
        self.rises, self.batches = 0, 0
        self._problems, self._seed = list(problems), seed
        self._success: dict[str, dict[int, float]] = {}
        self._met: dict[str, int] = {}
        self._visits, self._under_way = Counter[str](), Counter[str]()
        self._recent: deque[BatchRates] = deque(maxlen=settings.window)

    def state(self) -> CurriculumState:
        recent = list(self._recent)
        counts = dict(self._visits), dict(self._under_way)
        return CurriculumState(
            self.stage, self.share, self._success, recent, self.rises, self.batches, self._met, *counts
        )

    def restore(self, state: CurriculumState) -> None:
        self.stage, self.share, self._success = state.stage, state.share, state.success
        self._recent = deque(state.recent, maxlen=self.settings.window)
        self.rises, self.batches, self._met = state.rises, state.batches, state.met
        self._visits, self._under_way = Counter(state.visits), Counter(state.under_way)

    @property
    def strictness(self) -> Strictness | None:
        """How closely wrong kernels are looked at now; None: as closely as can be."""
        settings = self.settings
        if settings.strictness == "full" or self.rises >= RISES or self.batches >= settings.strict_after:
            return None
        return Strictness(settings.first_sets << self.rises, settings.first_tolerance ** (0.5**self.rises))

    def began(self, problem_id: str) -> None:
        """A group of it was admitted."""
        self._visits[problem_id] += 1
        self._under_way[problem_id] += 1

    def ended(self, problem_id: str) -> None:
        """A group of it was trained, or ended otherwise."""
        self._under_way -= Counter((problem_id,))

    def observe(self, problem_id: str, turn: int, correct: bool) -> None:
        """A turn of a group all of whose rollouts have ended."""
        known = self._success.setdefault(problem_id, {})
        before = known.get(turn, 0.5)
        known[turn] = before + RATE * (float(correct) - before)
        self._met[problem_id] = self.batches

    def success(self, problem: Problem) -> float:
        """Estimated chance that a rollout of this problem ends correct: its turns' rates, 1 − Π(1 − rate); before any
        rollout, what its difficulty says."""
        rates = self._success.get(problem.problem_id)
        if not rates:
            return 1.0 - problem.difficulty
        missed = 1.0
        for rate in rates.values():
            missed *= 1.0 - rate
        return 1.0 - missed

    def batch_trained(self, rates: BatchRates) -> list[str]:
        """What changes by this batch, as lines for the log."""
        self._recent.append(rates)
        was_full, self.batches = self.strictness is None, self.batches + 1
        if not was_full and self.strictness is None:
            return [f"every kernel meets all input sets: {self.batches} updates"]
        if len(self._recent) < self.settings.window:
            return []
        compiled = sum(r.compiled for r in self._recent) / len(self._recent)
        correct = sum(r.correct for r in self._recent) / len(self._recent)
        return [*self._advance(compiled, correct), *self._raise(correct), *self._tighten(correct)]

    def _advance(self, compiled: float, correct: float) -> list[str]:
        settings, now = self.settings, self.stage
        if now == "stage1" and compiled >= settings.compile_above:
            self.stage = "stage2"
        elif now == "stage2" and correct >= settings.correct_above:
            self.stage = "stage3"
        if self.stage == now:
            return []
        self._recent.clear()
        reached = f"compiled {compiled:.0%}" if now == "stage1" else f"correct {correct:.0%}"
        return [f"{now} → {self.stage}: {reached} over the last {self.settings.window} batches"]

    def _raise(self, correct: float) -> list[str]:
        settings = self.settings
        if settings.kind != "levels" or correct < settings.raise_above or self.share >= settings.last_share:
            return []
        self.share = min(settings.last_share, round(self.share + settings.share_step, 6))
        self._recent.clear()
        return [f"harder levels {self.share:.0%}: correct {correct:.0%} over the last {self.settings.window} batches"]

    def _tighten(self, correct: float) -> list[str]:
        if self.strictness is None or correct < self.settings.strict_above:
            return []
        self.rises += 1
        self._recent.clear()
        now = self.strictness
        what = "all input sets" if now is None else f"{now.sets} input sets, tolerances × {now.tolerance:.3g}"
        return [f"wrong kernels meet {what}: correct {correct:.0%} over the last {self.settings.window} batches"]

    def weights(self) -> list[float]:
        """One a problem, in the order given; `uniform` has ones."""
        if self.settings.kind == "levels":
            return self._level_weights()
        if self.settings.kind == "learnable":
            return [FLOOR + (1 - FLOOR) * 4 * p * (1 - p) for p in self._expected()]
        return [1.0] * len(self._problems)

    def _expected(self) -> list[float]:
        """Of each problem, what of its rollouts would be correct now. What was measured long ago says less than what
        the others have given since: a policy that learns would never meet its first failures again."""
        known = [p for p in self._problems if p.problem_id in self._met]
        fresh = {p.problem_id: 0.5 ** ((self.batches - self._met[p.problem_id]) / HALF) for p in known}
        if not fresh:
            return [self.success(problem) for problem in self._problems]
        of_all = sum(fresh[p.problem_id] * self.success(p) for p in known) / sum(fresh.values())
        shares = [fresh.get(problem.problem_id, 0.0) for problem in self._problems]
        return [of_all + x * (self.success(p) - of_all) for x, p in zip(shares, self._problems, strict=True)]

    def _level_weights(self) -> list[float]:
        """Levels in order: of what is at a level or above it, `share` is above."""
        counts = Counter(problem.level for problem in self._problems)
        ordered = sorted(counts)
        of_level = {level: self.share**place * (1 - self.share) for place, level in enumerate(ordered[:-1])}
        of_level[ordered[-1]] = self.share ** (len(ordered) - 1)
        return [of_level[problem.level] / counts[problem.level] for problem in self._problems]

    def pick(self, count: int, excluded: frozenset[str]) -> Problem:
        """The problem of group number `count`, the same for the same state, count and seed: every one once in random
        order, then again (`uniform`), or drawn by weight."""
        if self.settings.kind == "uniform":
            turn, place = divmod(count, len(self._problems))
            order = random.Random(f"{self._seed}.{turn}").sample(self._problems, len(self._problems))
            chosen = [*order[place:], *order[:place]]
            return next((problem for problem in chosen if problem.problem_id not in excluded), chosen[0])
        rng = random.Random(f"{self._seed}.{count}")
        open_ = [
            (problem, weight)
            for problem, weight in zip(self._problems, self.weights(), strict=True)
            if problem.problem_id not in excluded
        ]
        drawn = open_ or list(zip(self._problems, self.weights(), strict=True))
        if self.settings.kind == "learnable" and self.settings.visits:
            drawn = self._by_visits(drawn, rng)
        return rng.choices([p for p, _ in drawn], weights=[w for _, w in drawn])[0]

    def _by_visits(self, drawn: Weighted, rng: random.Random) -> Weighted:
        """Of these, the problems that were begun, in all but one of `visits` draws; else new ones.

        A problem is gone back to when its last group has ended. So each that is solved now and then is met about
        `visits` times, one that is always solved once, and one that never is once more, when others were learned.
        """
        most = self.settings.visits
        new = [one for one in drawn if not self._visits[one[0].problem_id]]
        free = [one for one in drawn if not self._under_way[one[0].problem_id]]
        begun = [one for one in free if 0 < self._visits[one[0].problem_id] < self._worth(one[0], most)]
        first, second = (begun, new) if rng.random() < 1 - 1 / most else (new, begun)
        return first or second or free or drawn

    def _worth(self, problem: Problem, most: int) -> int:
        """Groups that are spent on it, by what its answers came to."""
        success, (low, high) = self.success(problem), BETWEEN
        return 1 if success > high else most if success > low else min(2, most)
