"""The example on CPUs: two sites, of one and of two ranks (FSDP2). Run by ``make torchtitan``."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, and documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("inputs")
    words = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    draw = random.Random(0)
    (folder / "text").mkdir()
    with (folder / "text" / "data.json").open("w") as out:
        for _ in range(200):
            text = " ".join(str(draw.randrange(1000)) for _ in range(80))
            out.write(json.dumps({"text": text}) + "\n")
    return folder


def train(inputs: Path, out: Path, ranks: int, *options: object) -> list[dict[int, Any]]:
    """What each rank recorded, by step."""
    out.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
        ranks,
        *(HERE / "on_cpu.py", "--module", "on_cpu", "--config", "small"),
        *("--parallelism.data-parallel-replicate-degree", 2, "--period", 5, "--debug.seed", 7),
        *("--training.steps", 10, "--training.seq-len", 64, "--training.local-batch-size", 2),
        *("--training.mixed-precision-param", "float32", "--hf-assets-path", inputs),
        *("--dataloader.dataset-path", inputs / "text", "--dump-folder", out),
        *options,
    ]
    own = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(inputs / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ | own,
        cwd=out,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    files = [out / f"rank{rank}.jsonl" for rank in range(ranks)]
    return [
        {row["step"]: row for row in map(json.loads, f.read_text().splitlines())} for f in files
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sites(inputs: Path, tmp_path: Path, ranks: int) -> None:
    saving = "--checkpoint.enable", "--checkpoint.interval", "6", "--checkpoint.keep-latest-k", "0"
    runs = train(inputs, tmp_path / "whole", ranks, *saving)
    here, there = runs[0], runs[ranks // 2]  # the same shard, in the two sites
    assert [*here] == [*range(1, 11)]
    same = [step for step in here if here[step]["shard"] == there[step]["shard"]]
    assert same == [5, 10]
    for run in runs:
        sent = [run[step]["sent"] - run[step - 1]["sent"] for step in range(2, 11)]
        rounds = [run[1]["shard_bytes"] if step in (5, 10) else 0 for step in range(2, 11)]
        for step, a, b in zip(range(2, 11), sent, rounds, strict=True):
            assert step == 7 or b <= a < b + 2000, (step, a, b)  # 7: saving sends the consensus
    batches = [batch for run in runs for row in run.values() for batch in row["batches"]]
    assert len(batches) == len(set(batches)) == 10 * ranks

    shutil.copytree(
        tmp_path / "whole" / "checkpoint" / "step-6", tmp_path / "resumed" / "checkpoint" / "step-6"
    )
    resumed = train(inputs, tmp_path / "resumed", ranks, *saving)
    for run, again in zip(runs, resumed, strict=True):
        assert list(again) == [7, 8, 9, 10]
        for step in again:
            for what in ("shard", "batches"):
                assert again[step][what] == run[step][what]
