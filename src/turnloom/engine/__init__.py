"""Engines: what samples tokens. `contract` is what each promises; `open` makes one from a URL.

`sglang` is the client of a server or router, with `stream` (decoding) and
`abort` (stopping) beside it. `local` starts `embedded`, a small server over
`llamacpp`, and speaks to it through the same client. `models` finds model files.
"""
