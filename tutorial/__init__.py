"""The course: chapters as notebooks kept as text, and the modules whose code they show.

``python -m tutorial`` lists the chapters and the commands. Run one by ``python -m tutorial 1``,
open it in Jupyter as ``python -m tutorial.notebooks`` writes it, or read the page that
``make tutorial`` makes of it in ``docs/tutorial``.
"""
