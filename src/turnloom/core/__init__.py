"""The token core: pure, no IO, no clock, no randomness.

`records` what the tree is made of; `match` when an echoed message is the one
we sent; `tree` prepare, stage, apply; `forks` why a history did not continue a
held one; `unroll` the tree as loss-masked samples; `dump` the tree for a person.

Rules: only `Tree.apply` and `Tree.amend` mutate. A turn's tokens are never
changed or destroyed by what comes later.
"""
