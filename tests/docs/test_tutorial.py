"""The tutorial: its chapters run and hold what they claim, and its pages are of these chapters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from tutorial import cells, naive_ddp
from tutorial.naive_ddp import DataPartitioner, partition_dataset, spawn_and_join, train_alone
from tutorial.toy import FFNet, ToyDataset, benchmark_training, count_parameters

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted(ROOT.glob("tutorial/chapter*.py"))
EMULATED = {"7"}
"""Chapters that emulate hosts, which run in a file of HOSTS (conftest.py)."""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TUTORIAL_SCALE": "0.01", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=230,
    )


def test_the_chapters_run_and_say_that_they_are_scaled() -> None:
    chapters = [number for number in there() if number not in EMULATED]
    ended = python("-m", "tutorial", *chapters)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("scaled to 0.01 of the work") >= len(chapters)


def test_without_a_chapter_all_are_listed_with_their_minutes() -> None:
    ended = python("-m", "tutorial")
    assert ended.returncode == 0, ended.stderr
    assert "python -m tutorial all " in ended.stdout
    rows = re.findall(r"^  (\d)\. .*?  (\w+) minutes?$", ended.stdout, re.M)
    assert [number for number, _ in rows] == there()
    assert ("1", "one") in rows


CHAPTER = """\
# ---
# ---

# %% [markdown]
# # 9. Title
#
# It runs for about one minute.

# %%
import matplotlib.pyplot as plt
from tutorial.toy import ToyDataset, expect, show

# %% tags=["source"]
show(ToyDataset)

# %% [markdown]
# text
# ## A [part](page.md)

# %%
plt.plot([1, 2])
plt.show()
expect(False, "a claim")

# %% [markdown]
# **What to notice.** One [word](glossary.md#word).
#
# ## Exercises

# %% tags=["exercise"]
from tutorial.checks import check

# %% [markdown]
# **1.2** How many?

# %% tags=["exercise"]
print("an answer")

# %% tags=["solution"]
print("the solution")
"""


def test_a_run_prints_titles_notices_and_plots_and_skips_exercises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "PLOTS", tmp_path / "plots")
    monkeypatch.setattr(plt, "show", plt.show)  # restored afterward
    path = tmp_path / "chapter9.py"
    path.write_text(CHAPTER)
    cells.run(path)
    plt.close("all")
    out = capsys.readouterr().out
    parts = (
        "9. Title\n========",
        "source: ToyDataset in tutorial/toy.py",
        "A part\n======",
        f"plot: {tmp_path}/plots/chapter9-1.png",
        "Not in this run: a claim.",
        "What to notice. One word.\n",
        "Exercises: python -m tutorial start 9",
    )
    places = [out.index(part) for part in parts]
    assert places == sorted(places)
    assert (tmp_path / "plots" / "chapter9-1.png").is_file()
    assert "answer" not in out and "solution" not in out


def test_an_error_in_a_chapter_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "chapter8.py"
    path.write_text("# ---\n\n# %% [markdown]\n# # 8. Text\n\n# %%\nx = 1\nx / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        cells.run(path)
    assert raised.traceback[-1].lineno + 1 == 8


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_no_assertion_is_about_measured_time(chapter: Path) -> None:
    """A busy machine must not stop a chapter: claims about times are for `expect`."""
    asserted = re.findall(r"^ *(assert .*)", chapter.read_text(), re.MULTILINE)
    assert asserted
    for line in asserted:
        assert not re.search(r"seconds|taken|rates|waiting|computing|days|speed", line), line


def test_an_unknown_chapter_is_refused() -> None:
    ended = python("-m", "tutorial", "nine")
    assert ended.returncode == 1
    assert (
        ended.stderr == f"python -m tutorial: no chapter 'nine': choose from {', '.join(there())}\n"
    )


def there() -> list[str]:
    return [path.stem.removeprefix("chapter") for path in CHAPTERS]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_page_has_the_chapters_prose_and_code(chapter: Path) -> None:
    """Else make tutorial has to be run again."""
    page = (ROOT / "docs" / "tutorial" / f"{chapter.stem}.md").read_text()
    for cell in chapter.read_text().split("\n# %%")[1:]:
        kind, _, body = cell.partition("\n")
        prose = kind.startswith(" [markdown]")
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if prose else body
        assert text.strip() in page


@pytest.mark.parametrize(
    ("num_hl", "hl_size", "parameters"), [(0, 10, 1_021), (3, 100, 40_501), (0, 100, 10_201)]
)
def test_parameters_of_the_network(num_hl: int, hl_size: int, parameters: int) -> None:
    assert count_parameters(FFNet(input_size=100, num_hl=num_hl, hl_size=hl_size)) == parameters


def test_a_benchmark_returns_nanoseconds_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = FFNet(10, 0, 4)
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    taken = benchmark_training(model, 8, 10, num_samples=64, nb_epochs=2, repeats=3, verbose=False)
    assert len(taken) == 3
    assert all(isinstance(each, int) and each > 0 for each in taken)
    assert not torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [1, 20, 21, 64])
def test_parts_lose_no_sample_and_batches_are_alike_in_number(
    world_size: int, samples: int
) -> None:
    data, batch_size = ToyDataset(4, samples), 3 * world_size
    for epoch in range(2):
        parts = [DataPartitioner(data, world_size).use(i, epoch) for i in range(world_size)]
        dealt = torch.cat([part.indices for part in parts])
        assert sorted(dealt.tolist()) == list(range(samples))
        batches = [
            list(partition_dataset(data, world_size, rank, batch_size, epoch))
            for rank in range(world_size)
        ]
        order = DataPartitioner(data, 1).use(0, epoch).indices
        for number, shares in enumerate(zip(*batches, strict=True)):
            assert sum(share for _, _, share in shares) == pytest.approx(1)
            own = sorted(float(y) for _, ys, _ in shares for y in ys)
            together = order[number * batch_size : (number + 1) * batch_size]
            assert own == sorted(float(data.y[i]) for i in together)


def test_a_partition_refuses_what_cannot_be() -> None:
    data = ToyDataset(4, 10)
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        DataPartitioner(data, 2).use(2)
    with pytest.raises(ValueError, match="a batch of 9 can't be cut into 2 equal parts"):
        next(partition_dataset(data, 2, 0, 9))


def test_processes_compute_what_one_computes_even_when_one_has_nothing_left() -> None:
    options = {"num_samples": 25, "hl_size": 8, "epochs": 2, "dtype": torch.float64}
    alone = torch.tensor(train_alone(**options)["parameters"], dtype=torch.float64)
    for result in spawn_and_join(3, naive_ddp.train, **options):  # 25 = 24 + 1
        got = torch.tensor(result["parameters"], dtype=torch.float64)
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-14)


def test_a_process_that_dies_is_named_and_the_others_end() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0: exit code 3.*rank 1: exit code"):
        spawn_and_join(2, naive_ddp.die, victim=0)


def test_the_command_line() -> None:
    options = ["-s", "2", "-i", "10", "-n", "64", "-d", "1", "-z", "4", "-e", "2", "-v", "1"]
    ended = python("-m", "tutorial.naive_ddp", *options)
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^epoch +(\d+): loss \d\.\d{4}$", ended.stdout, re.M) == ["1", "2"]
    assert "2 processes, " in ended.stdout
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-s", "5"], "5 processes can't share batches of 24 equally"),
        (["-n", "0"], "num_samples must be positive, not 0"),
    ],
)
def test_the_command_line_refuses(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["naive_ddp", *options])
    with pytest.raises(SystemExit) as raised:
        naive_ddp.main()
    assert raised.value.code == 2
    assert said in capsys.readouterr().err
