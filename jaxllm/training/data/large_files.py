"""Random access to the rows of large files, by indexes that are built once and kept.

The index of a JSONL, text or CSV file holds the offsets of its rows. A Parquet file is copied to an
Arrow file of small record batches, since Parquet finds a row only by decoding a row group. Indexes
are in the folder ``data`` of the cache folder. They count as long as path, size and time of change
of the file are the same, and are replaced when the file changes.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from jaxtyping import Int64

from jaxllm.batch.tables.read import check_content, kind_of
from jaxllm.batch.tables.table import BOM, Table, check_distinct, csv_delimiter, csv_rows
from jaxllm.common.cells import Cells
from jaxllm.common.compiling import cache_folder
from jaxllm.common.errors import DataError, naming_file, shortened
from jaxllm.common.files import replacing
from jaxllm.common.optional_packages import require
from jaxllm.common.progress import progress_phase

LARGE_BYTES = 256 << 20
"""Files that are larger, all together, are indexed in the cache folder."""
BATCH_ROWS = 64
"""Rows of a record batch, all of which are read for one of them."""
_BLOCK = 1 << 24
_VERSION = 2
_BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\x0c"))

Places = Int64[np.ndarray, "N 2"]
"""Offset of each row in a file, and the number of its first line, from 1 on."""
Done = Callable[[int], None]
"""Called with the number of bytes of a file that are read so far."""


def total_bytes(files: Sequence[Path]) -> int:
    """Size of all files together."""
    return sum(file.stat().st_size for file in files)


def are_large(files: Sequence[Path]) -> bool:
    """True if the files are indexed in the cache folder."""
    return total_bytes(files) > LARGE_BYTES


def kept_index(file: Path, name: str, doing: str, build: Callable[[Path, Done], None]) -> Path:
    """A file in the cache that is made of `file`, now by `build` if it is not there.

    Args:
        doing: what `build` does with the file, for the messages of progress.

    Raises:
        DataError: the cache folder cannot be written.
    """
    stat = file.stat()
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:24]
    folder = cache_folder() / "data" / place
    kept = folder / f"{name}-{_VERSION}-{stat.st_size}-{stat.st_mtime_ns}"
    with naming_file(kept, DataError, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / "lock"):  # one process builds, the others wait for it
            if not kept.exists():
                for old in folder.glob(f"*{name}-*"):  # of an earlier content, or half written
                    old.unlink()
                with progress_phase(f"{doing} {file}") as update, replacing(kept) as half:

                    def done(size: int) -> None:
                        if update is not None:
                            update(file.name, size, stat.st_size)

                    build(half, done)
    return kept


def file_hash(file: Path) -> str:
    """SHA-256 of a file; that of a large one is kept."""
    if not are_large([file]):
        return read_hash([file])

    def build(half: Path, done: Done) -> None:
        half.write_text(read_hash([file], done))

    return kept_index(file, "sha256", "hashing", build).read_text()


def read_hash(files: Sequence[Path], done: Done = lambda size: None) -> str:
    """SHA-256 of the concatenated files, as ``cat FILES | sha256sum`` gives it."""
    digest = hashlib.sha256()
    for file in files:
        with naming_file(file, DataError, "read"), file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                done(stream.tell())
    return digest.hexdigest()


def row_places(
    file: Path, blocks: Callable[[Path], Iterator[Places]], index: str, *, keep: bool
) -> Places:
    """The places of the rows of a file.

    Args:
        blocks: finds the places, such as `line_blocks`.
        index: name of the kind of index, in the cache folder.
        keep: they are in the cache folder and mapped into memory; otherwise they are in memory.
    """
    if not keep:
        return np.concatenate([np.zeros((0, 2), np.int64), *blocks(file)])

    def build(half: Path, done: Done) -> None:
        with half.open("wb") as stream:
            for places in blocks(file):
                stream.write(places.tobytes())
                done(int(places[:, 0].max(initial=0)))

    kept = kept_index(file, index, "indexing", build)
    size = kept.stat().st_size
    return np.memmap(kept, np.int64, "r").reshape(-1, 2) if size else np.zeros((0, 2), np.int64)


def line_blocks(file: Path) -> Iterator[Places]:
    """Places of the non-blank lines of a file, after a BOM."""
    offset, lines = 0, 0
    with naming_file(file, DataError, "read"), file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            block += stream.readline()
            data = np.frombuffer(block, np.uint8)
            ends = np.flatnonzero(data == ord("\n")) + 1
            if not len(ends) or ends[-1] < len(block):
                ends = np.append(ends, len(block))
            starts = np.concatenate([[0], ends[:-1]])
            if offset == 0 and block.startswith(BOM):
                starts[0] = len(BOM)
            is_filled = ~_BLANK[data[np.minimum(starts, len(block) - 1)]]
            for index in np.flatnonzero(~is_filled):  # blank, or indented
                is_filled[index] = bool(block[starts[index] : ends[index]].strip())
            is_filled[starts >= ends] = False
            numbers = np.arange(len(starts)) + 1 + lines
            yield np.stack([starts + offset, numbers], axis=1)[is_filled]
            offset, lines = offset + len(block), lines + len(starts)


def csv_blocks(file: Path, delimiter: str | None = None) -> Iterator[Places]:
    """Places of the rows of a CSV or TSV file without its header.

    Args:
        delimiter: as `delimiter_of`.

    Raises:
        DataError: the file or a row is malformed.
    """
    with naming_file(file, DataError, "read"), file.open("rb") as stream:
        check_content(str(file), stream.peek(4096)[:4096], kind_of(file))
        rows = csv_rows(str(file), stream, delimiter_of(file, delimiter))
        *_, header = next(rows)
        check_distinct(str(file), header)
        while some := list(itertools.islice(rows, 1 << 16)):
            for number, _, _, cells in some:
                if len(cells) != len(header):
                    raise DataError(
                        f"{file}:{number}: has {len(cells)} cells, but the header {len(header)}"
                    )
            yield np.array([(start, number) for number, start, *_ in some], np.int64)


def delimiter_of(file: Path, delimiter: str | None = None) -> str:
    """The character between the cells of a CSV or TSV file; arguments are those of
    `csv_delimiter`."""
    with naming_file(file, DataError, "read"), file.open("rb") as stream:
        return csv_delimiter(str(file), kind_of(file), delimiter, stream)


class ArrowCopy(Table):
    """A Parquet file that is copied to an Arrow file in the cache folder."""

    def __init__(self, file: Path) -> None:
        arrow = require("pyarrow", extra="parquet", purpose="Parquet files")
        self.name, self._path = str(file), file
        copy = kept_index(file, "arrow", "copying", partial(_copy_parquet, file))
        # Not mapped: pages of all rows that were read would count as memory of the process.
        self._file = arrow.ipc.open_file(arrow.OSFile(str(copy)))
        self._lock = threading.Lock()
        last = self._file.num_record_batches - 1
        self._length = last * BATCH_ROWS + self._file.get_batch(last).num_rows if last >= 0 else 0

    def column_names(self) -> list[str]:
        return self._file.schema.names

    def sha256(self) -> str:
        return file_hash(self._path)

    def __len__(self) -> int:
        return self._length

    def cells(self, index: int) -> Mapping[str, Any]:
        with self._lock:
            batch = self._file.get_batch(index // BATCH_ROWS)
        cells = (column[index % BATCH_ROWS] for column in batch.columns)
        return Cells(dict(zip(batch.schema.names, cells, strict=True)))


def _copy_parquet(file: Path, copy: Path, done: Done) -> None:
    """Writes a Parquet file as an Arrow file, row group by row group.

    Raises:
        DataError: the file is malformed.
    """
    arrow = require("pyarrow", extra="parquet", purpose="Parquet files")
    parquet = require("pyarrow.parquet", extra="parquet", purpose="Parquet files")
    try:
        # pre_buffer would keep all row groups that were read.
        reader = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    except (ValueError, OSError) as failure:  # pyarrow's errors
        reason = shortened(str(failure))
        raise DataError(f"{file}: cannot be read as Parquet ({reason})") from None
    schema = reader.schema_arrow
    check_distinct(str(file), schema.names)
    for index, (name, kind) in enumerate(zip(schema.names, schema.types, strict=True)):
        if arrow.types.is_dictionary(kind):  # an Arrow file has one dictionary for all batches
            schema = schema.set(index, arrow.field(name, kind.value_type))

    def converted(column: Any, kind: Any) -> Any:
        return column if column.type == kind else column.cast(kind)

    rest = schema.empty_table()
    with arrow.OSFile(str(copy), "wb") as sink, arrow.ipc.new_file(sink, schema) as writer:
        size, count, rows = file.stat().st_size, reader.metadata.num_rows, 0
        for batch in reader.iter_batches(64 * BATCH_ROWS):
            rows += len(batch)
            done(size * rows // count)
            columns = map(converted, batch.columns, schema.types)
            more = arrow.Table.from_arrays(list(columns), schema=schema)
            table = arrow.concat_tables([rest, more]).combine_chunks()
            whole = len(table) // BATCH_ROWS * BATCH_ROWS
            if whole:
                writer.write_table(table.slice(0, whole), BATCH_ROWS)
            rest = table.slice(whole)
        if len(rest):
            writer.write_table(rest)
