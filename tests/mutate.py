# ruff: noqa: E501
"""Change one sign or factor of each formula and see that a test fails.

    python tests/mutate.py        # or: make mutations

Every change is made in a copy of the sources, and the tests named beside it are run on the copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXACT = ["tests/test_exactness.py", "-k", "3-nesterov or zero"]
OWN = ["tests/test_own_algorithm.py"]
LEDGER = ["tests/test_ledger.py"]
SCHEDULES = ["tests/test_tensors.py"]

MUTATIONS: list[tuple[str, str, str, list[str]]] = [
    # x <- mean(y) + (x - y)
    ("updates/average.py", "received + (x - sent)", "received - (x - sent)", EXACT),
    ("updates/average.py", "received + (x - sent)", "received", EXACT),
    ("updates/average.py", "received + (x - sent)", "received + 0.5 * (x - sent)", EXACT),
    # u <- beta*u + (a - xbar)/lr ; a <- a - alpha*lr*u
    ("updates/slow_momentum.py", "torch.sub(a, mean, out=mean)", "torch.sub(mean, a, out=mean)", EXACT),
    ("updates/slow_momentum.py", "add_(d, alpha=1 / lr)", "add_(d, alpha=1.0)", EXACT),
    ("updates/slow_momentum.py", "u.mul_(self.momentum)", "u.mul_(1 - self.momentum)", EXACT),
    ("updates/slow_momentum.py", "alpha=self.lr * lr", "alpha=lr", EXACT),
    ("updates/slow_momentum.py", "alpha=self.lr * lr", "alpha=self.lr", EXACT),
    ("updates/slow_momentum.py", "a.sub_(d, alpha=self.lr)", "a.add_(d, alpha=self.lr)", EXACT),
    ("updates/slow_momentum.py", "if lr == 0:", "if False:", EXACT),
    ("updates/slow_momentum.py", "settles = True", "settles = False", EXACT),
    # m <- mu*m + Delta ; a <- a - eta*(Delta + mu*m)
    ("updates/outer_step.py", "torch.sub(a, mean, out=mean)", "torch.sub(mean, a, out=mean)", EXACT),
    ("updates/outer_step.py", "mul_(self.momentum).add_(delta)", "add_(delta)", EXACT),
    ("updates/outer_step.py", "delta.add_(m, alpha=self.momentum)", "delta.add_(m)", EXACT),
    ("updates/outer_step.py", "delta.add_(m, alpha=self.momentum)", "m", EXACT),
    ("updates/outer_step.py", "a.sub_(delta, alpha=self.lr)", "a.sub_(delta)", EXACT),
    # x <- mix*x + (1-mix)*a
    ("updates/outer_step.py", "alpha=1 - self.mix", "alpha=self.mix / 2", EXACT),
    ("updates/outer_step.py", "mix: float = 0.5", "mix: float = 0.4", EXACT),
    # means, slices, schedules, delays
    ("tensors.py", "total.div_(len(tensors))", "total.div_(len(tensors) + 1)", EXACT),
    ("tensors.py", "for x in tensors[1:]:", "for x in tensors[2:]:", EXACT),
    ("schedules.py", "step % self.period == 0", "step % self.period == 1", EXACT),
    ("schedules.py", "step > self.start and", "step >= self.start and", SCHEDULES),
    ("schedules.py", "step <= self.end and", "step < self.end and", EXACT),
    ("schedules.py", "and not self.skipped(step)", "", EXACT),
    ("running.py", "Flight(step + self.round.delay", "Flight(step + self.round.delay + 1", EXACT),
    ("synchronizer.py", "r.when(self.step + 1)\n\n        def announce", "r.when(self.step)\n\n        def announce", EXACT),
    ("synchronizer.py", "self._broadcast()\n        self._start_rounds", "self._start_rounds", EXACT),
    ("exchanges/mean.py", "combine(link.reduce_scatter(message))", "link.reduce_scatter(message)", EXACT),
    ("running.py", 'if self.round.optimizer_state == "reset"', "if False", EXACT),
    ("synchronizer.py", 'if r.optimizer_state == "average"', "if False", EXACT),
    ("running.py", "self.round.update.after_step(x, state, clock)", "pass", OWN),
    ("running.py", 'self.round.delay, self.link.size)', "self.round.delay, 1)", OWN),
    # bytes
    ("links/cost.py", "return Cost(2 * (n - 1) * size // n", "return Cost(2 * n * size // n", LEDGER),
    ("links/cost.py", "return Cost((n - 1) * size // n", "return Cost(size", LEDGER),
    ("links/cost.py", "8 * self.bytes / rate", "self.bytes / rate", LEDGER),
]  # fmt: skip


def survives(mutation: tuple[str, str, str, list[str]]) -> str:
    """What became of one change: the failing test that caught it, or that none did."""
    name, old, new, tests = mutation
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(ROOT / "src", Path(copy, "src"))
        shutil.copytree(ROOT / "tests", Path(copy, "tests"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        file = Path(copy, "src", "laconic", name)
        text = file.read_text()
        if old not in text:
            return "NOT APPLIED: the text is not there"
        file.write_text(text.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": f"{copy}/src"}
        run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
        failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
        if run.returncode == 1 and failed:
            return "caught by " + failed[0].removeprefix("FAILED tests/").split(" - ")[0]
        return "SURVIVED" if run.returncode == 0 else f"pytest ended with {run.returncode}"


def main() -> int:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(survives, MUTATIONS))
    for (name, old, new, _), result in zip(MUTATIONS, results, strict=True):
        change = f"{old.splitlines()[0]!r} -> {new.splitlines()[0] if new else ''!r}"
        print(f"{name}: {change}: {result}")
    escaped = sum(not result.startswith("caught") for result in results)
    print(f"{len(results) - escaped} of {len(results)} changes were caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
