"""Turnloom inside a trainer's own process, one file per trainer. What a trainer's rows look like is known in `export` alone."""
