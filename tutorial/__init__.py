"""The tutorial: chapters as notebooks kept as text, and the modules whose code they show.

Open a chapter in Jupyter (with jupytext), run it by ``python -m tutorial 1``, or read the
page that ``make tutorial`` makes of it in ``docs/tutorial``.
"""
