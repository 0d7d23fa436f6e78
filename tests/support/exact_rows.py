"""Recipes with their references, for tests that name them in this way."""

from tests.support import recipes

NAMES = {
    "ddp": "ddp",
    "local_sgd(4)": "local_sgd",
    "local_sgd(4, delay=2)": "local_sgd(4, delay=2)",
    "local_sgd(4, average)": "local_sgd, average",
    "slowmo(sgp(), 4)": "slowmo(sgp(), 4)",
    "slowmo(sgp(delay=2), 5)": "slowmo(sgp(delay=2), 5)",
    "diloco(4)": "diloco(4)",
    "diloco(4, unsharded)": "diloco(4, unsharded)",
    "easgd(2, 0.5, pull=0.3)": "easgd(2, 0.5, pull=0.3)",
}
ROWS = {
    name: (row.recipe, row.reference(1))
    for name, row in ((name, recipes.ROWS[other]) for name, other in NAMES.items())
    if row.reference is not None
}
