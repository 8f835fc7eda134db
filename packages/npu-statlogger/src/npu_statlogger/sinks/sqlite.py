"""A SQLite database: figures of intervals, requests, steps, runs and notes as tables to query while the server runs."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING, ClassVar

from npu_statlogger.errors import ConfigError
from npu_statlogger.lines import KINDS
from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.figures import flat, origin, row
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["Sqlite", "open_sink"]

_FIGURES = ("start", "end", "process", "model", "engine", "figure", "value")
_APPLICATION_ID = 0x6E707573  # "npus": whose database this is, in its header


def open_sink(config: StatLoggerConfig, run: Run) -> Sqlite:
    """Open the database and note who writes.

    Raises:
        ConfigError: the file is no database, or one of somebody else.
        OSError: it cannot be written.
    """
    assert config.sqlite is not None
    sink = Sqlite(config.sqlite)
    sink.write([run])
    return sink


class Sqlite(Sink):
    """Inserts every line, a transaction each time; several processes may share a database."""

    name: ClassVar[str] = "sqlite"

    def __init__(self, path: Path) -> None:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # readable by its owner only
            # Made by one thread, used and closed by the courier's.
            self._connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False, isolation_level=None)
            self._take_over(path)
        except sqlite3.OperationalError as error:
            msg = f"{path}: {error}"
            raise OSError(msg) from error
        except sqlite3.DatabaseError as error:
            msg = f"statistics go to a new SQLite database or one of npu-statlogger's; {path} is none: {error}."
            raise ConfigError(msg) from error

    def write(self, lines: Sequence[Line]) -> None:
        """Insert lines, all or none.

        Raises:
            sqlite3.Error: the database is locked, full or gone.
        """
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            for line in lines:
                if isinstance(line, Snapshot):
                    connection.executemany(_insert("figures", _FIGURES), _rows(line))
                else:
                    values = row(line)
                    connection.execute(_insert(f"{line.kind}s", tuple(values)), tuple(values.values()))

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _take_over(self, path: Path) -> None:
        """Make the tables of a new database; refuse one of somebody else."""
        connection = self._connection
        owner = connection.execute("PRAGMA application_id").fetchone()[0]
        if owner != _APPLICATION_ID and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            connection.close()
            msg = f"statistics go to a new SQLite database or one of npu-statlogger's; {path} holds something else."
            raise ConfigError(msg)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute("PRAGMA journal_mode = WAL")  # readers do not hold up the writer
        connection.execute(f"CREATE TABLE IF NOT EXISTS figures ({_names(_FIGURES)})")
        connection.execute("CREATE INDEX IF NOT EXISTS figures_of ON figures (figure, end)")
        for kind, cls in KINDS.items():
            connection.execute(f"CREATE TABLE IF NOT EXISTS {kind}s ({_names(tuple(cls.__dataclass_fields__))})")


def _rows(line: Snapshot) -> list[tuple[object, ...]]:
    return [(*origin(line).values(), name, value) for name, value in flat(line).items()]


def _insert(table: str, columns: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({_names(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608 # our own names


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in columns if name != "kind")
