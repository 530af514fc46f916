"""The laws over every chat template of the corpus, on random sessions: a table on stdout and in docs/exactness.md.

    python -m tests.properties.laws --sessions 2000 --jobs 2

The same command writes the same table. Exit code 1 when a law is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from tests.properties.report import document, table
from tests.properties.sampled import measure
from tests.properties.subjects import names
from tests.properties.trials import results

DOC = Path(__file__).parents[2] / "docs" / "exactness.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=2000, help="random sessions a template")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replies", type=int, default=48, help="replies sampled by the embedded model")
    parser.add_argument("--only", default="", help="names that hold this; the document is then not written")
    arguments = parser.parse_args()
    chosen = [name for name in names() if arguments.only in name]
    found = list(results(chosen, arguments.sessions, arguments.jobs))
    print("\n".join(table(found)))
    if not arguments.only:
        sampled = asyncio.run(measure(arguments.replies))
        print(f"\n{sampled}")
        DOC.write_text(document(found, arguments.sessions, sampled), "utf-8")
    broken = [f"{r.name}: {law}: {r.broken[law]} times, first {r.examples[law]}" for r in found for law in sorted(r.broken)]
    broken += [f"{r.name}: agreement: {line}" for r in found for line in (*r.cut.wrong[:1], *r.whole.wrong[:1])]
    print("\n".join(["", *(broken or ["zero violations"])]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
