"""Samples as files, and the proof that a file keeps the laws.

`canonical` one sample as one row, and rows as JSON lines; `parquet` the same
rows in Parquet; `registry` formats by name; `files` atomic writing; `laws` what
a file can prove; `check` a file or an engine against them; `report` what a check found.

Rules: exporting reads only. A file appears whole or not at all. Nothing is
repaired on the way: what cannot be written exactly is refused.
"""
