# ruff: noqa: E501
"""Change one sign or factor of each formula and see that a test fails.

    python -m tests.mutate        # or: make mutations
    python -m tests.mutate --only updates/eager.py test_wire.py

Every change is made in a copy of the sources, and the tests named beside it are run on the copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXACT = ["tests/algorithms/test_exactness.py", "-k", "3-nesterov or zero"]
OWN = ["tests/algorithms/test_own_algorithm.py"]
LEDGER = ["tests/links/test_ledger.py"]
SCHEDULES = ["tests/engine/test_tensors.py"]
TOPOLOGY = ["tests/algorithms/test_topology.py"]
CONSERVED = ["tests/algorithms/test_conservation.py"]
LEADER = ["tests/algorithms/test_leader.py", "-k", "not process"]
GROUPS = ["tests/algorithms/test_exactness.py", "-k", "groups_of_workers"]
MORE = ["tests/algorithms/test_exactness.py", "-k", "more_workers"]
TRAFFIC = ["tests/links/test_traffic.py", "-k", "not process"]
RESUME = ["tests/engine/test_resume.py", "-k", "own or alike or older or size_of"]
COMM = ["tests/compat/test_comm_optimizer.py", "-k", "not process and not skips and not differ"]
SKIPS = ["tests/compat/test_comm_optimizer.py", "-k", "skips"]
RESUMES = ["tests/compat/test_comm_optimizer.py", "-k", "resume"]
DIFFER = ["tests/compat/test_comm_optimizer.py", "-k", "differ or world"]
SLOW = [
    "tests/compat/test_slowmo_ddp.py",
    "-k",
    "nesterov or graph or shards or less or part or eval or between",
]
USE = ["tests/compat/test_slowmo_use.py", "-k", "not process"]
SLOW_RESUME = ["tests/compat/test_slowmo_resume.py"]
SAVING = [
    "tests/engine/test_saving.py",
    "-k",
    "any_line or any_agreement or on_disk or cannot_rename",
]
LOADING = [
    "tests/engine/test_saving.py",
    "-k",
    "changes_nothing or bit_for_bit and not sharded or apart",
]
FROZEN = [
    "tests/codecs/test_coded.py",
    "-k",
    "frozen or chosen or later or follow or thawed or its_room",
]
BUFFERS = ["tests/engine/test_loop.py", "tests/compat/test_slowmo_use.py", "-k", "buffers or osgp"]
STAGED = ["tests/links/test_staged.py"]
LATE = ["tests/engine/test_late.py"]
LOW_RANK = ["tests/algorithms/test_low_rank.py", "-k", "not gloo"]
DEMO = ["tests/algorithms/test_demo.py", "-k", "not gloo"]
NOLOCO = ["tests/algorithms/test_noloco.py", "-k", "not gloo"]
EAGER = ["tests/algorithms/test_eager.py", "-k", "not gloo"]
CODED = ["tests/codecs/test_coded.py", "-k", "not process"]
LOOP = ["tests/engine/test_loop.py", "-k", "frozen or reentrant"]
MESH = ["tests/engine/test_mesh.py", "-k", "validation or nested or refuses or evaluated"]
SHARDS = ["tests/engine/test_mesh.py", "-k", "own_shard"]
LAST = ["tests/engine/test_resume.py", "-k", "pooled or counts_once"]
POOLED = ["tests/engine/test_resume.py", "-k", "pooled"]
LINKS = ["tests/links/test_links.py"]
JOINT = ["tests/engine/test_joint_optimizer.py"]
OWN_ALGORITHM = ["tests/algorithms/test_own_algorithm.py"]
LANE = ["tests/links/test_lane.py"]
OVERLAPPING = ["tests/engine/test_overlapping.py"]
CONSENSUS = ["tests/engine/test_consensus.py"]
REGROUP = ["tests/engine/test_regroup.py", "-k", "not process and not sharded"]
REGROUP_REPLICAS = ["tests/engine/test_regroup.py", "-k", "two_ranks"]
CODED_LINKS = ["tests/codecs/test_coded.py", "-k", "parts"]
KERNELS = ["tests/codecs/test_kernels.py"]
HEALTH = ["tests/links/test_health.py"]
ENDING = ["tests/engine/test_ending.py"]
MEASURED = ["tests/engine/test_auto.py", "-k", "booked"]
WIRE = ["tests/links/test_wire.py"]
DRIFT = ["tests/engine/test_drift.py", "tests/engine/test_drift_rounds.py"]
SECURED = ["tests/links/test_secured.py"]
AUTO = ["tests/engine/test_auto.py", "-k", "not process"]
AUTO_ELASTIC = ["tests/elastic/test_auto_elastic.py"]
PREDICT = ["tests/advisor/test_predict.py"]
FAILURE = ["tests/engine/test_failure.py", "-k", "on_one_rank or on_one_process"]
ADVISE = ["tests/advisor/test_advise.py"]
FAILS = ["tests/advisor/test_advise.py", "-k", "fails_on or groups_made or same_words"]
TUNE = ["tests/advisor/test_tune.py", "-k", "not killed"]
REPLICATED = ["tests/algorithms/test_replicated.py"]
LOST_MESSAGES = ["tests/algorithms/test_lost_messages.py"]
VIEWS = ["tests/elastic/test_views.py"]
REGISTRY = ["tests/elastic/test_registry.py"]
MEMBERS = ["tests/elastic/test_members.py"]
RELAY = ["tests/elastic/test_relay.py"]
FUZZED = ["tests/links/test_fuzzed.py"]
FUZZED_MESSAGES = ["tests/links/test_fuzzed_messages.py"]
ELASTIC_MESH = ["tests/elastic/test_elastic_mesh.py"]
NEWCOMERS = ["tests/elastic/test_newcomers.py", "-k", "repeats"]
REPORTS = ["tests/engine/test_reports.py"]
TLS_SETTINGS = ["tests/links/test_tls_settings.py"]
TLS_STORE = ["tests/elastic/test_registry_tls.py"]
JOB_SECRET = ["tests/links/test_job_secret.py"]
LISTENERS = ["tests/links/test_listeners.py", "-k", "not program"]
KEYS = ["tests/cli/test_keys.py"]
CONGESTION = ["tests/links/test_congestion.py"]
QUORUM_ROWS = ["tests/algorithms/test_quorum.py", "-k", "steps or rda"]
NEWEST = ["tests/algorithms/test_newest.py"]
NEWEST_ROWS = [
    "tests/algorithms/test_newest.py",
    "tests/algorithms/test_exactness.py",
    "-k",
    "muloco or rda or des_loc or newest",
]
QUORUM = ["tests/algorithms/test_quorum.py", "-k", "int or codes or finite or published"]
QUORUM_FAILS = ["tests/links/test_quorum_processes.py", "-k", "named or counted or agree"]
QUORUM_PROCESSES = ["tests/links/test_quorum_processes.py", "-k", "interrupted or another_rank"]
REPLACED = ["tests/elastic/test_elastic_runs.py", "-k", "killed_worker and ddp"]

MUTATIONS: list[tuple[str, str, str, list[str]]] = [
    # x <- mean(y) + (x - y)
    ("algorithms/updates/average.py", "received + (x - sent)", "received - (x - sent)", EXACT),
    ("algorithms/updates/average.py", "received + (x - sent)", "received", EXACT),
    ("algorithms/updates/average.py", "received + (x - sent)", "received + 0.5 * (x - sent)", EXACT),
    # u <- beta*u + (a - xbar)/lr ; a <- a - alpha*lr*u
    ("algorithms/updates/slow_momentum.py", "torch.sub(a, mean, out=mean)", "torch.sub(mean, a, out=mean)", EXACT),
    ("algorithms/updates/slow_momentum.py", "add_(d, alpha=1 / lr)", "add_(d, alpha=1.0)", EXACT),
    ("algorithms/updates/slow_momentum.py", "u.mul_(beta)", "u.mul_(1 - beta)", EXACT),
    ("algorithms/updates/slow_momentum.py", "alpha=self.lr * lr", "alpha=lr", EXACT),
    ("algorithms/updates/slow_momentum.py", "alpha=self.lr * lr", "alpha=self.lr", EXACT),
    ("algorithms/updates/slow_momentum.py", "a.sub_(d, alpha=self.lr)", "a.add_(d, alpha=self.lr)", EXACT),
    ("algorithms/updates/slow_momentum.py", "if lr == 0:", "if False:", EXACT),
    ("algorithms/updates/slow_momentum.py", "quiesces_others = True", "quiesces_others = False", EXACT),
    # m <- mu*m + Delta ; a <- a - eta*(Delta + mu*m)
    ("algorithms/updates/outer_step.py", "torch.sub(a, mean, out=mean)", "torch.sub(mean, a, out=mean)", EXACT),
    ("algorithms/updates/outer_step.py", "mul_(self.momentum).add_(delta)", "add_(delta)", EXACT),
    ("algorithms/updates/outer_step.py", "delta.add_(m, alpha=self.momentum)", "delta.add_(m)", EXACT),
    ("algorithms/updates/outer_step.py", "delta.add_(m, alpha=self.momentum)", "m", EXACT),
    ("algorithms/updates/outer_step.py", "a.sub_(delta, alpha=self.lr)", "a.sub_(delta)", EXACT),
    # x <- mix*x + (1-mix)*a
    ("algorithms/updates/outer_step.py", "alpha=1 - mix", "alpha=mix / 2", EXACT),
    ("algorithms/updates/outer_step.py", "mix: float = 0.5", "mix: float = 0.4", EXACT),
    # means, slices, schedules, delays
    ("buckets.py", "torch.full((), count, dtype=total.dtype", "torch.full((), count + 1, dtype=total.dtype", EXACT),
    ("buckets.py", "        total += x\n", "        total -= x\n", EXACT),
    ("algorithms/schedules.py", "(step - self.offset) % self.period == 0", "(step - self.offset) % self.period == 1", EXACT),
    ("algorithms/schedules.py", "step > self.start and", "step >= self.start and", SCHEDULES),
    ("algorithms/schedules.py", "step <= self.end and", "step < self.end and", EXACT),
    ("algorithms/schedules.py", "and not self.skipped(step)", "", EXACT),
    ("engine/parameter_rounds.py", "InFlightRound(step + self.round.delay, Pending", "InFlightRound(step + self.round.delay + 1, Pending", EXACT),
    ("engine/recipe_run.py", "r.when(session.step + 1)\n\n        def announce", "r.when(session.step)\n\n        def announce", EXACT),
    ("engine/driver.py", "        session.share(session.state())\n", "", EXACT),
    ("algorithms/exchanges/mean.py", "combine(link.reduce_scatter(message, owners))", "link.reduce_scatter(message, owners)", EXACT),
    ("engine/parameter_rounds.py", 'if self.round.optimizer_state == "reset"', "if False", EXACT),
    ("algorithms/compile.py", 'if r.optimizer_state == "average"', "if False", EXACT),
    ("engine/parameter_rounds.py", "self._after.after_step(x, state, clock)", "pass", OWN),
    ("engine/messages.py", "at = present or (self._link.size, self._link.rank)", "at = 1, self._link.rank", OWN),
    # lo = 1/(out_degree + 1) ; x <- lo*x + sum of received ; w likewise ; z = x/w
    ("algorithms/updates/push_sum.py", "div_(clock.out_degree + 1)", "div_(clock.out_degree + 2)", CONSERVED),
    ("algorithms/updates/push_sum.py", "div_(clock.out_degree + 1)", "div_(2)", EXACT),
    ("algorithms/exchanges/push.py", "at = clock.worker, clock.workers, clock.executed", "at = clock.worker, clock.workers, 0", MORE),
    ("algorithms/updates/push_sum.py", "return x.mul_(float(w))", "return x", CONSERVED),
    ("algorithms/updates/push_sum.py", "x.mul_(w)  # x = w*z", "pass", EXACT),
    ("algorithms/updates/push_sum.py", "x.div_(w)  # z = x/w", "pass", EXACT),
    ("algorithms/updates/push_sum.py", "add_(x, alpha=float(state", "add_(x, alpha=0.5 * float(state", CONSERVED),
    ("algorithms/updates/push_sum.py", 'add_(clock.weight)', "add_(1 - clock.weight)", CONSERVED),
    ("algorithms/updates/push_sum.py", 'return total.div_(float(state["w"].add_(clock.weight)))', 'state["w"].add_(clock.weight)\n        return total', CONSERVED),
    ("algorithms/updates/push_sum.py", "if averaged:", "if not averaged:", EXACT),
    ("algorithms/updates/push_sum.py", 'state["w"].fill_(1.0)', "pass", CONSERVED),
    ("algorithms/exchanges/push.py", "alpha=share", "alpha=1.0", EXACT),
    ("algorithms/exchanges/push.py", "if weighted else share", "if weighted else 1.0", EXACT),
    ("algorithms/exchanges/push.py", "link.size, clock.executed, clock.seed", "link.size, 0, clock.seed", EXACT),
    ("engine/messages.py", "clock = replace(clock, weight=float(state[weight]))", "pass", CONSERVED),
    # x_i <- sum_j W_ij x_j (late: x <- x + (W y - y))
    ("algorithms/updates/mix.py", "alpha=1 - clock.weight", "alpha=clock.weight", CONSERVED),
    ("algorithms/updates/mix.py", "mixed.add_(x).sub_(sent)", "mixed.add_(x).add_(sent)", CONSERVED),
    ("algorithms/updates/mix.py", "mixed.add_(x).sub_(sent)", "mixed", CONSERVED),
    ("algorithms/topology.py", "1.0 / (1 + max(", "1.0 / (1 + min(", TOPOLOGY),
    ("algorithms/topology.py", "1.0 / (1 + max(", "1.0 / (2 + max(", TOPOLOGY),
    # x <- x - (beta/n)*(x - a) ; a <- (1-beta)*a + beta*mean(x before) ; x <- (1-p)*x + p*a
    ("algorithms/updates/elastic.py", "self.beta / clock.workers", "-self.beta / clock.workers", CONSERVED),
    ("algorithms/updates/elastic.py", "self.beta / clock.workers", "self.beta", CONSERVED),
    ("algorithms/updates/elastic.py", "received.to(a.dtype), self.beta)", "received.to(a.dtype), -self.beta)", CONSERVED),
    ("algorithms/updates/elastic.py", "received.to(a.dtype), self.beta)", "received.to(a.dtype), self.beta / clock.workers)", CONSERVED),
    ("algorithms/updates/elastic.py", 'x.lerp_(state["anchor"].to(x.dtype), self.pull)', 'x.lerp_(state["anchor"].to(x.dtype), -self.pull)', EXACT),
    ("algorithms/recipes.py", "Elastic(beta, pull / period)", "Elastic(beta, pull)", CONSERVED),
    # a <- a + n*(mean(x) - a)
    ("algorithms/updates/elastic.py", "a.lerp_(mean, clock.workers)", "a.lerp_(mean, 1)", EXACT),
    ("algorithms/updates/elastic.py", "a.lerp_(mean, clock.workers)", "a.lerp_(mean, -clock.workers)", EXACT),
    # x <- (1-drift)*x + drift*leader ; x <- (1-pull)*x + pull*leader ; the lowest score leads
    ("algorithms/updates/leader_pull.py", "x.lerp_(received, self.pull)", "x.lerp_(received, 1 - self.pull)", EXACT),
    ("algorithms/updates/leader_pull.py", ".to(x.dtype), self.drift)", ".to(x.dtype), -self.drift)", EXACT),
    ("algorithms/updates/leader_pull.py", 'state["leader"].copy_(received)', "pass", EXACT),
    ("algorithms/recipes.py", "LeaderPull(pull, drift / period)", "LeaderPull(pull, drift)", EXACT),
    ("algorithms/recipes.py", "LeaderPull(local_pull, local_drift / inner)", "LeaderPull(local_pull, local_drift)", GROUPS),
    ("algorithms/recipes.py", "if not inner:", "if local_period == 0:", ["tests/engine/test_defaults.py"]),
    ("algorithms/recipes.py", "Unless(every(group_period), over_all)", "every(group_period)", TRAFFIC),
    ("algorithms/scores.py", "torch.argmin", "torch.argmax", LEADER),
    ("algorithms/scores.py", "values.nan_to_num(nan=math.inf)", "values", LEADER),
    ("algorithms/scores.py", "[-window:]", "[:window]", LEADER),
    ("algorithms/scores.py", "DECAY * (self._decrease or 0.0) + (1 - DECAY)", "DECAY * (self._decrease or 0.0) + DECAY", LEADER),
    ("algorithms/scores.py", "DECAY * (self._decrease or 0.0) + (1 - DECAY)", "(1 - DECAY)", LEADER),
    ("algorithms/scores.py", "(before - local(p)) * local(p.grad)", "(local(p) - before) * local(p.grad)", LEADER),
    ("algorithms/scores.py", "float(values.mean())", "float(values[0])", LEADER),
    ("engine/driver.py", "run.scores.skip_step()", "pass", LEADER),
    ("engine/driver.py", "or bound.skip(optimizer):", "or True:", JOINT),
    ("engine/joint_optimizer.py", "known = sum(owner == number for owner, _ in self._groups)", "known = 0", JOINT),
    ("engine/joint_optimizer.py", "if p in optimizer.state:", "if True:", JOINT),
    ("engine/joint_optimizer.py", "        hook(self, (self,), {})\n\n    def _after", "        if not self._done:\n            hook(self, (self,), {})\n\n    def _after", JOINT),
    ("engine/joint_optimizer.py", "            self._done.clear()\n", "            pass\n", JOINT),
    ("checkpoints/training_state.py", "members(bound) != members(one):", "False:", JOINT),
    ("engine/channel.py", "exchange.whole or update.whole", "exchange.whole", OWN_ALGORITHM),
    ("engine/parameter_rounds.py", "shapes=clock.shapes[index : index + 1]", "shapes=clock.shapes", OWN_ALGORITHM),
    # graphs
    ("algorithms/topology.py", "(rank + j * scale) % n for", "(rank - j * scale) % n for", TOPOLOGY),
    ("algorithms/topology.py", "base ** (k % (_log(base, n - 1) + 1))", "base ** (k % (_log(base, n - 1) + 2))", TOPOLOGY),
    ("algorithms/topology.py", "base ** (k % (_log(base, n - 1) + 1))", "base ** (k % (_log(base, n) + 1))", TOPOLOGY),
    ("algorithms/topology.py", "(rank + hop) % n for hop in (1, -1)", "(rank + hop) % n for hop in (-1, 1)", TOPOLOGY),
    ("algorithms/topology.py", "for sign in (1, -1)]", "for sign in (-1, 1)]", TOPOLOGY),
    ("algorithms/topology.py", "(k * self.peers + j)", "(k + j)", TOPOLOGY),
    ("algorithms/topology.py", "(1 + power for power in powers[1:])", "(power - 1 for power in powers[1:])", TOPOLOGY),
    ("algorithms/topology.py", "[2**i for i in range(_log(2, n - 1) + 1)]", "[2**i for i in range(_log(2, n - 1))]", TOPOLOGY),
    ("algorithms/topology.py", '2 if name == "directed_linear" else 1', "1", TOPOLOGY),
    ("algorithms/topology.py", "or (r - rank) % 2)", "or True)", TOPOLOGY),
    ("algorithms/topology.py", 'f"{seed},{n},{k},{r}"', 'f"{seed},{n},{r}"', TOPOLOGY),
    ("algorithms/topology.py", "if rank in out[r]} for", "if r in out[rank]} for", TOPOLOGY),
    # what may go on with another number of workers
    # CommOptimizer: a period of 4 is 4; observe, pull, then communicate; copies and saved state
    ("compat/dist_optimizer.py", "self.counter >= self.comm_period", "self.counter >= self.comm_period - 1", COMM),
    ("compat/dist_optimizer.py", "self.comm_train_step()\n            self.counter = 0", "self.comm_train_step()", COMM),
    ("compat/dist_optimizer.py", "self.dist_train_step()\n        self.local_pulling_step()", "self.local_pulling_step()\n        self.dist_train_step()", COMM),
    ("compat/dist_optimizer.py", "self._joined.driver.pull()", "pass", COMM),
    ("compat/dist_optimizer.py", "self._joined.driver.observe()", "pass", COMM),
    ("compat/dist_optimizer.py", "communicate(now=True)", "communicate()", COMM),
    ("compat/dist_optimizer.py", "c, pull=self.local_pulling_strength", "c, pull=0.0", COMM),
    ("compat/dist_optimizer.py", "pull=c, drift=p", "pull=p, drift=c", COMM),
    ("compat/dist_optimizer.py", "restore(saved)", "pass", COMM),
    ("compat/dist_optimizer.py", 'if not fresh:\n                sync.load_state_dict(start["sync"])', "pass", COMM),
    ("compat/dist_optimizer.py", 'self._sync = start["counter"], FRESH_START, sync', "self._sync = 0, FRESH_START, sync", COMM),
    ("compat/dist_optimizer.py", 'self.counter, self._unfollowed = start["counter"], 0', "self._unfollowed = 0", RESUMES),
    ("compat/dist_optimizer.py", 'self._sync.load_state_dict(start["sync"])', "pass", RESUMES),
    ("compat/dist_optimizer.py", "self._sync, self._start = None, start\n            self.join()", "pass", COMM),
    ("compat/dist_optimizer.py", "except BaseException:\n            sync.detach()", "except BaseException:", COMM),
    ("compat/dist_optimizer.py", "0 < share < 1", "False", COMM),
    ("compat/dist_optimizer.py", "set(sizes) != {world.size}", "False", COMM),
    ("compat/dist_optimizer.py", "set(sizes) != {world.size}", "self.world_size != world.size", DIFFER),
    ("compat/dist_optimizer.py", "(*own, *self.of_optimizer())", "own", COMM),
    ("compat/dist_optimizer.py", "claim(self.local_optimizer, sync)", "pass", COMM),
    ("engine/driver.py", "if not self._in_step:\n            self.begin", "if False:\n            self.begin", SKIPS),
    ("compat/comm_optimizer.py", "_step_supports_amp_scaling = True  #", "_never = True  #", SKIPS),
    ("compat/comm_optimizer.py", "if float(found):", "if False:", COMM),
    ("compat/comm_optimizer.py", "inner.grad_scale, inner.found_inf = scale, found", "inner.grad_scale, inner.found_inf = None, found", COMM),
    ("compat/comm_optimizer.py", "if scale is not None:", "if False:", COMM),
    ("compat/comm_optimizer.py", "and not self._loss_reported:", "and True:", COMM),
    ("compat/comm_optimizer.py", "dist.report_loss(loss)", "pass", COMM),
    ("compat/comm_optimizer.py", "self._loss_reported = False\n", "pass\n", COMM),
    ("compat/comm_optimizer.py", "self.optimizer.add_param_group(param_group)", "super().add_param_group(param_group)", COMM),
    ("compat/comm_optimizer.py", "self.optimizer.zero_grad(set_to_none)", "self.optimizer.zero_grad()", COMM),
    ("compat/comm_optimizer.py", "state = state if changed is None else changed", "pass", COMM),
    # a checkpoint on disk is whole, or not there
    ("checkpoints/saving.py", "        all_ranks.do(write_files)\n", "        write_files()\n", SAVING),
    ("checkpoints/saving.py", "    all_ranks.do(commit)\n", "    commit()\n", SAVING),
    ("checkpoints/saving.py", "except (OSError, ValueError):  # all", "except BaseException:  # all", SAVING),
    ("checkpoints/saving.py", "serial < manifest.serial", "serial <= manifest.serial", SAVING),
    ("checkpoints/saving.py", "for serial, _ in prepared) + 1", "for serial, _ in prepared)", SAVING),
    ("checkpoints/manifest.py", "serial = max(manifest.serial", "serial = min(manifest.serial", SAVING),
    ("checkpoints/rank_file.py", "        os.fsync(opened.fileno())\n    foreign", "    foreign", SAVING),
    ("checkpoints/rank_file.py", "archive.testzip()", "None", LOADING),
    ("checkpoints/rank_file.py", 'payload.get("token") != manifest.token', "False", LOADING),
    ("checkpoints/loading.py", "                    restore()\n", "                    pass\n", LOADING),
    ("links/simulated.py", 'if name == "MT19937" and not keeps_gaussian:', "if True:", LINKS),
    ("links/simulated.py", "ctypes.string_at(self._address, self.BYTES) == self._memory", "True", LINKS),
    ("checkpoints/random_state.py", '    torch.set_rng_state(saved["torch"])\n', "", LOADING),
    # SlowMoDistributedDataParallel
    ("compat/slowmo_arguments.py", "(*(skipped if average else base), slow)", "(*base, slow)", ["tests/compat/test_slowmo_ddp.py", "-k", "less"]),
    ("compat/slowmo_arguments.py", "(*(skipped if average else base), slow)", "(*skipped, slow)", SLOW),
    ("compat/slowmo_arguments.py", "local or owners is not None or self", "owners is not None or self", SLOW),
    ("compat/slowmo_arguments.py", "!= (0.0, 1.0)", "!= (0.0, 2.0)", SLOW),
    ("compat/fairscale.py", "base if nodes > 1 else ()", "base", USE),
    ("compat/fairscale.py", "-(-slowmo_num_shards // nprocs_per_node)", "slowmo_num_shards", SLOW),
    ("compat/fairscale.py", "if nprocs_per_node > 1:\n            rounds", "if False:\n            rounds", SLOW),
    ("compat/slowmo_arguments.py", "max(synch_freq, 1),) * 2 if overlap", "1,) * 2 if overlap", USE),
    ("compat/slowmo_arguments.py", "if not manager.is_regular_graph():", "if False:", USE),
    ("compat/slowmo_arguments.py", "RoundedAverage(dtypes.pop()) if half", "RoundedAverage(dtypes.pop()) if False", USE),
    ("compat/slowmo_binding.py", "self._driver.load_here(self.waiting), None", "None, None", SLOW_RESUME),
    ("compat/slowmo_binding.py", "self._common_start = sums(held)", "pass", USE),
    ("compat/slowmo_binding.py", "            self._follow(optimizer)\n\n    def _bind(", "            pass\n\n    def _bind(", USE),
    ("compat/slowmo_binding.py", "            p.copy_(values)\n        self._bind(optimizer)", "            pass\n        self._bind(optimizer)", USE),
    ("compat/slowmo_binding.py", "if self._driver.run.reweighted:", "if False:", SLOW_RESUME),
    ("compat/slowmo_binding.py", "self._versions() != self._seen_version", "False", USE),
    ("compat/fairscale.py", "        self._binding.copy_masters()\n\n    @torch.no_grad()\n    def copy_masters", "\n    @torch.no_grad()\n    def copy_masters", SLOW_RESUME),
    ("compat/state_keys.py", "if bare >= wrapped:", "if False:", SLOW_RESUME),
    ("engine/driver.py", "loaded.step, loaded.in_step", "loaded.step, False", USE),
    ("engine/driver.py", "check_alike(module=False)", "check_alike()", USE),
    ("algorithms/updates/average.py", "(x - y.to(self.dtype)).add_(received)", "received.to(x.dtype)", USE),
    ("algorithms/exchanges/mean.py", "n if self.shards is None else min(self.shards, n)", "n", SLOW),
    ("compat/gossip_graphs.py", "repeats=True", "repeats=False", SLOW),
    # P = mean(M Q) ; P <- orthonormal(P) ; Q = mean(M^T P) ; result = P Q^T ; e <- M - P Q^T
    ("algorithms/exchanges/low_rank.py", '.add_(state["residual"])', "", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "left = [orthonormal(p) for p, _", "left = [p for p, _", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "[m @ orthonormal(q)", "[m @ q", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "torch.sub(m.of(total), p @ own.mH,", "torch.sub(m.of(total), p @ q.mH,", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "exchange.collect(state, owned, n)", "pass", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", 'padded -= state["residual"]', "pass", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", 'm.of(message).copy_(p @ q.mH)', 'm.of(message).copy_(p @ own.mH)', LOW_RANK),
    ("algorithms/exchanges/low_rank.py", 'state["basis"].copy_(torch.cat([q for q, _ in second]))', "pass", LOW_RANK),
    ("engine/gradient_rounds.py", " or not p.requires_grad]", "]", FROZEN),
    ("engine/gradient_rounds.py", "if local(p).numel()]", "if p.numel()]", ["tests/engine/test_mesh.py", "-k", "without_a_part"]),
    ("links/comm_thread.py", "        thread.close_and_wait(until)\n", "        pass\n", ["tests/links/test_lane.py"]),
    ("engine/saved_state.py", 'InFlightRound(saved["due"], Pending.of(buckets), copies)', 'InFlightRound(saved["due"], Pending.of(buckets))', ["tests/engine/test_resume.py", "-k", "buffers"]),
    ("engine/saved_state.py", 'if saved["sizes"] != sizes and not fewer:', "if False:", ["tests/engine/test_resume.py", "-k", "other_buffers"]),
    ("algorithms/updates/outer_step.py", "if changed or _number_entries(optimizer.state[a]):", "if False:", ["tests/engine/test_loop.py", "-k", "outer_optimizer"]),
    ("engine/channel_set.py", "strict=False)  # some groups are new", "strict=True)", ["tests/engine/test_loop.py", "-k", "momenta_travel"]),
    ("engine/gradient_rounds.py", "            pending.wait_quietly()\n", "            pass\n", FROZEN),
    ("engine/gradient_rounds.py", "values / self._scale_of(name)", "values", FROZEN),
    ("engine/gradient_rounds.py", "partial(self._average, Mean(), flat.whole, {}, clock)", "partial(self._link.mean, flat.whole)", FROZEN),
    ("engine/channel_set.py", "not self.stateful and not any(c.exchange_state for c in self.all)", "not self.stateful", FROZEN),
    ("engine/channel_set.py", "        if not self.vary:\n", "        if False:\n", FROZEN),
    ("engine/parameter_rounds.py", "        if self.set.vary and self._can_select_later:\n", "        if False:\n", BUFFERS),
    ("engine/parameter_rounds.py", "        for tensor, copy in copied:\n            overwrite(copy, tensor)\n", "", BUFFERS),
    ("engine/channel_set.py", "if (t.shape, t.dtype) == (copy.shape, copy.dtype)", "if True", BUFFERS),
    ("engine/channel_set.py", "t.detach().clone() for k, t in group.items()", "t.detach() for k, t in group.items()", BUFFERS),
    ("engine/comparison.py", "return None not in values and (", "return (", BUFFERS),
    ("algorithms/exchanges/low_rank.py", "self.rank * (rows + columns) < rows * columns", "len(shape) > 1", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "-len(flat) % exchange.multiple(n)", "0", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "if not bool(mean.isfinite().all()):", "if False:", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "(p / largest)", "(p)", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", "partial(torch.autocast, total.device.type, enabled=False)", "torch.no_grad", LOW_RANK),
    ("algorithms/exchanges/low_rank.py", 'torch.sub(m.of(total), own, out=', "torch.sub(m.of(total), 0 * own, out=", LOW_RANK),
    ("algorithms/recipes.py", "replace(low, when=after(start, low.when))", "low", LOW_RANK),
    ("engine/saved_state.py", "or now.dim() > 1", "", LOW_RANK),
    # v = m - r + b*e ; e <- v - Q(v) ; mean = r + b*o + mean(Q(v)) ; o <- w - Q(w) ; r <- r + Q(w)
    ("algorithms/exchanges/coding.py", 'less = state["reference"][at] if self.relative else None', "less = None", CODED),
    ("algorithms/exchanges/coding.py", "else self.feedback * residual", "else residual", CODED),
    ("algorithms/exchanges/coded.py", 'mean.add_(state["lag"], alpha=self.feedback)', "pass", CODED),
    ("algorithms/exchanges/coded.py", 'mean.add_(state["reference"][own])', "pass", CODED),
    ("algorithms/exchanges/coded.py", 'less = state["reference"][own][elements] if self.relative else None', "less = None", CODED),
    ("algorithms/exchanges/coded.py", 'state["residual"].copy_(residual)  # e <- v - q\n                state["lag"].copy_(w)', 'state["lag"].copy_(w)', CODED),
    ("algorithms/exchanges/coded.py", 'state["lag"].copy_(w)', 'state["lag"].add_(w)', CODED),
    ("algorithms/exchanges/coding.py", "codec.decode(payload, len(x), x, add=True)", "codec.decode(payload, len(x), x)", CODED),
    ("algorithms/exchanges/coding.py", "x += codec.decode", "codec.decode", CODED),
    ("algorithms/exchanges/coding.py", "generator, less, self._residual(state, at), out)", "generator, less, None, out)", CODED),
    ("algorithms/exchanges/coding.py", "generator, less, self._residual(state, at), out)", "generator, less, self._residual(state, slice(0, stop - start)), out)", CODED),
    ("algorithms/exchanges/coded.py", "                save_residuals()", "                pass", CODED),
    ("algorithms/exchanges/coded.py", '            state["reference"].fill_(math.nan)', "            pass", CODED),
    ("algorithms/exchanges/coding.py", "elif r == order[0]:  # encode", "else:  # encode", CODED),
    ("algorithms/exchanges/coding.py", "                if failure:\n                    payload[:, part].fill_(NOT_FINITE)", "", CODED),
    ("algorithms/exchanges/coding.py", "if r == order[0]:  # the last", "if r == order[-1]:  # the last", CODED_LINKS),
    ("algorithms/exchanges/coded.py", "                rows[rank, part].fill_(NOT_FINITE)", "                pass", CODED),
    ("algorithms/exchanges/coding.py", 'f", counting from element {start}"', '""', CODED),
    ("engine/gradient_rounds.py", "each = min(least * LEAST_BYTES", "each = min(-(-total // CODED_BUCKETS)", CODED),
    ("engine/gradient_rounds.py", "LEAST_BYTES), 1)", "LEAST_BYTES), 0)", AUTO),
    ("candidates.py", "seconds <= (present - HALF) * facts.compute", "seconds <= present * facts.compute", AUTO),
    ("algorithms/exchanges/coded.py", "            for r, part, elements in suspects:\n                add(r, part, elements)", "", CODED),
    ("algorithms/exchanges/coding.py", "        for part, elements in suspects:\n            self.codec", "        for part, elements in ():\n            self.codec", CODED),
    ("algorithms/exchanges/coding.py", "raise_if_nonfinite(rows[:, split.end], failure)\n        for part", "raise_if_nonfinite(rows[:, split.last], failure)\n        for part", CODED),
    ("algorithms/exchanges/coding.py", "                out.fill_(NOT_FINITE)\n            else", "                pass\n            else", CODED),
    ("links/collectives.py", "own[part].copy_(mine[part])", "pass", CODED_LINKS),
    ("engine/saved_state.py", "if not bool(value.isfinite().all()):", "if False:", CODED),
    ("engine/loading.py", "if mine is None and self.run.session.sharded:", "if False:", SHARDS),
    ("engine/saved_state.py", "where, mean - lacking) + lacking", "where, mean) + lacking", LAST),
    ("engine/saved_state.py", "if not owned and isinstance(source, Others):", "if False:", LAST),
    ("algorithms/compile.py", "replace(r, over=\"world\") if over_workers else r", "r", OWN_ALGORITHM),
    ("engine/driver.py", "            self.run.detach()  # else", "            pass  # else", OWN_ALGORITHM),
    ("engine/driver.py", "            self.session.optimizer.reset()", "            pass", JOINT),
    ("engine/saved_state.py", "mean - lacking) + lacking", "mean)", POOLED),
    ("engine/saved_state.py", "    if not own:\n", "    if True:\n", POOLED),
    ("engine/saved_state.py", "if worker < source.workers]", "if True]", POOLED),
    ("engine/saved_state.py", ".mean().to(first.dtype)", "[0].to(first.dtype)", POOLED),
    ("links/comm_thread.py", "if before is not None and not before.done():", "if False:", LANE),
    ("links/comm_thread.py", "                self._error = labeled\n            raise labeled\n        self._checking", "                pass\n            raise labeled\n        self._checking", LANE),
    ("links/comm_thread.py", "pending.error if isinstance(pending.error, Exception) else None", "None", LANE),
    ("links/collectives.py", "self._post_all(x.unbind(), rows, ready=fill is None, joins=overlaps)", "self._post_all(x.unbind(), rows, joins=overlaps)", CODED_LINKS),
    ("links/collectives.py", "self._wait(transfer, r, part.stop * itemsize)", "pass", CODED_LINKS),
    ("links/wire.py", "size, size if ready else -1, fd", "size, size, fd", WIRE),
    ("links/wire.py", "ctypes.memmove(self.messages, before, ctypes.sizeof(before))", "pass", WIRE),
    ("links/wire.py", "x.nbytes, traffic.latest.get((r, comes), -1)", "x.nbytes, -1", WIRE),
    ("links/wire.py", "            connections.traffic = None\n", "            pass\n", WIRE),
    ("links/wire.py", "self._wait_for_all(frames.ALL_SENT)", "self._wait_for_all(frames.ALL)", WIRE),
    ("links/frames.py", "m for m in messages[:enough] if until == ALL or not m.comes", "m for m in messages[:enough] if not m.comes", WIRE),
    ("links/wire.c", "!(sent && messages[i].comes) && unfinished", "!messages[i].comes && unfinished", WIRE),
    ("links/collectives.py", "scratch = Scratch() if self._lent else self._scratch", "scratch = self._scratch", OVERLAPPING),
    ("links/collectives.py", "                transfer.wait_sent()\n", "                pass\n", OVERLAPPING),
    ("links/tcp.py", "float(seconds.max()) >= FAR_SECONDS", "True", OVERLAPPING),
    ("links/wrapped.py", "            amount = Cost(0, 0)\n", "            pass\n", OVERLAPPING),
    ("links/wrapped.py", "self.link.overlapping if self.overlaps else None", "self.link.overlapping", OVERLAPPING),
    ("engine/gradient_rounds.py", "link is None or len(self.channels) == 1", "True", OVERLAPPING),
    ("predict.py", "[*reversed(range(begun))]", "[*range(begun)]", PREDICT),
    ("predict.py", "                    arrive[k] = now + way", "                    arrive[k] = now", PREDICT),
    ("engine/overlap.py", "return 1 if largest <= SMALL_BYTES else 2", "return 1", [*PREDICT, *OVERLAPPING]),
    ("engine/overlap.py", "            except NotFiniteError as error:  #", "            except ZeroDivisionError as error:  #", OVERLAPPING),
    ("engine/gradient_rounds.py", "        if self.broken:\n            self._comm", "        if False:\n            self._comm", OVERLAPPING),
    ("links/wire.py", "connections.before_messages(idle)", "pass", CONGESTION),
    ("links/frames.py", "return before is None or is_complete(before)", "return True", LINKS),
    ("engine/drift.py", "if len(counts) < 2:", "if True:", DRIFT),
    ("engine/drift.py", "for value in digests if value)", "for value in digests)", DRIFT),
    ("engine/drift.py", "slots.append(\"owner\")", "pass", DRIFT),
    ("engine/drift.py", "exchange.agrees and heard_by_all", "heard_by_all", DRIFT),
    ("engine/drift.py", "executed * since, since", "0, since", DRIFT),
    ("engine/drift.py", "self.x_digest = 0\n        self._looking", "self._looking", DRIFT),
    ("engine/drift.py", 'self.x_digest = state["digest"]', "self.x_digest = 0", DRIFT),
    ("engine/driver.py", "self.run.forget_digests()\n        loaded.complete()", "loaded.complete()\n        self.run.forget_digests()", DRIFT),
    ("links/elastic/replay.py", "self.digests = record.digests", "pass", DRIFT),
    ("engine/comparison.py", "data.numel(), crc)", "data.numel(), 0)", DRIFT),
    ("links/wire.py", "{r: frames.FIELDS.unpack_from(got)[3] for", "{r: 0 for", DRIFT),
    ("links/collectives.py", "if mean.dtype != own.dtype:", "if False:", LINKS),
    ("links/wire.py", "traffic.messages[index].size if size is None else size", "traffic.messages[index].size", WIRE),
    ("candidates.py", "seconds / facts.compute + HALF)", "seconds / facts.compute)", AUTO),
    ("algorithms/exchanges/coded.py", "alpha=n)  # the mean", "alpha=1)  # the mean", CODED),
    ("algorithms/exchanges/coded.py", '            state["lag"].zero_()\n\n    def collect', "            pass\n\n    def collect", CODED),
    ("algorithms/exchanges/coding.py", "if ranks := nonfinite_rows(rows):", "if (ranks := nonfinite_rows(rows)) and False:", CODED),
    ("algorithms/exchanges/coding.py", "clock.worker, direction", "direction", CODED),
    ("algorithms/exchanges/coded.py", 'state["residual"].copy_(residual)  # e <- v - q\n        if self.relative', "pass\n        if self.relative", CODED),
    ("engine/gradient_rounds.py", "values.mul_(scale / self.scale)", "pass", CODED),
    ("engine/gradient_rounds.py", "used = [p for p, share in zip(params, had.tolist(), strict=True) if share > 0]", "used = list(params)", CODED),
    ("engine/messages.py", "if bool(failed.any()) and error is None", "if False", CODED),
    ("engine/session.py", "first = [p for p in own if not hooked or id(p) in wanted]", "first = [p for p in params if id(p) in known]", CODED),
    ("engine/driver.py", "            run.rebase()", "            pass", CODED),
    ("codecs/integers.py", "value=-1)  # s * q", "value=-0.5)  # s * q", KERNELS),
    ("codecs/codec.py", "x.sub_(less)", "x.add_(less)", KERNELS),
    ("codecs/codec.py", "out += decoded", "pass", KERNELS),
    ("codecs/kernels.py", "_address(less), _address(plus)", "_address(plus), _address(less)", KERNELS),
    ("codecs/compiled.py", " and kernel.encodes", "", KERNELS),
    ("links/frames.py", "message.comes and before < HEADER_BYTES", "False", WIRE),
    ("links/connect.py", "if rank not in self._callers:", "if False:", WIRE),
    ("links/frames.py", "bool(messages[until].done >= enough)", "False", WIRE),
    ("links/frames.py", "within - (end - start), 0", "0, 0", WIRE),
    ("links/frames.py", "if message.comes and _check(", "if False and _check(", WIRE),
    ("links/frames.py", "if got[FIELDS.size :] !=", "if False and got[FIELDS.size :] !=", WIRE),
    ("links/frames.py", "        except ssl.SSLError:\n            return CHANGED, 0\n", "", SECURED),
    ("links/frames.py", "secured[m.fd].pending() > 0", "False", SECURED),
    ("links/handshake.py", "if not hmac.compare_digest", "if False and hmac.compare_digest", HEALTH),
    ("links/handshake.py", "secret_of(hello.key) or ", "", HEALTH),
    ("links/handshake.py", "if hello.purpose != purpose:", "if False:", HEALTH),
    ("links/handshake.py", "role + hello + challenge + text", "hello + challenge + text", HEALTH),
    ("links/health.py", "verdict.finder < self.verdict.finder", "True", HEALTH),
    ("links/texts.py", "if c.isprintable()", "if True", HEALTH),
    ("links/health.py", "except RecursionError:", "except KeyError:", HEALTH),
    ("links/talks.py", "self._strangers >= self._most", "False", HEALTH),
    ("links/talks.py", "if t.deadline <= now", "if False", HEALTH),
    ("links/talks.py", "if kind in _reasons or", "if", FUZZED),
    ("links/talks.py", "isinstance(error, (RefusedError, ssl.SSLError))", "isinstance(error, RefusedError)", FUZZED),
    ("links/tls.py", "    context.sslsocket_class = _Socket\n", "", FUZZED),
    ("links/elastic/tls_store.py", "                log_refused(address, error)\n", "", FUZZED),
    ("links/wire.py", "if traffic.failure is not None:", "if False:", FUZZED_MESSAGES),
    ("links/quorum/tcp.py", "if not 0 <= int(size) <= MOST_TEXT:", "if False:", FUZZED_MESSAGES),
    ("links/quorum/tcp.py", "except Exception as error:  # else", "except LinkError as error:  # else", FUZZED_MESSAGES),
    ("links/quorum/tcp.py", 'if what != "arrive":', "if False:", FUZZED_MESSAGES),
    ("links/quorum/tcp.py", "self._report(str(error), error.ranks)  #", "raise error  #", QUORUM_PROCESSES),
    ("engine/quorum_rounds.py", "if sent is None:", "if True:", QUORUM_PROCESSES),
    ("engine/quorum_rounds.py", "if failed and sent.pending.done()", "if False and sent.pending.done()", QUORUM_FAILS),
    ("engine/quorum_rounds.py", "codes and size < whole.nbytes", "codes", QUORUM),
    ("engine/quorum_rounds.py", "since + 1, closing.number + 1", "since + 2, closing.number + 1", QUORUM),
    ("engine/quorum_rounds.py", "        if failed:\n", "        if False:\n", QUORUM),
    ("algorithms/exchanges/quorum.py", "less=base, plus=residual", "less=base", QUORUM),
    ("algorithms/exchanges/quorum.py", "        residual.copy_(v)\n", "", QUORUM),
    ("algorithms/exchanges/radial.py", "torch.sub(reference, mean", "torch.add(reference, mean", NEWEST_ROWS),
    ("algorithms/exchanges/radial.py", "        link.mean(lengths)\n", "        pass\n", NEWEST_ROWS),
    ("algorithms/exchanges/radial.py", ".mul_(math.sqrt(len(piece)))", "", NEWEST),
    ("algorithms/exchanges/radial.py", "torch.where(cancel, 0, length / now)", "length / now", NEWEST),
    ("algorithms/exchanges/radial.py", "piece.div_(torch.where(length > 0, length, 1))", "piece.div_(length)", NEWEST),
    ("algorithms/exchanges/radial.py", ">= LEAST_BITS * codec.grain", ">= 0", NEWEST),
    ("algorithms/exchanges/radial.py", "max(itemsize, LENGTH_BYTES)", "itemsize", NEWEST),
    ("algorithms/exchanges/radial.py", "directions.to(message.dtype) if self.codec is None else", "", NEWEST),
    ("algorithms/exchanges/radial.py", "if not bool(lengths.isfinite().all())", "if False", NEWEST),
    ("algorithms/exchanges/quorum.py", "_weighted(lengths, weights) * fraction", "_weighted(lengths, weights)", QUORUM_ROWS),
    ("algorithms/exchanges/quorum.py", "        mean = _weighted(changes, weights)\n", "        mean = _weighted(changes, [1 / len(weights)] * len(weights))\n", QUORUM_ROWS),
    ("algorithms/updates/muon_step.py", "(state[\"anchor\"] - x)", "(x - state[\"anchor\"])", NEWEST_ROWS),
    ("algorithms/updates/muon_step.py", "step.add_(m, alpha=self.momentum)", "step.add_(m)", NEWEST_ROWS),
    ("algorithms/updates/muon_step.py", "return o.mul_(ratio).mul_(most)", "return o.mul_(most)", NEWEST_ROWS),
    ("algorithms/updates/muon_step.py", "alpha=of[3]", "alpha=of[4]", NEWEST_ROWS),
    ("algorithms/updates/muon_step.py", "div_((trace * most).sqrt())", "div_(most.sqrt())", NEWEST_ROWS),
    ("algorithms/updates/muon_step.py", "g.div_(trace) @ g", "g @ g", NEWEST_ROWS),
    ("device.py", "setting.fp32_precision = \"ieee\"", "pass", NEWEST),
    ("device.py", "                setting.fp32_precision = before", "                pass", NEWEST),
    ("device.py", "setting.fp32_precision = \"none\"  #", "pass  #", NEWEST),
    ("device.py", "                if not self._inside:\n", "                if True:\n", NEWEST),
    ("device.py", "(backends.cuda if self._cuda else backends.mkldnn)", "backends.mkldnn", NEWEST),
    ("device.py", "torch.autocast(device.type, enabled=False)", "contextlib.nullcontext()", NEWEST),
    ("algorithms/updates/muon_step.py", "g = factor @ g @ factor", "g = factor @ g", NEWEST_ROWS),
    ("algorithms/updates/muon_step.py", "torch.where(x == 0, 1, x)", "x", NEWEST_ROWS),
    ("algorithms/updates/muon_step.py", "MARGIN = 1.01", "MARGIN = 1.0", NEWEST),
    ("algorithms/updates/muon_step.py", "most = _nonzero(s.abs().amax())  #", "most = torch.ones(())  #", NEWEST),
    ("algorithms/updates/muon_step.py", "            start += shape.numel()\n", "", NEWEST_ROWS),
    ("algorithms/diloco_recipes.py", "3 * period if first is None", "6 * period if first is None", NEWEST_ROWS),
    ("algorithms/diloco_recipes.py", "6 * period if second is None", "3 * period if second is None", NEWEST_ROWS),
    ("buckets.py", "in SECOND_MOMENTS) == self.second", "in SECOND_MOMENTS) != self.second", NEWEST_ROWS),
    ("engine/parameter_rounds.py", "if self.in_flight and not self.round.update.replaces:", "if False:", NEWEST_ROWS),
    ("muon.py", "p.dim() == 2 and id(p) not in kept", "p.dim() == 2", NEWEST),
    ("algorithms/exchanges/quorum.py", "[s / sum(steps) for", "[1 / len(steps) for", QUORUM_ROWS),
    ("algorithms/exchanges/quorum.py", "y = anchor.clone()", "y = torch.zeros_like(anchor)", QUORUM),
    ("algorithms/exchanges/quorum.py", "after = before.clone()", "after = before", QUORUM),
    ("algorithms/exchanges/quorum.py", 'state["residual"].sub_(', 'state["residual"].add_(', QUORUM_FAILS),
    ("links/quorum/tcp.py", "if self._abandoned:", "if False:", ["tests/links/test_quorum_processes.py", "-k", "leaves"]),
    ("links/quorum/tcp.py", "if number * tensor.nbytes > room.nbytes:", "if False:", FUZZED_MESSAGES),
    ("links/quorum/syncer.py", "            if rank:\n                sent", "            if True:\n                sent", QUORUM_FAILS),
    ("engine/recipe_run.py", "self.quorum.settle()", "pass", QUORUM_PROCESSES),
    ("links/congestion.py", "old or estimate < self._best / 2", "old", CONGESTION),
    ("links/congestion.py", "old or estimate < self._best / 2", "estimate < self._best / 2", CONGESTION),
    ("links/congestion.py", "if tcp_info(fd, _STATE) != (_OPEN,):", "if False:", CONGESTION),
    ("links/frames.py", "_left_to_send(messages, i) > LEFT", "_left_to_send(messages, i) > 0", CONGESTION),
    ("links/frames.py", "m.moved > 0 if m.after < 0 else", "True if m.after < 0 else", CONGESTION),
    ("links/wire.c", "left_to_send(messages, count, i) > LEFT", "left_to_send(messages, count, i) > 0", CONGESTION),
    ("links/wire.c", "if (left_to_send(messages, count, sent) > 0)", "if (0)", CONGESTION),
    ("links/wire.c", "if (!messages[k].comes && messages[k].fd == messages[i].fd)", "if (k == i)", CONGESTION),
    ("links/frames.py", "not m.comes and m.fd == fd)", "m is messages[index])", CONGESTION),
    ("probe.py", "seconds >= LONG and not _steady(taken)", "seconds >= LONG", AUTO),
    ("probe.py", "seconds >= LONG and not _steady(taken)", "False", AUTO),
    ("probe.py", "again = min(again, timed(link, device, size))", "pass", AUTO),
    ("probe.py", "burst = again > CLEARLY * seconds", "pass", AUTO),
    ("processor.py", "1 + max(self.ready, 0.0) / self.running", "1e9", ["tests/engine/test_processor.py"]),
    ("predict.py", "replace(facts, compute=max(facts.compute - stretch, facts.compute / 2))", "facts", ["tests/engine/test_processor.py"]),
    ("candidates.py", "matrices > elements / 2", "True", ["tests/engine/test_processor.py"]),
    ("links/congestion.py", "self._best * self.KEPT", "self._best", CONGESTION),
    ("links/congestion.py", "            self._since = now", "            pass", CONGESTION),
    ("links/congestion.py", "for name in (_ANEW, LONG):", "for name in (LONG,):", CONGESTION),
    ("links/congestion.py", "return LONG if round_trip >= LONG_SECONDS and", "return LONG if", CONGESTION),
    ("links/quorum/port.py", "if len(roster) != len(paces):", "if False:", FUZZED_MESSAGES),
    ("links/forks.py", "        thing.close()  #", "        pass  #", HEALTH),
    ("links/long_wait.py", "or now - self._last > PAUSE_SECONDS", "", HEALTH),
    ("links/long_wait.py", "what != self._what or", "", HEALTH),
    ("links/call_guard.py", "self.rank == min(r for r in range(self.size) if r not in late)", "True", HEALTH),
    ("engine/ending.py", "self.step == self.complete or", "", ENDING),
    ("engine/ending.py", "return self._late or not due or not due[-1]", "return True", ENDING),
    ("engine/ending.py", 'getattr(sys, "last_value", None) is None', "True", ENDING),
    ("links/metered.py", "MEASUREMENT if self.measures else collective", "collective", MEASURED),
    ("links/call_guard.py", "min(silence, self._transport.heard(r))", "silence", HEALTH),
    ("links/call_guard.py", "self._transport.heard(r)) >= UNREACHABLE", "0.0) >= UNREACHABLE", HEALTH),
    ("links/addresses.py", "found = named or", "found =", WIRE),
    ("links/addresses.py", "if found is None or", "if", WIRE),
    ("links/wire.py", "traffic is not None and not (joins and traffic.failure is None)", "False", WIRE),
    ("engine/messages.py", "if result.lent and not reads_only:", "if False:", CODED),
    ("links/wire.py", "quiet_since + self._timeout - now", "self._timeout", WIRE),
    ("links/connect.py", "                    check()\n", "", WIRE),
    ("links/wire.py", "quiet_since = now if outcome", "quiet_since = quiet_since if outcome", WIRE),
    ("algorithms/exchanges/coding.py", "(OVERLAP_FACTOR if overlaps else 1)", "1", CODED),
    ("algorithms/exchanges/coding.py", "clock.delay or not self.relative", "not self.relative", CODED),
    ("engine/flat_gradients.py", "view.zero_()", "pass", ["tests/engine/test_loop.py"]),
    ("engine/flat_gradients.py", "self._padding.zero_()", "pass", CODED),
    ("candidates.py", " if p >= SHORTEST", "", ["tests/engine/test_defaults.py"]),
    ("candidates.py", 'return "rounds"', "return self.text", AUTO),
    ("auto.py", "replace(self._facts, compute=compute, carry=carry, contention=contention)", "self._facts", AUTO),
    ("auto.py", "if self._facts_loaded or not", "if not", AUTO),
    ("auto.py", "max(LATER, self.now.recipe[0].delay)", "LATER", AUTO),
    ("auto.py", "spans = sorted(spans)[:1]", "pass", AUTO),
    ("engine/gradient_rounds.py", "self._average_dense(params, joined=False)", "pass", CODED),
    ("engine/gradient_rounds.py", "self._params, self.channels, self._unsent = params, channels, {}", "self.channels, self._unsent = channels, {}", CODED),
    ("engine/gradient_rounds.py", "        self.refresh(keep=True)\n", "", CODED),
    ("engine/gradient_rounds.py", "p.requires_grad or (keep and id(p) in before)", "p.requires_grad", ["tests/engine/test_loop.py", "-k", "frozen"]),
    ("engine/gradient_rounds.py", "self.refresh(keep=self._active() and not self._averaged)", "self.refresh()", LOOP),
    ("engine/gradient_rounds.py", "        self._end()\n        self.refresh()\n", "        self._end()\n", LOOP),
    ("engine/gradient_rounds.py", "if torch._C._current_autograd_node() is not None:", "if False:", LOOP),
    ("engine/driver.py", "        if not closure:\n            run.check_gradients()\n", "", MESH),
    ("engine/driver.py", "        if self._closure:\n            run.check_gradients()\n", "        if self._closure:\n", MESH),
    ("attach.py", "        reshard(model)\n", "", MESH),
    ("engine/driver.py", "run.refresh(keep=True)", "run.refresh()", LOOP),
    ("engine/nonfinite.py", "bool(failed.any())", "error", MESH),
    ("engine/parameter_rounds.py", "            self._context.nonfinite.check(self.exchange, self.label(step)).wait()\n", "", MESH),
    ("engine/in_flight.py", "self.checked.wait()", "pass", MESH),
    ("engine/parameter_rounds.py", "            self._context.comm.call(partial(self.link.broadcast, x), self.label(step))\n", "", CODED),
    ("engine/recipe_run.py", "running.start_here(step)", "pass", CODED),
    ("engine/session.py", "self._order or list(self.model.parameters())", "list(self.model.parameters())", MESH),
    ("engine/consensus.py", "        reshard(session.model)\n        session.holds_consensus", "        session.holds_consensus", MESH),
    ("engine/consensus.py", "    reshard(session.model)\n    for running", "    for running", MESH),
    ("advisor/choices.py", 'name = "int8" if shortest >= CODECS["int8"].nbytes(LENGTH) else "int4"', 'name = "int4"', ADVISE),
    ("auto.py", "sum(self._first) if hurry else first", "first", AUTO),
    ("auto.py", "sum(self._first) if hurry else first", "sum(self._first)", AUTO),
    ("auto.py", ">= SLOW_SECONDS", "< SLOW_SECONDS", AUTO),
    ("auto.py", "facts, _ = self._measure()  # the network may", "pass  # the network may", AUTO),
    # seconds = max(c + sum f*exposed, min(sum f*T/U, c + sum f*(T + w))) ; best = min(seconds * steps)
    ("predict.py", "end = max(end, since) +", "end = end +", AUTO),
    ("predict.py", "(buckets - 1) * amount.messages", "0 * amount.messages", AUTO),
    ("predict.py", "seconds(amount, buckets)", "seconds(amount)", PREDICT),
    ("predict.py", "* r.update.models", "", PREDICT),
    ("predict.py", "LATER + 1, LATER + HORIZON + 1", "1, HORIZON + 1", PREDICT),
    ("engine/gradient_rounds.py", "if exchange.whole:", "if False:", PREDICT),
    ("algorithms/exchanges/low_rank.py", "return self.codec is not None", "return True", PREDICT),
    ("advisor/measure.py", "max(m_1 - compute, 0.0)", "0.0", ADVISE),
    ("advisor/measure.py", "compute = max(alone, statistics.harmonic_mean(computes))", "compute = computes[0]", ADVISE),
    ("advisor/tune/tuning.py", "return loss > losses", "return loss >= losses", TUNE),
    ("advisor/tune/tuning.py", "TrialState.PRUNED, TrialState.WAITING)", "TrialState.PRUNED)", TUNE),
    ("predict.py", "max(seconds + work - overlap, 0.0)", "seconds + work", AUTO),
    ("predict.py", "0.0 if r.delay or isinstance(r.exchange, Gossip) else share", "0.0 if r.delay else share", PREDICT),
    ("predict.py", "(1 / UTILIZATION - 1) * load.sending if overlapped else 0.0", "0.0", AUTO),
    ("predict.py", "min(least, facts.compute + serial)", "least", AUTO),
    ("predict.py", "sending, seconds + work + turning, 0.0", "sending, seconds, 0.0", PREDICT),
    ("predict.py", " - 8 * last / net.rate / 2", "", PREDICT),
    ("predict.py", "min(seconds, amount.seconds(facts.net(*names).rate, 0.0))", "seconds", PREDICT),
    ("predict.py", "math.sqrt(min(synchronous, 1.0))", "min(synchronous, 1.0)", PREDICT),
    ("predict.py", "min(self.burst, amount.bytes)", "self.burst", PREDICT),
    ("predict.py", "elements(r, facts, n, share) // share", "elements(r, facts, n, share)", PREDICT),
    ("predict.py", "multiple(n) * carriers", "multiple(n)", PREDICT),
    ("predict.py", "return 1 / facts.ranks", "return 1.0", PREDICT),
    ("predict.py", "(facts.workers - 1) * facts.ranks / (", "facts.workers * facts.ranks / (", PREDICT),
    ("advisor/advice.py", "seconds(part, buckets)", "seconds(part)", PREDICT),
    ("advisor/tune/tuning.py", "except NotFiniteError:", "except ZeroDivisionError:", TUNE),
    ("advisor/tune/runs.py", "self.workload.optimizer(self.workload.model())", "torch.optim.SGD(self.workload.model().parameters())", TUNE),
    ("advisor/measure.py", "BACKWARD if math.isnan(pace.backward)", "BACKWARD if not pace.backward", ADVISE),
    ("algorithms/parse.py", "ast.Call(_of_laconic(node), [], [])", "_of_laconic(node)", ADVISE),
    ("links/rank_sets.py", "agree(world.gather, problem)\n", "pass\n", FAILURE),
    ("links/rank_sets.py", "agree(world.gather, problem, failed)", "pass", FAILURE),
    ("attach.py", 'check_choice("buffers", buffers, get_args(Buffers))', "pass", FAILURE),
    ("attach.py", "scaler is not None and scaler.is_enabled() else None", "scaler is not None else None", CODED),
    ("attach.py", "            driver.use_scaler(scaler)\n", "", AUTO),
    ("engine/driver.py", "scaling:\n            self._switcher.align_scaler()\n", "scaling:\n            pass\n", AUTO),
    ("engine/switching.py", "            self._align_optimizer_state()\n", "", AUTO),
    ("engine/switching.py", "states.pop(p, None)", "pass", AUTO),
    ("engine/switching.py", "        run.take_in()\n", "", AUTO),
    ("links/comm_thread.py", "before.join()", "pass", LANE),
    ("links/comm_thread.py", "pending.fail(error)\n\n    def _settle", "pass\n\n    def _settle", LANE),
    ("predict.py", "names = (\"peers\", \"workers\") if", "names = (\"workers\", \"workers\") if", PREDICT),
    ("advisor/advice.py", "(1 - 1 / self.frequency)", "1", PREDICT),
    ("advisor/advice.py", "self.saved > max(self.backward, self.node)", "self.pays_there", PREDICT),
    ("advisor/fit.py", "weights = 1 / error.clamp(min=LEAST)", "pass", ADVISE),
    ("advisor/fit.py", "max(least, start) / messages", "max(least, start)", ADVISE),
    ("advisor/advice.py", "self.speedup / self.steps", "self.speedup", ADVISE),
    ("advisor/advice.py", "row.steps_from.startswith(\"assumed\")", "False", ADVISE),
    ("advisor/advice.py", "(_kind(best), *FLATTERED)", "(_kind(best),)", ADVISE),
    ("advisor/bench.py", "            agree(self.world.gather, problem, gathered[:, 0])", "            pass", FAILS),
    ("links/tcp.py", "dist.destroy_process_group(group)", "pass", FAILS),
    ("advisor/advice.py", "choose(Auto(), facts, None, {})", "choose(Auto(0.9), facts, None, {})", ADVISE),
    ("auto.py", "min(seconds[text] * steps[text] for", "min(seconds[text] for", AUTO),
    ("auto.py", "before = self.now if self.choices or differ else None", "before = self.now", AUTO),
    ("auto.py", "before = self.now if self.choices or differ else None", "before = self.now if self.choices else None", AUTO),
    ("auto.py", "self._probed or self._comm.call(", "self._comm.call(", AUTO),
    ("auto.py", "        self._probed = None\n        differ", "        differ", AUTO),
    ("auto.py", "self.now = start(facts.workers, facts)", "pass", AUTO),
    ("engine/driver.py", "self.run = RecipeRun(session, settings.arrange(session.policy.recipe))", "pass", AUTO),
    ("candidates.py", "max(SLOW, 2 * sending)", "SLOW", AUTO),
    ("candidates.py", "max(SLOW, 2 * sending)", "2 * sending", AUTO),
    ("candidates.py", "local(period, period, LOCAL[period])", "local(period, 1, LOCAL[period])", AUTO),
    ("auto.py", "self._traffic, each = traffic, seconds / sent", "pass", AUTO),
    ("auto.py", "if any(not 1 / CHANGE < now / before < CHANGE for now, before in pairs if now * before)", "if False", AUTO),
    ("auto.py", "if choices or self._link.size > 1:", "if True:", AUTO),
    ("engine/loading.py", "self._undo.append(policy.undo())", "pass", AUTO),
    ("engine/switching.py", "check_alike(module=False, chosen=True)", "check_alike(module=False)", AUTO),
    # on an accelerator: each wait, and each copy
    ("links/staged.py", "copied.pop((r, part.start)).synchronize()", "copied.pop((r, part.start))", STAGED),
    ("links/staged.py", "        copied.synchronize()\n        return memory if", "        return memory if", STAGED),
    ("links/staged.py", "self._copy(x.reshape(-1), host).synchronize()", "self._copy(x.reshape(-1), host)", STAGED),
    ("links/staged.py", "(copies, rows, order)\n            pieces", "(copies, rows, order[1:])\n            pieces", LATE),
    ("links/comm_thread.py", "after.wait(self._stream)", "pass", LATE),
    ("links/comm_thread.py", "self.ready.wait(self._thread.current_stream())", "pass", LATE),
    ("links/comm_thread.py", "                self._settle()  # what", "                # what", LATE),
    ("links/comm_thread.py", "            self._settle()  # the caller", "            # the caller", LATE),
    ("links/elastic/replay.py", "        if parts is not None:  # also", "        if parts is not None and output is None:  # also", LATE),
    ("engine/batch_check.py", "recorded, self._fingerprint = self._fingerprint, None", "recorded = self._fingerprint", LATE),
    ("buckets.py", "n = torch.full((), count, dtype=total.dtype, device=total.device)", "n = count", LATE),
    ("device.py", "tensor.record_stream(kind.current_stream(tensor.device))", "pass", LATE),
    ("engine/gradient_rounds.py", "self._stream.record_event().wait(now)", "pass", LATE),
    ("engine/offload.py", "            copied.synchronize()\n", "            pass\n", LATE),
    ("engine/offload.py", "self._copied[name].wait(self._kind.current_stream(self._device))", "pass", LATE),
    ("engine/offload.py", "        copies.copy_back()\n", "", LATE),
    # e <- decay*e + g ; q = topk(DCT(e)) ; e <- e - q ; g <- sign(mean(q))
    ("algorithms/exchanges/demo.py", ", alpha=self.decay)", ")", DEMO),
    ("algorithms/exchanges/demo.py", "torch.sub(e, _inverse(tilings, sent)", "torch.sub(e, _inverse(tilings, mean)", DEMO),
    ("algorithms/exchanges/demo.py", "torch.sub(e, _inverse(tilings, sent), out", "torch.sub(e, 0, out", DEMO),
    ("algorithms/exchanges/demo.py", "senders.clamp_(min=1)", "len(rows)", DEMO),
    ("algorithms/exchanges/demo.py", "if not _finite(mean):", "if False:", DEMO),
    ("algorithms/exchanges/demo.py", "min(self.k, size)", "size", DEMO),
    ("algorithms/updates/sign.py", "mean.sign_()", "mean", DEMO),
    ("codecs/dct.py", "down @ tiles @ across.mT", "down.mT @ tiles @ across.mT", DEMO),
    ("codecs/dct.py", "c[0] /= 2**0.5", "pass", DEMO),
    ("codecs/dct.py", "c[quarters % (2 * n) == n] = 0.0", "pass", DEMO),
    ("codecs/dct.py", "d in range(min(n, most), 0, -1)", "d in range(1, n + 1)", DEMO),
    ("codecs/dct.py", "torch.autocast(x.device.type, enabled=False)", "torch.no_grad()", DEMO),
    # m <- mu*m + eta*mean(a - x) + gamma*(a - mean(a)) ; a <- a - m
    ("algorithms/updates/noloco.py", "[a - x, a]", "[x - a, a]", NOLOCO),
    ("algorithms/updates/noloco.py", "delta.add_(a - y, alpha=own)", "delta.add_(a - y)", NOLOCO),
    ("algorithms/updates/noloco.py", "anchor.add_(a, alpha=own)", "anchor.add_(a)", NOLOCO),
    ("algorithms/updates/noloco.py", "own = state[\"anchor\"], state[\"m\"], 1 - clock.weight", "own = state[\"anchor\"], state[\"m\"], 0.5", NOLOCO),
    ("algorithms/updates/noloco.py", "m.mul_(self.momentum)", "m", NOLOCO),
    ("algorithms/updates/noloco.py", "add_(apart, alpha=self.gamma)", "sub_(apart, alpha=self.gamma)", NOLOCO),
    ("algorithms/updates/noloco.py", "a.sub_(m)", "a - m", NOLOCO),
    ("algorithms/updates/noloco.py", '"private", "m": "private"', '"everywhere", "m": "everywhere"', NOLOCO),
    # D = Delta/n + late ; a <- outer(a, D) ; late <- mean - Delta/n
    ("algorithms/updates/eager.py", "x.copy_(a - x)", "x.copy_(x - a)", EAGER),
    ("algorithms/updates/eager.py", "delta.to(a.dtype) / clock.workers", "delta.to(a.dtype)", EAGER),
    ("algorithms/updates/eager.py", "late.add_(own)  # D", "late.copy_(own)", EAGER),
    ("algorithms/updates/eager.py", "torch.neg(own, out=late)", "late.zero_()", EAGER),
    ("algorithms/updates/eager.py", "torch.neg(own, out=late)", "torch.neg((a - x) / clock.workers, out=late)", EAGER),
    ("algorithms/updates/eager.py", "add_(m, alpha=self.momentum)", "add_(m)", EAGER),
    ("algorithms/updates/eager.py", 'x.copy_(state["anchor"])', "pass", EAGER),
    ("engine/parameter_rounds.py", "if self._after_send is not None:", "if False:", EAGER),
    ("algorithms/recipe_parts.py", "mean_over_workers(codec, relative=False)\n    return (Round(every(period), Eager", "mean_over_workers(codec)\n    return (Round(every(period), Eager", EAGER),
    # bytes
    ("links/cost.py", "return Cost(2 * (n - 1) * size // n", "return Cost(2 * n * size // n", LEDGER),
    ("links/cost.py", "return Cost(size - own, min", "return Cost(size, min", LEDGER),
    ("links/cost.py", "return Cost((n - 1) * own, min", "return Cost(n * own, min", LEDGER),
    ("links/cost.py", "return Cost(peers * size", "return Cost(size", TRAFFIC),
    ("links/wrapped.py", "size_of(x) * len(source)", "size_of(x) * len(to)", TRAFFIC),
    ("links/cost.py", "8 * self.bytes / rate", "self.bytes / rate", LEDGER),
    # the consensus is the mean of x at rest; other workers go on from it
    ("engine/parameter_rounds.py", "step, copies, write=self._sends_part_of_x", "step, copies, write=True", CONSENSUS),
    ("engine/parameter_rounds.py", "pop(0), step, write=self._sends_part_of_x", "pop(0), step, write=True", CONSENSUS),
    ("engine/parameter_rounds.py", "step, copies, write=self._sends_part_of_x", "step, copies, write=False", CONSENSUS),
    ("engine/parameter_rounds.py", "pop(0), step, write=self._sends_part_of_x", "pop(0), step, write=False", CONSENSUS),
    ("engine/parameter_rounds.py", "        for flight in self.in_flight:\n            self._fold(flight, step, copies", "        for flight in ():\n            self._fold(flight, step, copies", CONSENSUS),
    ("engine/synchronizer.py", "def consensus(self, *, mean: bool = True)", "def consensus(self, *, mean: bool = False)", CONSENSUS),
    ("engine/synchronizer.py", "def finish(self, *, mean: bool = True)", "def finish(self, *, mean: bool = False)", CONSENSUS),
    ("engine/driver.py", 'session.refuse_in_consensus("sync.finish()")', "pass", CONSENSUS),
    ("engine/switching.py", 'session.refuse_in_consensus("sync.switch()")', "pass", CONSENSUS),
    ("engine/session.py", '        if self.holds_consensus is not None:\n            raise ValueError(\n                f"{call}', '        if False:\n            raise ValueError(\n                f"{call}', CONSENSUS),
    ("engine/regroup.py", "self._total += weight", "self._total += 1", REGROUP),
    ("engine/regroup.py", "if k >= len(params) or rank in firsts:", "if True:", REGROUP_REPLICAS),
    ("engine/regroup.py", 'if not saved["flights"] and not', "if not", REGROUP),
    ("engine/parameter_rounds.py", "self._quiesce(averaged=not weights)", "self._quiesce(averaged=True)", REGROUP),
    ("engine/saved_state.py", "torch.where(count[where] > 0, mean[where].to(default.dtype), default.cpu())", "mean[where].to(default.dtype)", REGROUP),
    ("engine/saved_state.py", "- mean[at]) / count[at]", "- mean[at])", REGROUP),
    ("engine/saved_state.py", "running = running.like(own[\"joined\"])  # begins", "pass  # begins", REGROUP),
    ("engine/saved_state.py", "    if not same:\n        saved, now", "    if False:\n        saved, now", REGROUP),
    ("checkpoints/plan.py", "if same and not lost:", "if same:", REGROUP),
    ("checkpoints/plan.py", "        if rank in self.available:\n            return rank\n", "", REGROUP),
    ("checkpoints/plan.py", "path(source), sync, all_ranks)", "manifest.file(folder, source), sync, all_ranks)", REGROUP),
    ("engine/loading.py", "return _DIFFERENT_WEIGHTS if bool(apart[2]) else None", "return None", REGROUP),
    ("engine/loading.py", "regroup=load_model is not None", "regroup=False", REGROUP),
    ("engine/loading.py", "        load_model(None)\n", "", REGROUP),
    ("algorithms/updates/eager.py", "if torch.equal(x, a.to(x.dtype)):", "if True:", EAGER),
    ("algorithms/updates/eager.py", "if torch.equal(x, a.to(x.dtype)):", "if False:", EAGER),
    ("algorithms/updates/eager.py", "            x.copy_(a)\n", "", EAGER),
    ("algorithms/updates/eager.py", "            late.zero_()\n", "", EAGER),
    # w = b*o + mean(q) ; o <- w - p ; e <- v - q + n*(o elsewhere) ; c = combine(r + p)
    ("algorithms/exchanges/coded.py", "w[: len(lag)].add_(lag, alpha=self.feedback)", "w[: len(lag)].add_(lag)", REPLICATED),
    ("algorithms/exchanges/coded.py", "w[: len(lag)].add_(lag, alpha=self.feedback)", "pass", REPLICATED),
    ("algorithms/exchanges/coded.py", "if elsewhere.any():  # the slices", "if False:  # the slices", REPLICATED),
    ("algorithms/exchanges/coded.py", 'state["residual"][at].add_(elsewhere, alpha=n)', 'state["residual"][at].add_(elsewhere)', REPLICATED),
    ("algorithms/exchanges/coded.py", "                    elsewhere.zero_()", "                    pass", REPLICATED),
    ("algorithms/exchanges/coded.py", 'combine(mean.add_(state["reference"]))', 'combine(mean).add_(state["reference"])', REPLICATED),
    ("algorithms/exchanges/coded.py", "padding = -length % self.multiple(n)", "padding = -length % self.codec.grain", REPLICATED),
    ("algorithms/exchanges/coded.py", "each = -(-length // self.multiple(n)) * self.codec.grain", "each = -(-length // n)", REPLICATED),
    # a message that was made for other peers ; pieces that are lost
    ("algorithms/exchanges/push.py", "clock.out_degree / len(peers) if peers else 0.0", "1.0", LOST_MESSAGES),
    ("algorithms/exchanges/push.py", "weight = own * clock.weight", "weight = clock.weight", LOST_MESSAGES),
    ("algorithms/exchanges/push.py", "total.add_(message, alpha=own)", "pass", LOST_MESSAGES),
    ("algorithms/exchanges/push.py", "_with_weight(message, clock.weight * share)", "_with_weight(message, clock.weight)", LOST_MESSAGES),
    # workers that come and go
    ("links/elastic/view.py", "View(self.epoch + 1,", "View(self.epoch,", VIEWS),
    ("links/elastic/view.py", "(*members, *new)", "(*new, *members)", VIEWS),
    ("links/elastic/view.py", "if m.id not in lost]", "]", VIEWS),
    ("links/elastic/view.py", "if self.place(m.id) is None]", "]", VIEWS),
    ("links/elastic/view.py", "len(set(view.ids)) < len(view.ids)", "False", VIEWS),
    ("links/elastic/view.py", "<= MOST_MEMBERS:", "<= 2 * MOST_MEMBERS:", VIEWS),
    ("links/elastic/registry.py", "store.compare_set(key, instead_of, value)", "store.set(key, value) or store.get(key)", REGISTRY),
    ("links/elastic/registry.py", "if _number(before) < view.epoch:", "if True:", REGISTRY),
    ("links/elastic/registry.py", "found, epoch = view, epoch + 1", "return view", REGISTRY),
    ("links/elastic/registry.py", "or self._first(ABOUT, about) != about:", "or not self._first(ABOUT, about):", REGISTRY),
    ("links/elastic/registry.py", "and self._read(LATEST) is None:", "and False:", REGISTRY),
    ("links/elastic/registry.py", "and self._read(LATEST) is None:", "and True:", REGISTRY),
    ("links/elastic/registry.py", "store.set(ABOUT, about)", "pass", REGISTRY),
    ("links/elastic/registry.py", "and view.epoch != epoch:", "and False:", REGISTRY),
    ("links/elastic/registry.py", "if n not in known}", "if n > max(known, default=0)}", REGISTRY),
    ("links/elastic/registry.py", "if e[0].id not in gone", "if True", REGISTRY),
    ("links/elastic/members.py", "workers // 2 + 1", "workers // 2", MEMBERS),
    ("links/elastic/signs.py", "max(SHORTEST, ROUNDS * self.pace)", "max(SHORTEST, self.pace)", MEMBERS),
    ("links/elastic/signs.py", "ROUNDS * self.pace), LONGEST, self", "ROUNDS * self.pace), self", MEMBERS),
    ("links/elastic/members.py", "silent.keys()) <= len(", "silent.keys()) < len(", MEMBERS),
    ("links/elastic/members.py", "lately = max((", "lately = min((", MEMBERS),
    ("links/elastic/members.py", "lost.keys() - silent.keys()) <=", "lost.keys()) <=", MEMBERS),
    ("links/elastic/members.py", "items() if id in lost)", "items())", MEMBERS),
    ("links/elastic/signs.py", "and since <= self.in_touch", "", MEMBERS),
    ("links/elastic/signs.py", "and since <= self.in_touch", "and False", MEMBERS),
    ("links/elastic/signs.py", "and id in self.active and", "and", MEMBERS),
    ("links/elastic/members.py", 'lost = {self.me.id: "leaves"}', 'lost = {self.me.id: "leaves", **self._lost(view)}', MEMBERS),
    ("links/elastic/signs.py", "answer == health.GONE or left", "answer.missing == 'gone' or left", MEMBERS),
    ("links/elastic/members.py", "if not busy or self._called", "if self._called", MEMBERS),
    ("links/elastic/members.py", "if not busy or self._called.get(m.id, limit) <= limit", "", MEMBERS),
    ("links/elastic/members.py", "if all(health.ask(newcomer.beacon, self.secret).lost for _ in range(QUESTIONS)):", "if False:", MEMBERS),
    ("links/elastic/founding.py", "if registry.secret() != secret:", "if False:", MEMBERS),
    ("links/elastic/founding.py", "all(a == health.GONE for a in answers)", "all(a.lost for a in answers)", MEMBERS),
    ("links/elastic/members.py", "if self._damage != str(error):", "if True:", MEMBERS),
    ("links/elastic/members.py", "self.signs.notes.update([view.farewell])", "pass", MEMBERS),
    ("links/elastic/signs.py", "reached.serial < position.serial", "reached.serial <= position.serial", MEMBERS),
    ("links/elastic/members.py", "if view.epoch <= self.view.epoch:", "if view.epoch < self.view.epoch - 1:", MEMBERS),
    ("links/elastic/members.py", "self.record.position = self.position._replace(left=True)", "pass", MEMBERS),
    ("links/elastic/signs.py", "if start > self._answered.get(id, 0.0) and", "if", MEMBERS),
    ("links/elastic/members.py", "self._remove(\"a thread of this", "print(\"a thread of this", MEMBERS),
    ("links/elastic/founding.py", "if first == number and", "if", MEMBERS),
    ("links/elastic/founding.py", "if registry.strangers & set(latest.ids):", "if False:", MEMBERS),
    ("links/elastic/registry.py", "if program == self.program)", "if True)", REGISTRY),
    ("links/elastic/registry.py", "            self.about(before, instead_of=now)", "            pass", REGISTRY),
    ("links/elastic/feed.py", "elif time.monotonic() - self._stream.moved >= self._patience:", "elif False:", RELAY),
    ("links/elastic/feed.py", "if self._frames and isinstance(self._frames[0], RelayError):", "if False:", RELAY),
    ("engine/newcomers.py", "driver.after_switch.append(self._send_state)", "pass", AUTO_ELASTIC),
    ("engine/newcomers.py", "if start.policy is not None:", "if False:", AUTO_ELASTIC),
    ("auto.py", "if paces.shape[0] // self._ranks != self._workers:", "if False:", AUTO_ELASTIC),
    ("auto.py", "self._announce(PACE)", "pass", AUTO_ELASTIC),
    ("auto.py", "rests = facts.workers == 1 or not facts.compute", "rests = False", AUTO_ELASTIC),
    ("engine/driver.py", "and not follows and", "and", AUTO_ELASTIC),
    ("links/elastic/link.py", "self.members.signs.in_touch, self._began_before = self._began_before, began", "self.members.signs.in_touch = began", MEMBERS),
    ("links/elastic/relay.py", "if not received:", "if False:", RELAY),
    ("links/elastic/relay.py", "lambda key: self._secret", "lambda key: None", RELAY),
    ("links/elastic/relay.py", "                self._ready(self.newcomer)\n", "                pass\n", RELAY),
    ("links/elastic/relay.py", "            View.unpack(text.decode())\n", "            pass\n", RELAY),
    ("links/elastic/relay.py", "and not isinstance(value, bool)", "", RELAY),
    ("links/elastic/mesh.py", "self.view.pack().encode()", "str(self.view.epoch).encode()", ELASTIC_MESH),
    ("links/elastic/mesh.py", "keep, CHECK_SECONDS\n", "keep, 60.0\n", ELASTIC_MESH),
    ("links/elastic/mesh.py", "        except LinkError as error:\n            raise Interrupted", "        except LostError as error:\n            raise Interrupted", ELASTIC_MESH),
    ("links/elastic/relay.py", "self._add(-size_of(vars(frame)))", "pass", RELAY),
    ("links/elastic/relay.py", "if self._waiting > self._limit:", "if False:", RELAY),
    ("links/elastic/relay.py", "min(length - data.tell(), MOST_AT_ONCE)", "length - data.tell()", RELAY),
    ("links/elastic/relay.py", "        self._state = state\n", "", RELAY),
    ("links/elastic/feed.py", "frame.call[:2] == call[:2]", "True", RELAY),
    ("links/elastic/feed.py", "            self._put(error)\n", "            pass\n", RELAY),
    ("links/elastic/feed.py", "                self._check()\n", "                pass\n", RELAY),
    ("engine/newcomers.py", 'return call.step if call.name == GRADIENTS else call.step - 1', "return call.step", RELAY),
    ("engine/newcomers.py", "            self._use(feed.settings_of(session.step))\n", "            feed.settings_of(session.step)\n", NEWCOMERS),
    ("engine/newcomers.py", "_optimizer(session).load_state_dict(state[\"optimizer\"])", "pass", REPLACED),
    # what is known of workers that are gone
    ("engine/reports.py", "max(heard.deal for heard in known.values())", "min(heard.deal for heard in known.values())", REPORTS),
    ("engine/reports.py", "sum(max(h.step - h.sent, 0) for", "sum(max(h.step, 0) for", REPORTS),
    ("engine/reports.py", "if id in gone:", "if False:", REPORTS),
    ("engine/reports.py", "elif known[id].deal == deal:", "else:", REPORTS),
    ("engine/reports.py", "while self._sending and self._sending[0].complete():", "while self._sending:", REPORTS),
    ("engine/reports.py", "self._sent = oldest.step", "self._sent = self._step", REPORTS),
    ("engine/reports.py", "            self._deal, self._ids = deal + 1, list(reports)\n            self._sending.clear()", "            self._deal, self._ids = deal + 1, list(reports)", REPORTS),
    ("engine/parameter_rounds.py", "executed = self.executed - 1 - len(newer)", "executed = self.executed", OWN_ALGORITHM),
    ("engine/regroup.py", ".masked_fill_(equal, 0.0)", "", REGROUP),
    ("links/elastic/members.py", "since = time.monotonic() if self._short is None else self._short[2]", "since = time.monotonic()", MEMBERS),
    ("links/elastic/members.py", "            self._short = None  # they were silent only for a while", "            pass", MEMBERS),
    ("auto.py", "enough = (1 + GAIN) * least + stay * steps[now.text]", "enough = (1 + GAIN) * least", AUTO),
    ("auto.py", "expected(c.recipe, facts) + extra", "predict(c.recipe, facts).seconds + extra", AUTO),
    ("auto.py", "/ max(len(whole), cycle)", "/ len(whole)", AUTO),
    ("probe.py", "seconds - (latency if far else 0.0)", "seconds", AUTO),
    ("probe.py", "        for _ in range(FAR_REPEATS):", "        for _ in range(0):", AUTO),
    ("engine/reports.py", "best if best.deal == deal else best._replace(drawn=nothing)", "best", REPORTS),
    ("engine/reports.py", "self.workers_lost += len(gone)", "self.workers_lost = len(gone)", REPORTS),
    ("engine/reports.py", 'if not base["ids"]:', "if False:", REPORTS),
    # who gets in
    ("links/tls.py", "context.verify_mode = ssl.CERT_REQUIRED", "context.verify_mode = ssl.CERT_NONE", TLS_SETTINGS),
    ("links/tls.py", "context.minimum_version = ssl.TLSVersion.TLSv1_3", "pass", TLS_SETTINGS),
    ("links/tls.py", "        _meet(made)\n", "        pass\n", TLS_SETTINGS),
    ("links/tls.py", "made.server.num_tickets = 0", "pass", TLS_SETTINGS),
    ("links/tls.py", "if any(ssl.cert_time", "if not any(ssl.cert_time", TLS_SETTINGS),
    ("links/elastic/tls_store.py", "connection.settimeout(HELLO_SECONDS)", "connection.settimeout(None)", TLS_STORE),
    ("links/elastic/tls_store.py", "if len(strangers) >= MOST_STRANGERS:", "if False:", TLS_STORE),
    ("links/elastic/tls_store.py", "if length > MOST_BYTES:\n                    return", "if False:\n                    return", TLS_STORE),
    ("links/elastic/tls_store.py", "            client.settimeout(None)\n", "", TLS_STORE),
    ("links/elastic/tls_store.py", "return found if key in self._values else expected", "return found", TLS_STORE),
    ("links/elastic/registry.py", "            except UntrustedError:\n                raise\n", "", TLS_STORE),
    ("links/elastic/registry.py", "if tls_store.probe(host, port, CALL_SECONDS) == tls_store.Probed.TLS:", "if False:", TLS_STORE),
    ("links/elastic/registry.py", "if own != fingerprint:", "if False:", JOB_SECRET),
    ("links/elastic/registry.py", "own = secret.hex() if self._shared is None else self._stored[secret]", "own = secret.hex()", JOB_SECRET),
    ("links/call_guard.py", 'secret = job_secret.derive(shared, "link", salt=secret)', "pass", JOB_SECRET),
    ("links/call_guard.py", "if other != prints[0]:", "if False:", JOB_SECRET),
    ("links/rendezvous.py", "self._note(error)\n                return", "raise", JOB_SECRET),
    ("links/rendezvous.py", "self._note(error)\n            else:", "raise\n            else:", JOB_SECRET),
    ("links/rendezvous.py", "if self._problem is not None:\n            raise", "if False:\n            raise", JOB_SECRET),
    ("links/rendezvous.py", 'if said != f"{how} {own}":', "if False:", JOB_SECRET),
    ("links/job_secret.py", "len(p).to_bytes(8, \"big\") + p", "p", JOB_SECRET),
    ("links/addresses.py", "for port in several:", "for port in reversed(several):", LISTENERS),
    ("links/addresses.py", "_numeric(ADDRESS) or", "", LISTENERS),
    ("links/addresses.py", "_numeric(BIND) or host", "host", LISTENERS),
    ("links/addresses.py", "if variable == ADDRESS and", "if False and", LISTENERS),
    ("links/addresses.py", 'and scope == "00"', "", LISTENERS),
    ("cli/keys.py", "((private, 0o600)", "((private, 0o644)", KEYS),
    ("cli/keys.py", "if os.path.lexists(directory / name):", "if (directory / name).exists():", KEYS),
    ("cli/keys.py", "or key.public_key() != certificate.public_key()", "", KEYS),
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


def unusable(mutation: tuple[str, str, str, list[str]]) -> str:
    """Why a change cannot be tried: its text or one of its tests is not there."""
    name, old, _, tests = mutation
    file = ROOT / "src" / "laconic" / name
    if not file.is_file():
        return f"no file {name}"
    if old not in file.read_text():
        return f"not in {name}: {old!r}"
    paths = [path for path in tests if path.startswith("tests/")]
    return ", ".join(f"no file {path}" for path in paths if not (ROOT / path).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description="Change each formula and see that a test fails.")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="changes of files whose path, or that of a test, contains it",
    )
    only = parser.parse_args().only
    chosen = [m for m in MUTATIONS if any(text in path for path in (m[0], *m[3]) for text in only)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(survives, chosen))
    for (name, old, new, _), result in zip(chosen, results, strict=True):
        change = f"{old.splitlines()[0]!r} -> {new.splitlines()[0] if new else ''!r}"
        print(f"{name}: {change}: {result}")
    escaped = sum(not result.startswith("caught") for result in results)
    print(f"{len(results) - escaped} of {len(results)} changes were caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
