"""Mutants that no test can tell from the code, each with the reason.

Keyed by what mutants.Mutant.change gives: file, the lines that the change takes away, those that it
brings, each stripped.
"""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
