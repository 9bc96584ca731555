"""Parquet: data.path is a file, a folder of them, or a pattern; the column data.text_field holds a text in each row.

Every row is a document, held out by the hash of its number. Texts that are null or empty are left out and counted.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from gpt.documents import Skipped, Source
from gpt.errors import DataError, shown
from gpt.schema import DataConfig
from gpt.sources import Files, in_blocks, located, path_label, source_of_rows

KEYS = {"path", "text_field", "val_fraction", "test_fraction"}
SUFFIXES = (".parquet", ".pq")
ALLOWED = f"a Parquet file, a folder of them, or a pattern ({' '.join(SUFFIXES)})"
ROWS, BYTES = 64, 2**24  # that are read at a time, about: some have books in each row


def label(config: DataConfig) -> str:
    return path_label(located(config, ALLOWED), config.text_field)


def source(config: DataConfig) -> Source:
    return source_of_rows(config, SUFFIXES, ALLOWED, texts, text_size)


def text_size(files: Files, field: str) -> int:
    """Bytes of a column, about: as they are before they are compressed, which a dictionary may have made few."""
    size = 0
    for path in files.paths.values():
        with opened(path, field) as file:
            size += sum(_column(file, group, field).total_uncompressed_size for group in range(file.num_row_groups))
    return size


def _column(file, group: int, field: str):
    """What the file says of a column in one of its groups of rows."""
    told = file.metadata.row_group(group)
    return next(one for one in map(told.column, range(told.num_columns)) if one.path_in_schema == field)


def rows_at_a_time(column) -> int:
    """As many as have BYTES, going by their mean; by all of a dictionary where that is most, since a row can be it."""
    row = column.total_uncompressed_size / max(1, column.num_values)
    start = column.dictionary_page_offset
    if start is not None and 2 * (column.data_page_offset - start) > column.total_compressed_size:
        row = column.total_uncompressed_size
    return int(min(ROWS, max(1, BYTES // max(1, row))))


def texts(paths: Iterable[Path], field: str, start: int) -> Iterator[Iterable[str] | Skipped]:
    """The rows of all files, from number `start` on."""
    for path in paths:
        yield from read(path, field, start)
        start = max(0, start - n_rows(path, field))


def n_rows(path: Path, field: str) -> int:
    with opened(path, field) as file:
        return file.metadata.num_rows


def opened(path: Path, field: str):
    """The open file. Raises DataError where it is no Parquet file or has no such column of texts."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{shown(path)}: cannot be read as Parquet ({str(error)[:100]})") from None
    if field not in file.schema_arrow.names:
        raise DataError(
            f"{shown(path)}: has no column {field!r}; allowed as data.text_field: {file.schema_arrow.names[:20]}"
        )
    kind = file.schema_arrow.field(field).type
    if pyarrow.types.is_dictionary(kind):  # a categorical column
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise DataError(f"{shown(path)}: column {field!r} holds {kind}, allowed: string")
    return file


def read(path: Path, field: str, start: int = 0) -> Iterator[Iterable[str] | Skipped]:
    """The text of each row from `start` on, in blocks. Raises DataError naming the file and the row."""
    import pyarrow

    row = 0
    try:
        with opened(path, field) as file:
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row + size <= start:
                    row += size
                    continue
                rows = rows_at_a_time(_column(file, group, field))
                for batch in file.iter_batches(rows, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        if row >= start:
                            text = value.as_py()
                            yield in_blocks(text) if text else Skipped("empty texts")
                        row += 1
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{shown(path)}: row {row:,} cannot be read ({str(error)[:100]})") from None
