"""Runs mutmut on a seeded sample of the mutants of core and render, and says what survived.

Owns which mutants are tried and the report; mutmut makes them and runs the tests
(`tool.mutmut` in pyproject.toml says which). A run that was broken off goes on
where it stopped; what survived is tried again, since a test may have been added.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KILLED = {"killed", "timeout", "segfault", "caught by type check"}
ENOUGH = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the mutated sources and the results are kept")
    parser.add_argument("--sample", type=int, default=100, help="how many mutants, shared out by module; 0 is every one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    given = parser.parse_args()
    _enter(given.folder)
    names = _sample(_generate(given.jobs), given.sample, given.seed)
    _try(names, given.jobs)
    return _report(names, given.seed)


def _enter(folder: Path) -> None:
    """The working folder: links to the sources, and beside them mutmut's own copy. The checkout stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("src", "tests", "pyproject.toml"):
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    os.chdir(folder)
    # A tokenizer's threads do not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _generate(jobs: int) -> list[str]:
    from mutmut import __main__ as mutmut
    from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir

    Path("mutants").mkdir(exist_ok=True)
    with mutmut.CatchOutput(spinner_title="Generating mutants"):
        copy_src_dir()
        copy_also_copy_files()
        mutmut.create_mutants(jobs)
    return list(_results())


def _results() -> dict[str, str]:
    """What became of every mutant there is."""
    from mutmut import __main__ as mutmut
    from mutmut.stats import status_by_exit_code

    found, _ = mutmut.collect_source_file_mutation_data(mutant_names=())
    return {name: status_by_exit_code[code] for _, name, code in found}


def _module(name: str) -> str:
    return name.rpartition(".")[0].removeprefix("turnloom.")


def _sample(names: Sequence[str], size: int, seed: int) -> list[str]:
    """Each module's share, by its number of mutants. A module's draw does not depend on the other modules."""
    if not 0 < size < len(names):
        return list(names)
    by_module: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_module[_module(name)].append(name)
    exact = {module: size * len(found) / len(names) for module, found in by_module.items()}
    quota = {module: int(share) for module, share in exact.items()}
    largest_rest = sorted(exact, key=lambda module: (quota[module] - exact[module], module))
    for module in largest_rest[: size - sum(quota.values())]:
        quota[module] += 1
    return [
        name for module, found in by_module.items() for name in random.Random(f"{seed} {module}").sample(found, len(found))[: quota[module]]
    ]


def _try(names: Sequence[str], jobs: int) -> None:
    from mutmut import __main__ as mutmut

    done = _results()
    left = [name for name in names if done[name] not in KILLED]
    print(f"{len(names)} mutants, {len(left)} of them to try")
    if left:
        mutmut._run(left, jobs)


def _report(names: Sequence[str], seed: int) -> int:
    from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant

    results = _results()
    survivors = [name for name in names if results[name] not in KILLED]
    tried, lost = Counter(map(_module, names)), Counter(map(_module, survivors))
    for name in survivors:
        print(f"\n{results[name]}: {name}")
        print(get_diff_for_mutant(name, path=find_mutant(name).path))
    print("\n| module | mutants | killed |\n|---|---|---|")
    for module, count in sorted(tried.items()):
        print(f"| {module} | {count} | {count - lost[module]} |")
    killed = len(names) - len(survivors)
    print(f"\n{killed} of {len(names)} mutants killed (seed {seed})")
    return 0 if killed >= ENOUGH * len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
