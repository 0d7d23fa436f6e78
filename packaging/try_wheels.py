"""Install each wheel of dist/ in an empty environment without a compiler, and use it.

    make try-wheels
    make try-wheels TRY="--python python3.10 --python python3.13 --torch 2.7.1 --torch 2.13.0"

Every Python is tried with every version of torch. Without a torch for it (--torch none), only what
needs none is tried: importing, the command line's help, and loading the C libraries.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = """
from laconic import native
from laconic.codecs import kernels
from laconic.links import frames
print(kernels.library() is not None and frames.library() is not None)
"""
WITHOUT_TORCH = """
import ctypes, laconic
from pathlib import Path
for file in Path(laconic.__file__).parent.rglob("*.so"):
    ctypes.CDLL(str(file)).laconic_version()
"""
SAME = """
import laconic, torch
from torch import nn

def worker(rank):
    torch.manual_seed(0)
    model = nn.Linear(300, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, laconic.diloco(2, codec="int4")):
        for step in range(6):
            x = torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().double().sum().item()

print(laconic.simulate(worker, workers=2)[0].hex())
"""


def run(command, environment, **more):
    """Run a command, and return what it prints."""
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, **more)
    if ended.returncode:
        raise SystemExit(f"{command} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout.strip()


def try_wheel(wheel, python, torch, folder):
    """Print a line about ``wheel``, and return the result of a training, if there is a torch."""
    run([python, "-m", "venv", folder], dict(os.environ))
    own = folder / "bin"
    environment = {"PATH": str(own), "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
    pip = [own / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if torch == "none":
        run([*pip, "--no-deps", wheel], environment)
        run([own / "python", "-c", WITHOUT_TORCH], environment)
        result = ""
    else:
        run([*pip, f"torch=={torch}", "numpy", wheel], environment)
        run([own / "python", "-m", "pip", "check"], environment)
        compiled = run([own / "python", "-c", LIBRARIES], environment) == "True"
        assert compiled == ("manylinux" in wheel.name), "the libraries are there and load"
        result = run([own / "python", "-c", SAME], environment)
        torchrun = [own / "torchrun", "--standalone", "--nproc-per-node", "2"]
        run([*torchrun, ROOT / "examples" / "minimal.py"], environment, cwd=folder)
    seconds = []
    for command in ([own / "python", "-c", "import laconic"], [own / "laconic", "--help"]):
        run(command, environment)
        start = time.perf_counter()
        run(command, environment)
        seconds.append(time.perf_counter() - start)
    version = run([own / "python", "-V"], environment)
    print(
        f"{version}, torch {torch}, {wheel.name}: import {seconds[0]:.2f} s, "
        f"laconic --help {seconds[1]:.2f} s",
        flush=True,
    )
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="default: this one")
    parser.add_argument("--torch", action="append", help="default: 2.13.0")
    given = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        raise SystemExit("there are no wheels in dist/: run make wheels")
    for python in given.python or [sys.executable]:
        for torch in given.torch or ["2.13.0"]:
            results = set()
            for wheel in wheels:
                with tempfile.TemporaryDirectory() as folder:
                    results.add(try_wheel(wheel, python, torch, Path(folder)))
            assert len(results) == 1, "with the C libraries and without, results have the same bits"


if __name__ == "__main__":
    main()
