"""`python -m tests.torture --rounds 300 --seed 1`: exit code 1 where anything was violated."""

from __future__ import annotations

import argparse
import sys

from tests.torture.run import main
from tests.torture.sabotage import SABOTAGE

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=300)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--sabotage", default="", choices=["", *SABOTAGE])
sys.exit(main(parser.parse_args()))
