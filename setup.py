"""What `pyproject.toml` cannot say: one wheel for all versions of Python.

The C extensions are plain libraries, which `laconic.native` loads with ctypes. They use nothing of
Python's own interface, so their names and the wheel's tag need no version of Python. With
LACONIC_WITHOUT_KERNELS=1 there are none, and the wheel is for every machine.
"""

import os

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.dist import Distribution


class Libraries(build_ext):
    """Names the libraries without the version of Python."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext):
        return ext.export_symbols  # no PyInit_ function


class Wheel(bdist_wheel):
    """Tags the wheel for any version of Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Pure(Distribution):
    """Without C extensions."""

    def has_ext_modules(self):
        return False

    def finalize_options(self):
        super().finalize_options()
        self.ext_modules = []


without = os.environ.get("LACONIC_WITHOUT_KERNELS") == "1"
setup(
    cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel},
    distclass=Pure if without else Distribution,
)
