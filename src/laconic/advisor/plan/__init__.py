"""The planner: simulate a run of any recipe on a described cluster.

cluster.py   what is described: sites, workers, failures, prices
fields.py    reading that from YAML, JSON or options, with errors that name the field
rounds.py    what a recipe's rounds cost on the workers that are present
run.py        what both kinds of simulations share: clocks, step times at random, failures, a log
together.py  the simulation of rounds that wait for all workers
quorum.py    the simulation of rounds that close with a quorum
simulate.py  one run, and its result
report.py    figures with their ranges, and what limits the run
show.py      all of that as text
"""
