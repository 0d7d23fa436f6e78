"""The names of `problem` and of the first recipes, for tests that import them from here."""

from tests.references.gradients import DDP as ddp  # noqa: F401, N811
from tests.references.outer import adam_outer, diloco, slowmo  # noqa: F401
from tests.references.parameters import local_sgd, post_local_sgd  # noqa: F401
from tests.references.problem import *  # noqa: F403
