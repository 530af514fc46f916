"""The token core: pure, no IO, no clock, no randomness.

`records` what the tree is made of; `match` when an echoed message is the one
we sent; `order` which call a result answers; `index` and `tree` prepare, stage,
apply; `restore` a request as it is on record; `forks` why a history did not continue a
held one; `unroll` the tree as loss-masked samples; `dump` the tree for a person.

Rules: only `Tree.apply` and `Tree.amend` mutate. A turn's tokens are never
changed or destroyed by what comes later.
"""
