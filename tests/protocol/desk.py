"""A ledger with a clock, workers named by their route, and a journal of rows: no sockets, no waiting."""

from __future__ import annotations

from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger, LedgerOptions, StageOptions

OPTIONS = LedgerOptions(
    heartbeat_s=1.0,
    compile=StageOptions(ttl_s=10.0, queue_limit=3),
    train=StageOptions(ttl_s=10.0),
    finished_limit=3,
)


class Desk:
    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger(OPTIONS)
        self.now = 0.0
        self.rows: dict[int, ev.TaskRow] = {}

    def do(self, event: ev.Event) -> list[ev.Action]:
        actions = self.ledger.handle(event, self.now)
        for action in actions:
            if isinstance(action, ev.Store | ev.Append | ev.Update | ev.Finish):
                self.rows[action.row.seq] = action.row
            elif isinstance(action, ev.Forget):
                del self.rows[action.seq]
        return actions

    def submit(self, task_id: str = "t1", stage: str = "compile", group: str = "", lag: int = -1) -> msg.Message:
        return self.replies(self.do(ev.FromProducer(b"p", msg.Submit(task_id, stage, group, lag))))[0]

    def replies(self, actions: list[ev.Action]) -> list[msg.Message]:
        return [action.message for action in actions if isinstance(action, ev.ToProducer)]

    def said(self, actions: list[ev.Action], worker: str) -> list[msg.Message]:
        """What a worker hears, tasks included."""
        out: list[msg.Message] = []
        for action in actions:
            if isinstance(action, ev.ToWorker) and action.route == worker.encode():
                out.append(action.message)
            elif isinstance(action, ev.Dispatch) and action.route == worker.encode():
                out.append(action.task)
        return out

    def tasks(self, actions: list[ev.Action], worker: str) -> list[msg.Task]:
        return [message for message in self.said(actions, worker) if isinstance(message, msg.Task)]

    def hear(self, worker: str, message: msg.Message) -> list[ev.Action]:
        return self.do(ev.FromWorker(worker.encode(), message))

    def hello(
        self, worker: str, slots: int = 1, stage: str = "compile", held: list[str] | None = None, incarnation: str = "a"
    ) -> list[ev.Action]:
        return self.hear(worker, msg.Hello(worker, incarnation, [stage], slots, held or []))

    def lease(self, worker: str = "w1", stage: str = "compile", slots: int = 1) -> msg.Task:
        return self.tasks(self.hello(worker, slots, stage), worker)[0]

    def result(self, worker: str, task: msg.Task, next_stage: str = "bench", version: int = -1) -> msg.Ack:
        actions = self.hear(worker, msg.Result(task.task_id, task.lease_id, next_stage, version))
        return next(message for message in self.said(actions, worker) if isinstance(message, msg.Ack))

    def pass_time(self, seconds: float) -> list[ev.Action]:
        self.now += seconds
        return self.do(ev.Tick())

    def restarted(self, options: LedgerOptions = OPTIONS) -> Desk:
        ledger = Ledger(options, self.ledger.epoch + 1)
        ledger.restore(ev.Snapshot(list(self.rows.values()), 0, self.ledger.counters), self.now)
        other = Desk(ledger)
        other.now, other.rows = self.now, self.rows
        return other

    def count(self, name: str) -> int:
        return self.ledger.counters[name]

    def stage_of(self, task_id: str = "t1") -> str:
        return self.ledger.tasks.live[task_id].stage
