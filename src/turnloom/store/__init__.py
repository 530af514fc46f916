"""Where sessions are kept.

`contract` what every store promises; `codec` and `rows` records as bytes and
back, of `blobs`, with values of the types that they must be (`typed`), all pure;
`schema` the SQLite file: its tables, its migrations, what its errors mean;
`lock` who writes it; `writer` the one thread that writes, with group commit;
`readers` those that read; `lists` what is read of many sessions; `sqlite` the
durable store; `memory` the same promises without a disk; `fsck` whether a file
is whole.

Rules: a store never interprets what it holds. What a coroutine wrote when it
returned survives `kill -9`; a cancelled caller never takes a write back.
"""
