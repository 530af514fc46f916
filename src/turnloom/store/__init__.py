"""Where sessions are kept.

`contract` what every store promises; `codec` records as bytes and back, pure;
`schema` the SQLite file: its tables, its migrations, what its errors mean;
`writer` the one thread that writes, with group commit; `sqlite` the durable
store; `memory` the same promises without a disk.

Rules: a store never interprets what it holds. What a coroutine wrote when it
returned survives `kill -9`; a cancelled caller never takes a write back.
"""
