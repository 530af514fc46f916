"""The SQLite file: its tables, its migrations, how it is opened, and what its errors mean.

One row per session, with what its turns add up to, and one row per delta, in the
order appended. Token columns are blobs; bodies are what `codec.pack` wrote, and
`crc` is of both, NULL in rows that were written before there was one. `begun` has
the turns that are being made: those left in it by a killed process were
interrupted. `application_id` says that a file is ours and `user_version` which
schema it has.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from turnloom.errors import StoreError

APPLICATION_ID = 0x544C4F4D  # "TLOM"

SIZE = "length(nodes) + length(body) + length(appended) + length(output) + length(logprobs)"
"""The bytes that a stored turn is counted for."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE sessions (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            key_hash TEXT NOT NULL,
            created REAL NOT NULL,
            status TEXT NOT NULL,
            body BLOB NOT NULL
        ) STRICT""",
        "CREATE UNIQUE INDEX sessions_by_key ON sessions (key_hash) WHERE key_hash != ''",
        "CREATE INDEX sessions_by_age ON sessions (created, number)",
        """CREATE TABLE deltas (
            number INTEGER PRIMARY KEY,
            session INTEGER NOT NULL,
            turn TEXT NOT NULL,
            outcome TEXT NOT NULL,
            nodes BLOB NOT NULL,
            body BLOB NOT NULL,
            appended BLOB NOT NULL,
            output BLOB NOT NULL,
            logprobs BLOB NOT NULL,
            UNIQUE (session, turn)
        ) STRICT""",
        "CREATE INDEX deltas_by_session ON deltas (session, number)",
    ),
    ("ALTER TABLE deltas ADD COLUMN abort TEXT NOT NULL DEFAULT ''",),
    (
        "ALTER TABLE deltas ADD COLUMN acknowledged INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN turns INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN touched REAL NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN interrupted INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN expires REAL",
        "ALTER TABLE sessions ADD COLUMN idle REAL",
        f"""UPDATE sessions SET touched = created,
            turns = (SELECT count(*) FROM deltas WHERE session = sessions.number),
            tokens = (SELECT coalesce(sum(length(output)) / 4, 0) FROM deltas WHERE session = sessions.number),
            bytes = (SELECT coalesce(sum({SIZE}), 0) FROM deltas WHERE session = sessions.number)""",
        "CREATE INDEX sessions_by_status ON sessions (status, created, number)",
        """CREATE TABLE begun (
            session INTEGER NOT NULL,
            turn TEXT NOT NULL,
            started REAL NOT NULL,
            PRIMARY KEY (session, turn)
        ) STRICT, WITHOUT ROWID""",
    ),
    ("ALTER TABLE sessions ADD COLUMN crc INTEGER", "ALTER TABLE deltas ADD COLUMN crc INTEGER"),
)
"""MIGRATIONS[n] brings a file from version n to n + 1."""

VERSION = len(MIGRATIONS)
BUSY_TIMEOUT = 10.0

CHECKPOINT_PAGES = 1000
"""So much of the write-ahead log is written before a commit folds it into the file, as soon as no reader needs what it has."""

WAL_BYTES = 16 * 2**20
"""What is left of the log when it was folded in, however large a slow reader or a great turn made it."""


def connect(path: Path, *, read_only: bool, busy_timeout: float = BUSY_TIMEOUT) -> sqlite3.Connection:
    """A connection to an existing file, checked to be a store. Autocommit; transactions are explicit. Raises StoreError."""
    mode = "ro" if read_only else "rw"
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode={mode}", uri=True, isolation_level=None, timeout=busy_timeout, check_same_thread=False
        )
    except FAILURES as error:
        raise explain(error, path) from error
    connection.text_factory = _text
    try:
        _check(connection, path, read_only=read_only)
        if not read_only:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA fullfsync=ON")
            connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
    except FAILURES as error:
        connection.close()
        raise explain(error, path) from error
    except StoreError:
        connection.close()
        raise
    return connection


def _text(data: bytes) -> str:
    """What is no UTF-8 is damaged, and must not keep its neighbours from being read."""
    return data.decode("utf-8", "replace")


def create(path: Path) -> None:
    """Make sure that a file exists, readable by its owner alone: it will hold whole conversations. Raises StoreError."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name itself must survive a power loss
        finally:
            os.close(directory)
    except FileExistsError:
        return
    except FileNotFoundError as error:
        raise StoreError(f"cannot create {path}: the directory {path.parent} does not exist; create it first") from error
    except OSError as error:
        raise StoreError(f"cannot create {path}: {error.strerror}") from error


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file to the newest schema, in one transaction. Raises StoreError."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for steps in MIGRATIONS[_version(connection) :]:
            for statement in steps:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    except FAILURES as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise explain(error, path) from error


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check(connection: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    version = _version(connection)
    if empty and not application and not read_only:
        return
    if application != APPLICATION_ID:
        raise StoreError(f"{path} {NO_STORE if read_only else NO_STORE_YET}")
    if version > VERSION:
        raise StoreError(f"{path} has schema {version} and this Turnloom knows up to {VERSION}; upgrade Turnloom to read it")
    if read_only and version < VERSION:
        raise StoreError(f"{path} has the older schema {version}; a gateway that serves it (`turnloom serve --store`) brings it up to date")


NO_STORE = "is not a Turnloom store; a copy of one that was in use is whole only with its -wal file beside it"
NO_STORE_YET = "is not a Turnloom store; give the path of one, or of a file that does not exist yet"

ADVICE = {
    "SQLITE_FULL": "the disk is full: free some space and go on; nothing was half-written",
    "SQLITE_BUSY": "it is locked by another program: close that program",
    "SQLITE_LOCKED": "it is locked by another program: close that program",
    "SQLITE_READONLY": "it cannot be written: check its permissions and those of its directory",
    "SQLITE_CANTOPEN": "it cannot be opened: check that it exists and that the directory can be written",
    "SQLITE_PERM": "access is denied: check its permissions",
    "SQLITE_NOTADB": f"it {NO_STORE_YET}",
    "SQLITE_CORRUPT": "it is damaged: restore it from a backup, or save what is left with `sqlite3 FILE .recover`",
    "SQLITE_IOERR": "reading or writing the disk failed: check the disk and the system log",
    "SQLITE_TOOBIG": "a single turn is larger than SQLite takes",
}


Failure = sqlite3.Error | UnicodeDecodeError
FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises: where its own words quote a damaged file, they may be no UTF-8."""


def explain(error: Failure, path: Path) -> StoreError:
    """The StoreError for what SQLite said about the file, with what to do."""
    name = "SQLITE_CORRUPT" if isinstance(error, UnicodeDecodeError) else getattr(error, "sqlite_errorname", "")
    advice = next((text for prefix, text in ADVICE.items() if name.startswith(prefix)), None)
    return StoreError(f"{path}: {advice} ({error})" if advice else f"{path}: {error}")
