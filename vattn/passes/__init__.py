"""Inductor passes: find a pattern around attention, probe what it computes, rewrite it, report it."""
