"""Search a recipe's settings and the learning rate on an emulated network, with Optuna.

Each run adds trials to those in tuning.db, also after an interruption.
"""

import re
import subprocess
import sys
from pathlib import Path

import optuna

TRIALS, SECONDS = 30, 20
LAB = ["laconic", "lab", "--bandwidth", "20mbit", "--latency", "20ms", "--"]
TRAIN = [sys.executable, str(Path(__file__).with_name("train.py"))]


def train(trial):
    period = trial.suggest_categorical("period", [4, 12, 24, 48])
    momentum = trial.suggest_float("momentum", 0, 0.6, step=0.1)
    lr = trial.suggest_float("lr", 1e-3, 3e-2, log=True)
    recipe = f"slowmo(local_sgd({period}), period={max(period, 48)}, momentum={momentum})"
    command = [*LAB, *TRAIN, recipe, str(lr), str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if found := re.search(r"check (\d+): loss (\S+)", line):
                loss = float(found[2])
                trial.report(loss, int(found[1]))
                if trial.should_prune():
                    run.terminate()
                    raise optuna.TrialPruned
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return loss


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="slowmo",
        storage="sqlite:///tuning.db",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(multivariate=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
    )
    study.optimize(train, TRIALS, catch=subprocess.CalledProcessError)
    print(f"lowest loss {study.best_value:.5f} with {study.best_params}")
