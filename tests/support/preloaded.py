"""What the fork server imports once, for all processes that are forked from it."""

from __future__ import annotations

import gc

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import laconic  # noqa: F401

gc.freeze()  # left out of every collection of garbage
